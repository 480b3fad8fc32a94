"""Logits -> one token per row, each row by its own temperature, top_p and draws. Knows no sequences."""

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from tuneship.serving.sequence import GREEDY_BELOW

# Candidates looked at first: the nucleus of a trained model is nearly always smaller.
_NUCLEUS = 64
# Then so many times less likely ones are taken in at a time; all of them below this, or when
# there are no more.
_WIDER, _LEAST, _FEW = 8, 1e-9, 8192


def choose(
    logits: Tensor, temperatures: Items[float], top_ps: Items[float], draws: Items[float]
) -> tuple[list[float], list[int]]:
    """For logits [R, vocabulary] the highest value and the chosen token of each row.

    A draw is uniform in [0, 1); a temperature below `GREEDY_BELOW` is greedy. The highest value of a row that
    holds a NaN is NaN.
    """
    values = logits.numpy()
    best = values.argmax(-1)  # numpy's takes a tenth of the time of torch's
    tokens: list[int] = best.tolist()
    sampled = [row for row, temperature in enumerate(temperatures) if temperature >= GREEDY_BELOW]
    if sampled:
        heat = torch.tensor([temperatures[row] for row in sampled])
        below_best = logits[sampled] - logits[sampled, best[sampled], None]
        probabilities = (below_best / heat[:, None]).softmax(-1)  # the highest stays 0: no overflow
        for row, likely in zip(sampled, probabilities, strict=True):
            tokens[row] = _draw(likely, top_ps[row], draws[row])
    return values[np.arange(len(values)), best].tolist(), tokens


def _draw(probabilities: Tensor, top_p: float, draw: float) -> int:
    """Inverse of the cumulative distribution over the nucleus: the fewest tokens whose mass reaches top_p."""
    if top_p >= 1:
        mass = probabilities.cumsum(0)
        return min(int(torch.searchsorted(mass, draw * float(mass[-1]), right=True)), len(mass) - 1)
    likely, tokens = _likely(probabilities, top_p)
    mass = likely.cumsum(0)
    kept = min(int(torch.searchsorted(mass, top_p)), len(mass) - 1) + 1
    place = int(torch.searchsorted(mass[:kept], draw * float(mass[kept - 1]), right=True))
    return int(tokens[min(place, kept - 1)])


def _likely(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in order, so many that they hold the nucleus: to sort a whole vocabulary takes 10 ms."""
    likely, tokens = probabilities.topk(min(_NUCLEUS, len(probabilities)))
    if float(likely.sum()) >= top_p:
        return likely, tokens
    least = float(likely[-1])
    while least and float(likely.sum()) < top_p:
        least = least / _WIDER if least > _LEAST and len(probabilities) > _FEW else 0.0
        tokens = (probabilities >= least).nonzero()[:, 0]
        likely = probabilities[tokens]
    likely, order = likely.sort(descending=True, stable=True)
    return likely, tokens[order]
