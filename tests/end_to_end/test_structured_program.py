"""A program of OpenAI's asks the real model for answers that fit schemas, beside others that want free text."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.openai.openai_clients import of_process
from tests.support.service.processes import Serve

pytestmark = pytest.mark.slow

MODEL: Any = "tuneship-tiny"
MESSAGES: Any = [{"role": "user", "content": "Which chapter does senile cataract belong to?"}]


class Injury(BaseModel):
    """One of two kinds of codes."""

    kind: Literal["injury"] = "injury"
    code: str = Field(pattern=r"^S[0-9]{2}$")


class Disease(BaseModel):
    """The other kind."""

    kind: Literal["disease"] = "disease"
    code: str = Field(pattern=r"^[A-R][0-9]{2}$")
    years: int | None = Field(ge=0, le=120)


class Diagnosis(BaseModel):
    """The class that the program asks for."""

    is_chronic: bool
    severity: Literal["mild", "severe"]
    codes: list[Injury | Disease] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    served = Serve(tmp_path_factory.mktemp("structured") / "data")
    with of_process(served) as made:
        yield made
    served.kill()


def test_answers_parse_into_the_programs_classes_beside_free_ones(client: openai.OpenAI) -> None:
    def free() -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=64
        )
        return answer.choices[0].message.content  # fmt: skip

    alone = free()
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(free) for _ in range(8)]
        parsed = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, n=8, seed=1, temperature=1, max_tokens=400, response_format=Diagnosis
        )  # fmt: skip
    assert {other.result() for other in others} == {alone}
    assert [choice.finish_reason for choice in parsed.choices] == ["stop"] * 8
    assert all(isinstance(choice.message.parsed, Diagnosis) for choice in parsed.choices)

    response = client.responses.parse(
        model=MODEL, input="cataract", temperature=0, text_format=Diagnosis
    )
    assert isinstance(response.output_parsed, Diagnosis)


def test_a_streamed_answer_fits_its_schema_or_says_that_it_was_cut(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 5}}},
        "required": ["names"],
        "additionalProperties": False,
    }
    for seed in range(6):
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=seed,
            stream=True,
            max_tokens=60,
            stop=["]"] if seed % 2 else [],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "names", "schema": schema},
            },
        )
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        if choices[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(text), schema)
        assert choices[-1].finish_reason == "length" or not seed % 2


def test_a_schema_that_overflows_compilers_is_refused_and_the_service_lives(
    client: openai.OpenAI,
) -> None:
    count = 1_500
    chain: Any = {
        f"a{place}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{place + 1}"}}}
        for place in range(count)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "chain", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES).choices


def test_the_log_probabilities_of_a_guided_answer_are_the_models_own(
    client: openai.OpenAI,
) -> None:
    options: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 3,
        "temperature": 0,
        "max_tokens": 8,
    }
    free = client.chat.completions.create(**options)
    guided = client.chat.completions.create(**options, response_format={"type": "json_object"})
    first: list[Any] = []
    for answer in (free, guided):
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content
        first.append([(top.token, round(top.logprob, 4)) for top in logprobs.content[0].top_logprobs])  # fmt: skip
    assert first[0] == first[1]
