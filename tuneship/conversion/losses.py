"""The losses of a fixed text's tokens, as transformers computes them and as our engine does; and an answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from tuneship.conversion.order import QUESTION
from tuneship.serving.batch import FlatBatch
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.lora import Lora, Routes
from tuneship.serving.model import CausalModel
from tuneship.serving.sequence import GenerateRequest, Sequence
from tuneship.template import PromptTemplate

TEXT = (
    "A patient comes to the clinic with a cough that has lasted for three weeks. The doctor listens to the lungs, asks "
    "about fever and smoking, and orders an X-ray of the chest. Two days later the results are there: 14 of 16 values "
    "are normal, and the picture shows a small shadow. We shall look at it again in a month, she says."
)
ANSWER_TOKENS = 32


def text_tokens(tokenizer: Tokenizer, context_length: int) -> list[int]:
    """The token ids of the fixed text, cut to the context length."""
    encoding: Any = tokenizer.encode(TEXT, add_special_tokens=False)
    return list(encoding.ids)[:context_length]


@torch.inference_mode()
def losses_of_source(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The loss of each token but the first, as transformers computes it."""
    logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    return _losses(logits[0].float().cpu(), tokens)


@torch.inference_mode()
def losses_of_engine(model: CausalModel, tokens: list[int]) -> Tensor:
    """The loss of each token but the first, as our engine computes it."""
    sequence = Sequence("text", GenerateRequest(tuple(tokens), max_tokens=1), 1, slot=0)
    cache = SlotCache(model.facts.cache, slots=1, length=len(tokens))
    cache.resize(1, len(tokens))
    # The engine computes the logits of a prompt's last token alone; here all of them are of interest.
    batch = replace(
        FlatBatch.of([sequence], [len(tokens)]), logit_indices=torch.arange(len(tokens))
    )
    no_adapters = Lora(model.sites, model.facts.cache.dtype)
    return _losses(model.forward(batch, cache, no_adapters, Routes((), None)), tokens)


def _losses(logits: Tensor, tokens: list[int]) -> Tensor:
    return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


def question_prompt(folder: Path) -> str:
    """The prompt of a plain question. Raises `TemplateFailed` for a template that does not render it."""
    messages = [{"role": "user", "content": QUESTION}]
    return PromptTemplate.load(folder).render(messages, add_generation_prompt=True)


def answer_of(model: CausalModel, folder: Path, tokenizer: Tokenizer, ends: list[int]) -> str:
    """The engine's greedy answer to a fixed question."""
    prompt: Any = tokenizer.encode(question_prompt(folder), add_special_tokens=False)
    engine = Engine(model, EngineLimits(slots=1))
    engine.submit(
        "question", GenerateRequest(tuple(prompt.ids), ANSWER_TOKENS, stop_tokens=tuple(ends))
    )
    generated: list[int] = []
    while not engine.idle:
        result = engine.step()
        generated += [token for _, token in result.tokens]
    return tokenizer.decode(generated).strip()
