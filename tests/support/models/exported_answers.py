"""Greedy answers of a tuned model, by the service and by the programs that read its exports."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from openai import OpenAI

from tuneship.conversion.order import GGUF_FILE

MAX_TOKENS = 32


@dataclass(frozen=True)
class GreedyAnswer:
    """The text of each token of an answer, without its end token, and why it ended."""

    tokens: tuple[str, ...]
    finish: Literal["stop", "length"]


def by_service(client: OpenAI, model: str, questions: Sequence[str]) -> list[GreedyAnswer]:
    """The answers of a running service through OpenAI's API."""
    answers: list[GreedyAnswer] = []
    for question in questions:
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_completion_tokens=MAX_TOKENS,
            temperature=0,
            logprobs=True,
        )
        choice = completion.choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.finish_reason in ("stop", "length")
        tokens = tuple(one.token for one in choice.logprobs.content)
        answers.append(GreedyAnswer(tokens, choice.finish_reason))
    return answers


def by_transformers(checkpoint: Path, questions: Sequence[str]) -> list[GreedyAnswer]:
    """The answers of a merged export in float32, ended by its own generation settings."""
    return _generated(_loaded(checkpoint), checkpoint, questions)


def by_peft(base: Path, adapter: Path, questions: Sequence[str]) -> list[GreedyAnswer]:
    """The answers of a base model in float32 with the exported adapter."""
    peft: Any = import_module("peft")
    return _generated(peft.PeftModel.from_pretrained(_loaded(base), str(adapter)), base, questions)


def by_llama_cpp(folder: Path, questions: Sequence[str]) -> list[GreedyAnswer]:
    """The answers of a GGUF export by llama.cpp."""
    xllamacpp: Any = import_module("xllamacpp")  # it has no types
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / GGUF_FILE)
    params.n_ctx, params.n_parallel, params.warmup, params.port = 512, 1, False, 0
    server = xllamacpp.Server(params)
    answers: list[GreedyAnswer] = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        asked = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": True}
        choice = server.handle_chat_completions(asked)["choices"][0]
        # The token that ended the answer is listed without a text.
        tokens = tuple(one["token"] for one in choice["logprobs"]["content"] if one["token"])
        answers.append(GreedyAnswer(tokens, choice["finish_reason"]))
    return answers


def _loaded(checkpoint: Path) -> Any:
    torch, transformers = import_module("torch"), import_module("transformers")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return loaded.eval()


def _generated(model: Any, tokenizer_of: Path, questions: Sequence[str]) -> list[GreedyAnswer]:
    transformers = import_module("transformers")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    answers: list[GreedyAnswer] = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        whole = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        ids = whole[0, prompt["input_ids"].shape[1] :].tolist()
        ends = model.generation_config.eos_token_id
        is_ended = ids[-1] in (ends if isinstance(ends, list) else [ends])
        tokens = tuple(tokenizer.decode([one]) for one in (ids[:-1] if is_ended else ids))
        answers.append(GreedyAnswer(tokens, "stop" if is_ended else "length"))
    return answers
