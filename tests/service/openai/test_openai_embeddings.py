"""Embeddings by OpenAI's own client, in both formats, and their refusals in OpenAI's form."""

import base64
import json
from array import array
from typing import Any

import openai
import pytest

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import Service

VECTOR = [0.5, -0.5, 0.25, 1.0]
SECRET = "zq planted text 7731"


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}])
def test_the_client_reads_numbers_in_the_order_of_the_texts(
    answering: Service, encoding: Any
) -> None:
    """Without a format the client asks for Base64, which its own strict validation does not know."""
    with blocking(answering, _strict_response_validation=bool(encoding)) as client:
        answer = client.embeddings.create(model=ENDPOINT, input=["a", "b"], **encoding)
    assert [one.index for one in answer.data] == [0, 1]
    assert [list(one.embedding) for one in answer.data] == [VECTOR, [0.0] * 4]
    assert answer.model == "tuneship-tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_base64_holds_float32_numbers(client: openai.OpenAI) -> None:
    answer = client.embeddings.with_raw_response.create(
        model=ENDPOINT, input="a", encoding_format="base64", dimensions=2
    )
    (item,) = json.loads(answer.text)["data"]
    assert array("f", base64.b64decode(item["embedding"])).tolist() == VECTOR[:2]


def test_token_ids_dimensions_and_tuneships_pooling_reach_the_replica(
    client: openai.OpenAI, answering: Service
) -> None:
    client.embeddings.create(
        model=ENDPOINT,
        input=[[7, 8], [9]],
        dimensions=2,
        encoding_format="float",
        user="a person",
        extra_body={"pooling": "last"},
    )
    asked = answering.engines.embedded[-1]
    assert (asked["texts"], asked["dimensions"], asked["pooling"]) == ([[7, 8], [9]], 2, "last")
    client.embeddings.create(model="tuneship-tiny", input=[7, 8, 9], encoding_format="float")
    assert answering.engines.embedded[-1]["texts"] == [[7, 8, 9]]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_type"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a b " * 5000}, "input", "context_length_exceeded"),
        ({"encoding_format": SECRET}, "encoding_format", "invalid_value"),
        ({"extra_body": {"truncate": SECRET}}, "truncate", "unknown_parameter"),
        ({"model": SECRET}, "model", "model_not_found"),
    ],
)
def test_a_refusal_has_openais_code_and_nothing_of_what_was_sent(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    asked: dict[str, Any] = {"model": ENDPOINT, "input": SECRET, **fields}
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(**asked)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.status_code == (404 if code == "model_not_found" else 400)
    assert "planted" not in str(caught.value.body)
