"""Chooses the number format of a base model's weights by measurement: the fastest that keeps a fixed text's loss."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from tokenizers import Tokenizer
from torch import Tensor

from tuneship.prompts.text_tokenizer import TokenizerFault, load_tokenizer
from tuneship.serving.batch import FlatBatch
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.lora import Lora, Routes
from tuneship.serving.models.model import CausalModel, ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest, Sequence
from tuneship.serving.weights import FLOATS, QUANTISED

TEXT = (
    "A patient comes to the clinic with a cough that has lasted for three weeks. The doctor listens to the lungs, asks "
    "about fever and smoking, and orders an X-ray of the chest. Two days later the results are there: 14 of 16 values "
    "are normal, and the picture shows a small shadow. We shall look at it again in a month, she says."
)
# The loss may be this much larger than with float32.
ALLOWED_LOSS = 1.01
# Tokens of a prompt and of an answer by which a format's speed is measured. The fastest step
# counts: other work on the machine makes steps slower and never faster.
PROMPT_TOKENS, ANSWER_TOKENS = 8, 24


@dataclass(frozen=True, slots=True)
class MeasuredWeights:
    """A number format with its measurements."""

    weights: str
    # Mean loss of the tokens of a fixed text.
    loss: float
    # Seconds of the fastest step with one request.
    step_s: float


def text_tokens(tokenizer: Tokenizer, context_length: int) -> list[int]:
    """The token ids of the fixed text, cut to the context length."""
    encoding: Any = tokenizer.encode(TEXT, add_special_tokens=False)
    return list(encoding.ids)[:context_length]


def losses_of_engine(model: CausalModel, tokens: list[int]) -> Tensor:
    """The loss of each token except the first, as our engine computes it."""
    no_adapters = Lora(model.sites, model.facts.cache.dtype)
    return token_losses(logits_of_engine(model, tokens, no_adapters, Routes((), None)), tokens)


@torch.inference_mode()
def logits_of_engine(model: CausalModel, tokens: list[int], lora: Lora, routes: Routes) -> Tensor:
    """The logits [tokens, vocabulary] after each token of a text, with a KV cache of their own."""
    sequence = Sequence("text", GenerateRequest(tuple(tokens), max_tokens=1), 1, slot=0)
    cache = SlotCache.of_one(model.facts.cache, len(tokens))
    # The engine computes the logits of a prompt's last token alone; here all of them are of interest.
    batch = replace(
        FlatBatch.of([sequence], [len(tokens)]), logit_indices=torch.arange(len(tokens))
    )
    return model.forward(batch, cache, lora, routes)


def token_losses(logits: Tensor, tokens: list[int]) -> Tensor:
    """The loss of each token but the first, by logits [tokens, vocabulary]."""
    return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


def measured_weights(directory: Path) -> list[MeasuredWeights]:
    """Load a model in each format that it can have, and measure it. Raises `ModelRefused` if it cannot be loaded."""
    try:
        tokenizer = load_tokenizer(directory)
    except TokenizerFault as fault:
        raise ModelRefused(f"the base model cannot be used: {fault}") from fault
    found: list[MeasuredWeights] = []
    for weights in (*FLOATS, *QUANTISED):
        try:
            model = load_model(directory, weights)
        except ModelRefused:
            if weights in FLOATS:
                raise
            continue  # of a kind or shape that is not quantised
        tokens = text_tokens(tokenizer, model.facts.context_length)
        if len(tokens) < 2 or max(tokens) >= model.facts.vocabulary:
            raise ModelRefused("the base model's tokenizer and its weights do not belong together")
        loss = float(losses_of_engine(model, tokens).mean())
        found.append(MeasuredWeights(weights, loss, _step_seconds(model, tokens)))
        del model  # the memory of one model at a time
    return found


def fastest(measured: list[MeasuredWeights]) -> MeasuredWeights:
    """The fastest format that keeps the loss; the first of `measured` is the one that the loss is compared with."""
    limit = measured[0].loss * ALLOWED_LOSS
    return min(
        (one for one in measured if one is measured[0] or one.loss <= limit),
        key=lambda one: one.step_s,
    )


def _step_seconds(model: CausalModel, tokens: list[int]) -> float:
    engine = Engine(model, EngineLimits(slots=1))
    prompt = tuple(tokens[: max(1, min(PROMPT_TOKENS, model.facts.context_length - 2))])
    engine.submit("text", GenerateRequest(prompt, ANSWER_TOKENS))
    engine.step()  # the prompt
    seconds: list[float] = []
    while not engine.idle:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
