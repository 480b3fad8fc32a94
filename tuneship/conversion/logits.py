"""The logits of fixed texts by our engine with an adapter and by transformers, and how far apart they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tuneship.parity import prompts
from tuneship.serving.adapters import read_adapter
from tuneship.serving.lora import Lora
from tuneship.serving.model import CausalModel, ModelRefused
from tuneship.serving.parity_check import check_parity
from tuneship.serving.replica import load_model
from tuneship.serving.weights_choice import logits_of_engine, text_tokens
from tuneship.template import PromptTemplate

ADAPTER = "adapter"
Encode = Callable[[str], list[int]]


def tokenizer_of(base: Path) -> Any:
    """The model's tokenizer."""
    return Tokenizer.from_file(str(base / "tokenizer.json"))


def encoder_of(tokenizer: Any) -> Encode:
    """The encoding of a text without special tokens of the tokenizer's own."""
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def engine_with_adapter(base: Path, adapter: Path) -> tuple[CausalModel, Lora]:
    """Our engine with the adapter loaded as `ADAPTER`. Raises `AdapterRefused` and `ModelRefused`.

    Where the adapter has the logits of its training, they are compared first.
    """
    model = load_model(base, "float32")
    lora = Lora(model.sites, model.facts.cache.dtype)
    lora.load(ADAPTER, read_adapter(adapter))
    check_parity(model, lora, ADAPTER, adapter)
    return model, lora


def engine_logits(model: CausalModel, lora: Lora, tokens: list[int]) -> Tensor:
    """The logits [tokens, vocabulary] of the adapter after each token of a text."""
    lora.acquire(ADAPTER)
    try:
        return logits_of_engine(model, tokens, lora, lora.route([], [(ADAPTER, 0, len(tokens))]))
    finally:
        lora.release(ADAPTER)


@torch.inference_mode()
def transformers_logits(model: Any, tokens: list[int]) -> Tensor:
    """The same, as a model of transformers or peft computes them."""
    ids = torch.tensor([tokens], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


def fixed_texts(base: Path, adapter: Path, context_length: int, vocabulary: int) -> list[list[int]]:
    """The token ids of the fixed texts: a plain one, and the prompts of the parity file in the adapter's template.

    Raises `ModelRefused` for a tokenizer of another model.
    """
    tokenizer, template = tokenizer_of(base), PromptTemplate.load(adapter)
    texts = [text_tokens(tokenizer, context_length)]
    texts += [tokens for _, tokens in prompts(template, encoder_of(tokenizer), context_length)]
    if max(map(max, texts)) >= vocabulary:
        raise ModelRefused("its tokenizer and its weights do not belong together")
    return texts


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Root mean square of the differences of all logits, as a share of the standard deviation of the expected ones."""
    one, other = torch.cat(found), torch.cat(expected)
    return float((one - other).square().mean().sqrt() / other.std())
