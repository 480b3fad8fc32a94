"""Reading a generation while it is written: pieces, the reply, streams that break off, and what is tried again."""

import json
from typing import Any

import httpx
import pytest

from tests.unit.client.both_clients import StreamedAnswer, both_lists
from tuneship.contract.errors import BadResponse, InternalError, ServiceUnreachable
from tuneship.contract.generation import Generate, GeneratedText, Generation

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
REPLY = {
    "id": "gen_1", "deployment_id": "dep_1", "prompt": "a", "completion": "one two", "finish_reason": "stop",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}  # fmt: skip
REFUSAL = {
    "error": {
        "code": "internal_error", "message": "busy", "type": "internal_error", "param": None, "request_id": "req_1",
        "details": [],
    }
}  # fmt: skip


def event(kind: str, data: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


ONE, TWO = event("token", {"text": "one"}), event("token", {"text": " two"})
DONE, BROKEN = event("done", REPLY), event("error", REFUSAL)


class PlayedAnswers:
    """Play the answers one after another and remember the requests. Each client starts at the first answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        self.lines: list[StreamedAnswer] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers[len(self.asked) % len(self.answers)]
        self.asked.append(json.loads(request.content))
        assert request.headers["accept"] == "text/event-stream"
        if callable(answer):
            return answer()
        self.lines.append(StreamedAnswer(*answer))
        return httpx.Response(200, headers=EVENTS, stream=self.lines[-1])


def stream(client: Any) -> Any:
    return client.deployments.stream("dep_1", Generate(prompt="a", max_tokens=9))


def test_pieces_come_in_order_and_the_reply_is_the_last() -> None:
    played = PlayedAnswers((ONE[:9], ONE[9:] + b": keep-alive\n\n" + TWO, DONE))
    for found in both_lists(played, stream):
        *pieces, last = found
        assert pieces == [GeneratedText(text="one"), GeneratedText(text=" two")]
        assert last == Generation.model_validate(REPLY)
    assert played.asked == [{"prompt": "a", "max_tokens": 9, "stream": True}] * 2
    assert all(line.closed for line in played.lines)


def test_an_endpoint_is_streamed_alike() -> None:
    for resource in ("endpoints", "canary_endpoints"):
        found = both_lists(
            PlayedAnswers((ONE, DONE)),
            lambda client, name=resource: getattr(client, name).stream(
                "ep_1", Generate(prompt="a")
            ),
        )
        assert [len(one) for one in found] == [2, 2]


def test_a_stream_that_breaks_off_raises_the_services_error() -> None:
    with pytest.raises(InternalError, match="busy") as raised:
        both_lists(PlayedAnswers((ONE, BROKEN)), stream)
    assert raised.value.request_id == "req_1"


@pytest.mark.parametrize("blocks", [(), (ONE,), (ONE, TWO[:-1])])
def test_an_answer_without_an_end_is_not_taken_for_a_whole_one(blocks: tuple[bytes, ...]) -> None:
    played = PlayedAnswers(blocks)
    with pytest.raises(ServiceUnreachable, match="broke off"):
        both_lists(played, stream)
    # A second request would bring its text a second time.
    assert len(played.asked) == 1


def test_a_refusal_is_tried_again_like_any_call() -> None:
    headers = {"x-should-retry": "true", "retry-after": "0"}
    played = PlayedAnswers(lambda: httpx.Response(503, json=REFUSAL, headers=headers), (ONE, DONE))
    assert [len(one) for one in both_lists(played, stream)] == [2, 2]
    assert len(played.asked) == 4
    with pytest.raises(InternalError, match="busy"):
        both_lists(PlayedAnswers(lambda: httpx.Response(503, json=REFUSAL)), stream)


def test_a_server_that_does_not_stream_answers_in_one_piece() -> None:
    (whole,) = both_lists(PlayedAnswers(lambda: httpx.Response(200, json=REPLY)), stream)[0]
    assert whole == Generation.model_validate(REPLY)


def test_an_answer_of_another_kind_is_named() -> None:
    with pytest.raises(BadResponse, match="no stream of events"):
        both_lists(PlayedAnswers(lambda: httpx.Response(200, text="hello")), stream)
    with pytest.raises(BadResponse, match="the answer is not readable"):
        both_lists(PlayedAnswers(lambda: httpx.Response(200, json={"id": 5})), stream)
    with pytest.raises(BadResponse, match="token event is not readable"):
        both_lists(PlayedAnswers((event("token", {}),)), stream)
