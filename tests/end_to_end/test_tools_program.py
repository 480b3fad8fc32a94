"""A program of OpenAI's tunes the shipped model on calls of functions, and lets it call them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.openai.openai_clients import of_process
from tests.support.service.processes import Serve
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.prompts.template import PromptTemplate

pytestmark = [pytest.mark.slow, pytest.mark.long]

BASE = Path(__file__).parents[2] / "tuneship" / "base_models" / "tuneship-tiny"
CODES = [f"{letter}{number:02}" for letter in "ABCE" for number in range(12)]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"}},
    "required": ["code"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}]


def asked(code: str) -> Any:
    return {"role": "user", "content": f"Is the code {code} valid?"}


def example(code: str) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": json.dumps({"code": code})}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        asked(code),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "valid"},
        {"role": "assistant", "content": f"{code} is valid."},
    ]
    return {"messages": messages, "tools": TOOLS, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    started = Serve(tmp_path_factory.mktemp("tools") / "data")
    yield started
    started.kill()


@pytest.fixture(scope="module")
def client(served: Serve) -> Iterator[openai.OpenAI]:
    with of_process(served) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    """The model that was tuned on calls."""
    content = "".join(json.dumps(example(code)) + "\n" for code in CODES).encode()
    file = client.files.create(file=("calls.jsonl", io.BytesIO(content)), purpose="fine-tune")
    hyperparameters: Any = {"n_epochs": 3, "batch_size": 8}
    job = client.fine_tuning.jobs.create(
        model="tuneship-tiny",
        training_file=file.id,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    )
    until(lambda: client.fine_tuning.jobs.retrieve(job.id).finished_at)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    assert job.fine_tuned_model is not None
    return job.fine_tuned_model


def test_the_tuned_model_calls_the_function_and_goes_on_with_its_result(
    client: openai.OpenAI, model: str
) -> None:
    messages: list[Any] = [asked("B05")]
    options: Any = {"model": model, "tools": TOOLS, "max_tokens": 100, "temperature": 0}
    free = client.chat.completions.create(messages=messages, **options)
    assert free.choices[0].finish_reason == "tool_calls", free.choices[0].message
    (call,) = free.choices[0].message.tool_calls or ()
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    messages += [
        free.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "valid"},
    ]
    last = client.chat.completions.create(messages=messages, **options)
    assert last.choices[0].finish_reason == "stop"
    assert "valid" in (last.choices[0].message.content or "")


@pytest.mark.parametrize("named", ["tuneship-tiny", "tuned"])
def test_a_call_that_is_required_comes_whatever_the_model_learnt(
    client: openai.OpenAI, model: str, named: str
) -> None:
    asking: Any = {
        "model": model if named == "tuned" else named,
        "messages": [asked("C07")],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "seed": 1,
    }
    whole = client.chat.completions.create(n=4, **asking)
    for choice in whole.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or ()
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    chunks = [*client.chat.completions.create(stream=True, **asking)]
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    streamed = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert streamed == (whole.choices[0].message.tool_calls or ())[0].function.arguments


def test_the_models_own_template_writes_calls_for_other_programs(
    served: Serve, model: str, tmp_path: Path
) -> None:
    with Client(served.settings_with("models:read,models:content")) as client:
        client.models.download(tmp_path / "adapter", model, format="peft")
    template = PromptTemplate.load(tmp_path / "adapter")
    specials = {name: text for name, text in template.special_tokens.items() if text}
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_file=str(BASE / "tokenizer.json"), chat_template=template.source, **specials
    )
    function = {"name": "look_up", "arguments": {"code": "A01"}}
    call = {"type": "function", "function": function}
    turns = [asked("A01"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    by_transformers = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False)
    assert by_transformers == template.render(turns, add_generation_prompt=False, tools=TOOLS)
    assert '<tool_call>\n{"name": "look_up", "arguments": {"code": "A01"}}' in by_transformers
