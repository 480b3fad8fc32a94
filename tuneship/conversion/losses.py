"""The losses of a fixed text's tokens, as transformers computes them; and our engine's answer to a fixed question."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuneship.conversion.order import QUESTION
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import continuation, encode
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.models.model import CausalModel
from tuneship.serving.sequence import GenerateRequest
from tuneship.serving.weights_choice import token_losses

ANSWER_TOKENS = 32


@torch.inference_mode()
def losses_of_source(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The loss of each token but the first, as transformers computes it."""
    logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    return token_losses(logits[0].float().cpu(), tokens)


def answer_of(model: CausalModel, text_format: ModelTextFormat) -> str:
    """The engine's greedy answer to a fixed question."""
    messages = [{"role": "user", "content": QUESTION}]
    rendered = text_format.template.render(messages, add_generation_prompt=True)
    prompt = encode(text_format.tokenizer, rendered)
    engine = Engine(model, EngineLimits(slots=1))
    engine.submit(
        "question",
        GenerateRequest(tuple(prompt), ANSWER_TOKENS, stop_tokens=text_format.stop_tokens),
    )
    generated: list[int] = []
    while not engine.idle:
        result = engine.step()
        generated += [token for _, token in result.tokens]
    return continuation(text_format.tokenizer, prompt, generated).strip()
