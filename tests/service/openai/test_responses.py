"""Programs of the `openai` package ask for responses, whole and streamed; nothing of them is stored."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import bare_headers, blocking
from tests.support.service.in_process import ANSWER, Service

TEXT = "senile cataract"
SECRET = "zq planted text 7731"
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_text_is_answered_with_the_settings_that_made_the_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=ENDPOINT,
        input=TEXT,
        instructions="Name the chapter.",
        max_output_tokens=32,
        temperature=0,
        store=False,
        metadata={"case": "1"},
        user="ada",
    )
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.model == "tuneship-tiny"
    assert (answer.temperature, answer.max_output_tokens) == (0, 32)
    assert (answer.instructions, answer.metadata) == ("Name the chapter.", {"case": "1"})
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


def test_a_conversation_goes_on_with_the_items_of_an_answer(client: openai.OpenAI) -> None:
    first = client.responses.create(model=ENDPOINT, input=TEXT)
    items: list[Any] = [
        {"role": "developer", "content": "Name the chapter."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "And the block?"},
    ]
    second = client.responses.create(model=ENDPOINT, input=items)
    assert second.output_text == ANSWER
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_stream_tells_the_same_answer_in_openais_events(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=ENDPOINT, input=TEXT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]] == ORDER
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    assert last.response.usage is not None
    with client.responses.stream(model=ENDPOINT, input=TEXT) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_the_events_have_names_and_no_mark_at_the_end(answering: Service) -> None:
    answer = httpx.post(
        f"{answering.url}/openai/v1/responses",
        json={"model": ENDPOINT, "input": TEXT, "stream": True},
        headers={**bare_headers(answering), "Accept": "application/x-ndjson"},
        timeout=60,
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = [block.split("\n") for block in answer.text.split("\n\n") if block]
    for name, data in pairs:
        kind = json.loads(data.removeprefix("data: "))["type"]
        assert name == f"event: {kind}"


def test_an_answer_that_reaches_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=ENDPOINT, input=TEXT, max_output_tokens=1)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model=ENDPOINT, input=TEXT, max_output_tokens=1, stream=True)
    assert last.type == "response.incomplete"


@pytest.mark.parametrize("streams", [True, False])
def test_a_fault_of_the_deployment_is_a_server_error(
    client: openai.OpenAI, answering: Service, streams: bool
) -> None:
    made = answering.deployment(f"faulty {streams}", tags={"fault.error_rate": "1"})
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model=made, input=TEXT, stream=streams)
    assert caught.value.type == "server_error"


def test_a_failure_after_the_first_text_ends_the_stream_as_failed(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 2

    def let_the_deadline_pass() -> None:
        (generation,) = service.parts.in_flight._running[deployment]
        assert generation.limit is not None
        generation.limit.reschedule(service.loop.time())

    with blocking(service) as program:
        events = []
        for event in program.responses.create(model=deployment, input=TEXT, stream=True):
            if event.type == "response.output_text.delta" and events[-1].type != event.type:
                service.loop.call_soon_threadsafe(let_the_deadline_pass)
            events.append(event)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-2].type == "response.output_text.delta"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert TEXT not in last.response.error.message


def test_no_response_is_kept(client: openai.OpenAI) -> None:
    made = client.responses.create(model=ENDPOINT, input=TEXT)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.code == "unknown_url"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)


ITEM = {"role": "user", "content": SECRET}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "unsupported_value", "store"),
    ({"background": True}, "unsupported_value", "background"),
    ({"previous_response_id": SECRET}, "unsupported_parameter", "previous_response_id"),
    ({"conversation": SECRET}, "unsupported_parameter", "conversation"),
    ({"tools": [{"type": "function", "name": SECRET}]}, "invalid_value", "tools[0].name"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"truncation": "auto"}, "unsupported_value", "truncation"),
    ({"reasoning": {"effort": "high"}}, "unsupported_value", "reasoning"),
    ({"include": ["message.output_text.logprobs"]}, "unsupported_value", "include"),
    ({"seed": 1}, "unknown_parameter", "seed"),
    ({"max_output_tokens": 10**6}, "invalid_value", "max_output_tokens"),
    ({"input": [{**ITEM, "role": "assistant"}]}, "invalid_value", "input"),
    (
        {"input": [{"type": "function_call", "name": SECRET}]},
        "missing_required_parameter",
        "input[0].call_id",
    ),
    (
        {"input": [{"type": "item_reference", "summary": SECRET}]},
        "unsupported_value",
        "input[0].type",
    ),
    (
        {"input": [{**ITEM, "content": [{"type": "input_image", "image_url": SECRET}]}]},
        "unsupported_parameter",
        "input[0].content.image_url",
    ),
    ({"metadata": {SECRET: 1}}, "invalid_type", "metadata"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
def test_a_field_is_refused_by_its_name_and_never_by_its_value(
    client: openai.OpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": ENDPOINT, "input": SECRET} | fields, cast_to=dict)
    assert (caught.value.code, caught.value.param) == (code, param), caught.value.body
    assert SECRET not in json.dumps(caught.value.body)


def test_a_conversation_that_is_too_long_has_the_code_that_programs_look_for(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=ENDPOINT, input="cataract " * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_one_person_stays_on_one_arm_of_a_canary(client: openai.OpenAI, answering: Service) -> None:
    arms = [answering.deployment("responds one"), answering.deployment("responds two")]
    answering.canary("responding split", dict.fromkeys(arms, 50))

    def arm_of(person: str) -> str:
        raw = client.responses.with_raw_response.create(
            model="responding split", input=TEXT, safety_identifier=person
        )
        return raw.headers["x-deployment-id"]

    found = {person: {arm_of(person) for _ in range(3)} for person in map(str, range(12))}
    assert all(len(one) == 1 for one in found.values())
    assert {*set().union(*found.values())} == set(arms)
