"""Programs of the `openai` package have a file of requests answered in the background."""

import base64
import io
import json
from typing import Any

import openai
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import ANSWER, Service, jsonl

pytestmark = pytest.mark.both_databases(postgres="soak")

SECRET = "zq planted text 7731"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


def body_of(url: str, **more: Any) -> dict[str, Any]:
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": SECRET}]},
        "/v1/completions": {"prompt": SECRET},
        "/v1/responses": {"input": SECRET},
        EMBEDDINGS: {"input": [SECRET, "b"]},
    }
    return {"model": ENDPOINT, **asked[url], **more}


def request(name: str, url: str = CHAT, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body_of(url, **more)}


def upload(client: openai.OpenAI, content: bytes) -> Any:
    return client.files.create(file=("night.jsonl", io.BytesIO(content)), purpose="batch")


def started(client: openai.OpenAI, *lines: Any, url: Any = CHAT, **more: Any) -> Any:
    file = upload(client, jsonl(*lines))
    return client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, service: Service, batch: Any) -> Any:
    ends = ("completed", "failed", "expired", "cancelled")
    service.until(lambda: client.batches.retrieve(batch.id).status in ends)
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_its_file_to_its_answers(client: openai.OpenAI, answering: Service) -> None:
    names = [f"request {number}" for number in range(20)]
    made = started(client, *[request(name) for name in names], metadata={"night": "1"})
    assert (made.status, made.object, made.completion_window) == ("validating", "batch", "24h")
    assert made.expires_at == made.created_at + 24 * 3600
    done = ended(client, answering, made)
    assert done.status == "completed"
    assert done.metadata == {"night": "1"}
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert done.error_file_id is None
    assert done.model == "tuneship-tiny"

    answers = lines_of(client, done.output_file_id)
    assert [one["custom_id"] for one in answers] == names
    assert {one["error"] for one in answers} == {None}
    assert len({one["id"] for one in answers}) == 20
    for one in answers:
        assert one["response"]["status_code"] == 200
        found = ChatCompletion.model_validate(one["response"]["body"])
        assert found.choices[0].message.content == ANSWER
    used = sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers)
    assert done.usage.total_tokens == used
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.status) == ("batch_output", "processed")
    assert file.bytes == len(client.files.content(file.id).content)
    assert file.id in {one.id for one in client.files.list(purpose="batch_output")}
    assert made.input_file_id in {one.id for one in client.files.list(purpose="batch")}
    assert made.id in {one.id for one in client.batches.list(limit=2)}


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses"])
def test_the_other_addresses_of_requests(
    client: openai.OpenAI, answering: Service, url: str
) -> None:
    done = ended(client, answering, started(client, request("a", url), url=url))
    (line,) = lines_of(client, done.output_file_id)
    assert ANSWER in json.dumps(line["response"]["body"])
    assert done.usage.output_tokens > 0


def test_a_batch_of_embeddings_has_vectors_and_refusals(
    client: openai.OpenAI, answering: Service
) -> None:
    lines = [
        request("numbers", EMBEDDINGS),
        request("base64", EMBEDDINGS, encoding_format="base64", input="a", dimensions=2),
        request("stream", EMBEDDINGS, stream=True),
        request("too long", EMBEDDINGS, input=SECRET * 2000),
    ]
    done = ended(client, answering, started(client, *lines, url=EMBEDDINGS))
    assert (done.status, done.endpoint, done.model) == ("completed", EMBEDDINGS, "tuneship-tiny")
    answers = {one["custom_id"]: one for one in lines_of(client, done.output_file_id)}
    assert answers.keys() == {"numbers", "base64"}
    bodies = {name: one["response"]["body"] for name, one in answers.items()}
    found = CreateEmbeddingResponse.model_validate(bodies["numbers"])
    assert [one.embedding for one in found.data] == [answering.engines.vector, [0.0] * 4]
    (item,) = bodies["base64"]["data"]
    assert len(base64.b64decode(item["embedding"])) == 2 * 4
    used = sum(body["usage"]["total_tokens"] for body in bodies.values())
    assert (done.usage.input_tokens, done.usage.output_tokens) == (used, 0)
    errors = {one["custom_id"]: one["response"] for one in lines_of(client, done.error_file_id)}
    assert {name: one["body"]["error"]["code"] for name, one in errors.items()} == {
        "stream": "unknown_parameter",
        "too long": "context_length_exceeded",
    }
    assert all(frame["is_background"] for frame in answering.engines.embedded[-2:])


def test_a_file_with_more_texts_to_embed_than_a_batch_may_have_fails_it(
    client: openai.OpenAI, answering: Service
) -> None:
    many = [request(f"{number}", EMBEDDINGS, input=["a"] * 9_000) for number in range(6)]
    done = ended(client, answering, started(client, *many, url=EMBEDDINGS))
    assert done.status == "failed"
    assert [one.code for one in done.errors.data] == ["too_many_tasks"]


def test_requests_that_are_refused_stand_in_the_error_file(
    client: openai.OpenAI, answering: Service
) -> None:
    bad = [
        request("unknown model", model="gpt-nobody"),
        request("unknown field", CHAT, **{SECRET: 1}),
        request("stream", stream=True),
        request("too long", messages=[{"role": "user", "content": SECRET * 2000}]),
    ]
    done = ended(client, answering, started(client, request("good"), *bad))
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 1, 4)
    assert [one["custom_id"] for one in lines_of(client, done.output_file_id)] == ["good"]
    refused = {one["custom_id"]: one["response"] for one in lines_of(client, done.error_file_id)}
    codes = {
        "unknown model": (404, "model_not_found", "model"),
        "unknown field": (400, "unknown_parameter", None),
        "stream": (400, "unsupported_value", "stream"),
        "too long": (400, "context_length_exceeded", "messages"),
    }
    found = {
        name: (one["status_code"], one["body"]["error"]["code"], one["body"]["error"]["param"])
        for name, one in refused.items()
    }
    assert found == codes
    assert SECRET not in json.dumps(list(refused.values()))


def line(**more: Any) -> dict[str, Any]:
    return {**request("a"), **more}


LONG = "x" * (1 << 20)
BAD_FILES: list[tuple[bytes, str, int | None, str | None]] = [
    (b"", "empty_file", None, None),
    (b"\n\n", "empty_file", None, None),
    (jsonl(line()) + b"{" + SECRET.encode(), "invalid_json_line", 2, None),
    (b"\xff\xfe\n", "invalid_json_line", 1, None),
    (b'"text"\n', "invalid_json_line", 1, None),
    (b'{"custom_id": "a", "custom_id": "b"}\n', "invalid_json_line", 1, None),
    (jsonl(line(), line(custom_id="b"), line()), "duplicate_custom_id", 3, "custom_id"),
    (jsonl(line(custom_id=7)), "invalid_value", 1, "custom_id"),
    (jsonl(line(custom_id="")), "invalid_value", 1, "custom_id"),
    (jsonl({"custom_id": "a"}), "missing_required_parameter", 1, "method"),
    (jsonl(line(method="GET")), "invalid_value", 1, "method"),
    (jsonl(line(url="/v1/completions")), "url_mismatch", 1, "url"),
    (jsonl(line(url=SECRET)), "url_mismatch", 1, "url"),
    (jsonl(line(body=[SECRET])), "invalid_value", 1, "body"),
    (jsonl(line(**{SECRET: SECRET})), "unknown_parameter", 1, None),
    (b"\n" + jsonl(line(custom_id="b"), line(body={"a": LONG})), "invalid_request", 3, None),
]


@pytest.mark.parametrize(("content", "code", "place", "param"), BAD_FILES)
def test_a_file_that_is_no_batch_fails_it_with_openais_code(
    client: openai.OpenAI,
    answering: Service,
    content: bytes,
    code: str,
    place: int | None,
    param: str | None,
) -> None:
    file = upload(client, content)
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = ended(client, answering, made)
    assert done.status == "failed"
    assert done.failed_at is not None
    assert done.errors is not None
    assert done.errors.data is not None
    (error,) = done.errors.data
    assert (error.code, error.line, error.param) == (code, place, param)
    assert (done.output_file_id, done.error_file_id) == (None, None)
    assert "planted" not in done.to_json()


def test_bad_bodies_of_a_batch_are_refused_by_name(
    client: openai.OpenAI, answering: Service
) -> None:
    file = upload(client, jsonl(request("a")))
    training = answering.dataset().replace("ds_", "file-")
    good: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    bad: list[tuple[dict[str, Any], str | None, str]] = [
        ({"endpoint": "/v1/moderations"}, "invalid_value", "endpoint"),
        ({"completion_window": "1h"}, "invalid_value", "completion_window"),
        ({"input_file_id": training}, "invalid_value", "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "invalid_value", "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            "unsupported_parameter",
            "output_expires_after",
        ),
    ]
    for fields, code, param in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**{**good, **fields})
        assert (caught.value.code, caught.value.param) == (code, param)
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.create(**{**good, "input_file_id": "file-" + "0" * 24})
    assert missing.value.param == "input_file_id"


def test_a_cancelled_batch_keeps_what_was_answered(
    client: openai.OpenAI, answering: Service
) -> None:
    engines = answering.engines
    before = len(engines.asked)
    engines.may_answer.clear()
    made = started(client, *(request(f"{number}") for number in range(9)))
    answering.until(lambda: len(engines.asked) > before)
    with pytest.raises(openai.ConflictError):
        client.files.delete(made.input_file_id)
    cancelled = client.batches.cancel(made.id)
    assert (cancelled.status, cancelled.cancelling_at is not None) == ("cancelling", True)
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    done = ended(client, answering, made)
    engines.may_answer.set()
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    counts = done.request_counts
    assert counts.completed + counts.failed == counts.total == 9
    errors = lines_of(client, done.error_file_id)
    assert len(errors) == counts.failed > 0
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(made.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert client.files.delete(made.input_file_id).deleted


def test_an_upload_is_not_read_back_and_answers_need_the_scope_to_ask(
    client: openai.OpenAI, answering: Service
) -> None:
    done = ended(client, answering, started(client, request("a")))
    with pytest.raises(openai.PermissionDeniedError):
        client.files.content(done.input_file_id)
    scopes = frozenset({"metrics:read", "datasets:read"})
    key = answering.key_headers("alice", scopes)["Authorization"].removeprefix("Bearer ")
    with blocking(answering, api_key=key) as reader:
        assert reader.files.retrieve(done.output_file_id).purpose == "batch_output"
        with pytest.raises(openai.PermissionDeniedError) as caught:
            reader.files.content(done.output_file_id)
        assert caught.value.code == "missing_scope"


def test_another_tenant_sees_no_batch(client: openai.OpenAI, answering: Service) -> None:
    done = ended(client, answering, started(client, request("a")))
    with blocking(answering, "bob") as bob:
        for call in (
            lambda: bob.batches.retrieve(done.id),
            lambda: bob.batches.cancel(done.id),
            lambda: bob.files.content(done.output_file_id),
            lambda: bob.files.retrieve(done.output_file_id),
            lambda: bob.files.delete(done.output_file_id),
            lambda: bob.batches.create(
                input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert done.id not in {one.id for one in bob.batches.list()}
        assert not list(bob.files.list(purpose="batch_output"))


def test_no_text_of_a_batch_is_in_a_log_or_on_the_disk(
    client: openai.OpenAI, answering: Service
) -> None:
    ended(client, answering, started(client, request("a"), request(SECRET)))
    assert not [text for text in answering.log.texts if "planted" in text]
    for path in answering.settings.data_dir.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_an_end_of_a_batch_is_an_event_with_numbers(
    client: openai.OpenAI, answering: Service
) -> None:
    done = ended(client, answering, started(client, request("a")))
    found: list[Any] = []
    after: dict[str, str] = {}
    while True:
        page = answering.call("GET", "/v1/events", params={"limit": 1000, **after}).json()
        if not page["events"]:
            break
        found += page["events"]
        after = {"after": page["pagination"]["after"]}
    (event,) = [one for one in found if one["data"]["id"] == done.id]
    assert event["type"] == "batch.completed"
    expected = {"object": "batch", "status": "completed", "total": 1, "completed": 1, "failed": 0}
    assert event["data"] == {"id": done.id, "sequence": 1, **expected}
