"""Logits -> one token per row, each row by its own temperature, top_p and draws. Knows no sequences."""

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

_NUCLEUS = 64
"""Candidates looked at before a full sort: the nucleus of a trained model is nearly always smaller."""


def choose(
    logits: Tensor, temperatures: Items[float], top_ps: Items[float], draws: Items[float]
) -> tuple[list[float], list[int]]:
    """For logits [R, vocabulary] the highest value and the chosen token of each row.

    A draw is uniform in [0, 1); temperature 0 is greedy. The highest value of a row that holds a NaN is NaN.
    """
    values = logits.numpy()
    best = values.argmax(-1)  # numpy's takes a tenth of the time of torch's
    tokens: list[int] = best.tolist()
    sampled = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if sampled:
        heat = torch.tensor([temperatures[row] for row in sampled])
        probabilities = (logits[sampled] / heat[:, None]).softmax(-1)
        for row, likely in zip(sampled, probabilities, strict=True):
            tokens[row] = _draw(likely, top_ps[row], draws[row])
    return values[np.arange(len(values)), best].tolist(), tokens


def _draw(probabilities: Tensor, top_p: float, draw: float) -> int:
    """Inverse of the cumulative distribution over the nucleus: the fewest tokens whose mass reaches top_p."""
    if top_p >= 1:
        mass = probabilities.cumsum(0)
        return min(int(torch.searchsorted(mass, draw * float(mass[-1]), right=True)), len(mass) - 1)
    likely, tokens = probabilities.topk(min(_NUCLEUS, len(probabilities)))
    mass = likely.cumsum(0)
    if mass[-1] < top_p:
        likely, tokens = probabilities.sort(descending=True, stable=True)
        mass = likely.cumsum(0)
    kept = min(int(torch.searchsorted(mass, top_p)), len(mass) - 1) + 1
    place = int(torch.searchsorted(mass[:kept], draw * float(mass[kept - 1]), right=True))
    return int(tokens[min(place, kept - 1)])
