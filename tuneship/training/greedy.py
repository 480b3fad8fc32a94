"""The greedy answer of a transformers or peft model, as logits, for comparison with an engine's answer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def greedy_logits(model: Any, prompt: Sequence[int], count: int) -> Tensor:
    """The logits [count, vocabulary] that choose the first tokens after a prompt, each the likeliest one."""
    tokens = torch.tensor([prompt], device=model.device)
    cache: Any = None
    rows: list[Tensor] = []
    while len(rows) < count:
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        rows.append(output.logits[0, -1].float())
        cache = getattr(output, "past_key_values", None)
        chosen = rows[-1].argmax().view(1, 1)
        # A model without a KV cache reads everything again.
        tokens = torch.cat([tokens, chosen], 1) if cache is None else chosen
    return torch.stack(rows)
