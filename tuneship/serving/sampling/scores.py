"""Log probabilities of tokens: the log-softmax of the model's own logits, before temperature, nucleus and grammar."""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tuneship.serving.sequence import TokenScore

# Logits of prompts that one step may compute beside those that it draws from: 64 MB in float32.
PROMPT_LOGITS = 1 << 24
# Stands for minus infinity, which JSON has not.
LEAST_LOGPROB = -9999.0


def scores_of(logits: Tensor, tokens: Items[int], alternatives: Items[int]) -> list[TokenScore]:
    """Score one token of each row of logits [R, vocabulary], with as many of the row's likeliest as it asks for."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = _finite(logits.gather(-1, torch.tensor(tokens)[:, None]) - total)[:, 0]
    likeliest, places = logits.topk(min(max(alternatives), logits.shape[-1]))
    rows = zip(
        tokens,
        chosen.tolist(),
        places.tolist(),
        _finite(likeliest - total).tolist(),
        alternatives,
        strict=True,
    )
    return [
        TokenScore(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, ids, values, count in rows
    ]


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB)
