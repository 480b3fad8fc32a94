"""The logits of fixed texts by our engine with an adapter and by transformers, and how far apart they are."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from tuneship.prompts.parity import Probe, greedy_count, prompts
from tuneship.prompts.template import PromptTemplate
from tuneship.prompts.text_tokenizer import encode, load_tokenizer
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.models.model import ModelRefused
from tuneship.serving.parity_check import answer_logits
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest
from tuneship.serving.weights_choice import logits_of_engine, text_tokens
from tuneship.training.base_model import load_base
from tuneship.training.parity_notes import probe_of

# A GPU is left to those who serve and train.
CPU = torch.device("cpu")
ADAPTER = "adapter"
Talk = tuple[list[dict[str, str]], list[int]]


def engine_with_adapter(base: Path, adapter: Path) -> Engine:
    """Our engine with the adapter loaded as `ADAPTER`. Raises `AdapterRefused` and `ModelRefused`.

    Where the adapter has the logits of its training, they are compared first.
    """
    engine = Engine(load_model(base, "float32"), EngineLimits(slots=1))
    engine.load(ADAPTER, adapter)
    return engine


def engine_logits(engine: Engine, tokens: list[int]) -> Tensor:
    """The logits [tokens, vocabulary] of the adapter after each token of a text."""
    lora = engine.lora
    lora.acquire(ADAPTER)
    try:
        routes = lora.route([], [(ADAPTER, 0, len(tokens))])
        return logits_of_engine(engine.model, tokens, lora, routes)
    finally:
        lora.release(ADAPTER)


def engine_answer(engine: Engine, messages: list[dict[str, str]], prompt: list[int]) -> Probe:
    """The engine's greedy answer to a prompt, generated token by token, with the logits of each choice."""
    count = greedy_count(prompt, engine.model.facts.context_length)
    engine.submit("answer", GenerateRequest(tuple(prompt), count, ADAPTER))
    answer: list[int] = []
    while not engine.idle:
        answer += [token for _, token in engine.step().tokens]
    [logits] = answer_logits(engine.model, engine.lora, ADAPTER, [(prompt, answer)])
    return replace(probe_of(messages, prompt, logits), greedy=answer)


def peft_model(base: Path, adapter: Path) -> Any:
    """The base model in float32 with the adapter, as peft reads them."""
    model: Any = float32_model(base)
    # peft would read the adapter onto a GPU.
    place = {"torch_device": CPU.type, "local_files_only": True}
    return PeftModel.from_pretrained(model, str(adapter), **place).eval()


def float32_model(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32, as transformers reads it."""
    return load_base(str(folder), choose_format=lambda _: torch.float32, place=CPU).eval()


@torch.inference_mode()
def transformers_logits(model: Any, tokens: list[int]) -> Tensor:
    """The same logits, computed by a model of transformers or peft."""
    ids = torch.tensor([tokens], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


def fixed_texts(
    base: Path, adapter: Path, context_length: int, vocabulary: int
) -> tuple[list[int], list[Talk]]:
    """Token ids of fixed inputs: a plain text, and the parity file's conversations with their prompts.

    Raises `ModelRefused` for a tokenizer of another model.
    """
    tokenizer, template = load_tokenizer(base), PromptTemplate.load(adapter, base=base)
    text = text_tokens(tokenizer, context_length)
    talks = prompts(template, partial(encode, tokenizer), context_length)
    if max(map(max, [text, *(prompt for _, prompt in talks)])) >= vocabulary:
        raise ModelRefused("its tokenizer and its weights do not belong together")
    return text, talks


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Root mean square difference of all logits, divided by the standard deviation of the expected ones."""
    one, other = torch.cat(found), torch.cat(expected)
    return float((one - other).square().mean().sqrt() / other.std())
