"""Chooses one token per row of logits, each by its own temperature, top_p and random draw."""

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from tuneship.serving.sequence import GREEDY_BELOW

# Candidates looked at first: the nucleus of a trained model is nearly always smaller.
_NUCLEUS_TOKENS = 64
# If they do not hold it, the least probability of a candidate is divided by this factor again and
# again; below this probability, or in a vocabulary up to this size, all tokens are candidates.
_WIDEN_FACTOR, _MIN_PROBABILITY, _SMALL_VOCABULARY = 8, 1e-9, 8192


def choose(
    logits: Tensor, temperatures: Items[float], top_ps: Items[float], draws: Items[float]
) -> tuple[list[float], list[int]]:
    """Return the highest value and the chosen token of each row of logits [R, vocabulary].

    Draws are uniform in [0, 1); a temperature below `GREEDY_BELOW` is greedy. The highest value of a row that holds a
    NaN is NaN.
    """
    values = logits.numpy()
    best = values.argmax(-1)  # numpy's takes a tenth of the time of torch's
    tokens: list[int] = best.tolist()
    sampled = [row for row, temperature in enumerate(temperatures) if temperature >= GREEDY_BELOW]
    if sampled:
        divisors = torch.tensor([temperatures[row] for row in sampled])
        below_best = logits[sampled] - logits[sampled, best[sampled], None]
        # The highest stays 0: no overflow.
        probabilities = (below_best / divisors[:, None]).softmax(-1)
        for row, likely in zip(sampled, probabilities, strict=True):
            tokens[row] = _draw(likely, top_ps[row], draws[row])
    return values[np.arange(len(values)), best].tolist(), tokens


def _draw(probabilities: Tensor, top_p: float, draw: float) -> int:
    """Sample from the nucleus (the fewest likely tokens whose mass reaches top_p), by its inverse distribution."""
    if top_p >= 1:
        return _place(probabilities.cumsum(0), draw)
    # Sorting a whole vocabulary takes 10 ms.
    likely, tokens = probabilities.topk(min(_NUCLEUS_TOKENS, len(probabilities)))
    if float(likely.sum()) < top_p:
        least = float(likely[-1])
        while least and float(likely.sum()) < top_p:
            is_narrow = least > _MIN_PROBABILITY and len(probabilities) > _SMALL_VOCABULARY
            least = least / _WIDEN_FACTOR if is_narrow else 0.0
            tokens = (probabilities >= least).nonzero()[:, 0]
            likely = probabilities[tokens]
        # Stable, so that tokens of equal probability always come in the same order.
        likely, order = likely.sort(descending=True, stable=True)
        tokens = tokens[order]

    mass = likely.cumsum(0)
    kept = min(int(torch.searchsorted(mass, top_p)), len(mass) - 1) + 1
    return int(tokens[_place(mass[:kept], draw)])


def _place(mass: Tensor, draw: float) -> int:
    """Index of the first token whose cumulative mass exceeds the share `draw` of the whole."""
    # In float32 this share may round up to the whole, which no token exceeds. Behind the token that completes the
    # whole, there are only those that cannot be drawn.
    completing = int(torch.searchsorted(mass, mass[-1]))
    return min(int(torch.searchsorted(mass, draw * float(mass[-1]), right=True)), completing)
