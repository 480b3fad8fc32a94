"""The losses of a fixed text's tokens, as transformers computes them; and our engine's answer to a fixed question."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from tuneship.conversion.order import QUESTION
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.model import CausalModel
from tuneship.serving.sequence import GenerateRequest
from tuneship.serving.weights_choice import token_losses
from tuneship.template import PromptTemplate

ANSWER_TOKENS = 32


@torch.inference_mode()
def losses_of_source(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The loss of each token but the first, as transformers computes it."""
    logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    return token_losses(logits[0].float().cpu(), tokens)


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
