"""Following a job over broken connections loses no event and repeats none. Its end and refusals are tested too."""

from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.client.both_clients import SETTINGS, StreamedAnswer, both_lists
from tuneship.client import Client
from tuneship.client.core import HttpAnswer, Pause
from tuneship.client.following import Block, Followed, Open, Read, follow_job
from tuneship.client.sse import LONGEST_EVENT_BYTES, EventReader
from tuneship.contract.errors import BadResponse, ResourceNotFound, ServiceUnreachable

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
DONE = b"event: done\ndata: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def log(number: int) -> bytes:
    data = f'{{"timestamp":"2026-01-01T00:00:00.000Z","level":"info","message":"line {number}"}}'
    return f"id: t{number}\nevent: log\ndata: {data}\n\n".encode()


STEP = (
    b'id: t9\nevent: metrics\ndata: {"step":1,"training_loss":1.0,"validation_loss":2.0,'
    b'"learning_rate":0.1,"epoch":0.5}\n\n'
)


class PlayedConnections:
    """Play the connections to the generator that follows a job. A connection is blocks, an answer or a failure."""

    def __init__(self, *lines: Any, tries: int = 3, after: str | None = None) -> None:
        self.found: list[Any] = []
        self.pauses: list[float] = []
        self.opened: list[str | None] = []
        self._given, self._blocks, answer = iter(lines), iter(()), None
        talk = follow_job("ft_1", after, tries, lambda: 1.0)
        with suppress(StopIteration):
            while True:
                step = talk.send(answer)
                answer = Block(next(self._blocks, None)) if isinstance(step, Read) else None
                if isinstance(step, Followed):
                    self.found.append(getattr(step.entry, "message", step.entry))
                elif isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                elif isinstance(step, Open):
                    answer = self._open(step)
        assert next(self._given, None) is None

    def _open(self, step: Open) -> HttpAnswer:
        self.opened.append(dict(step.call.query).get("after"))
        line = next(self._given)
        if isinstance(line, Exception):
            return HttpAnswer(failure=line)  # type: ignore[arg-type]
        if isinstance(line, httpx.Response):
            return HttpAnswer(line)
        self._blocks = iter(line)
        return HttpAnswer(httpx.Response(200, headers=EVENTS))


def test_entries_come_in_order_until_the_job_has_ended() -> None:
    played = PlayedConnections((log(1), STEP + log(2), DONE, log(3)))
    assert [played.found[0], played.found[2]] == ["line 1", "line 2"]
    assert (played.found[1].step, played.found[1].epoch) == (1, 0.5)
    assert (played.opened, played.pauses) == ([None], [])


def test_a_broken_line_is_opened_again_behind_the_last_event() -> None:
    played = PlayedConnections((log(1), log(2)[:20]), (log(2),), (STEP,), (DONE,), after="t0")
    assert played.opened == ["t0", "t1", "t2", "t9"]
    assert played.found[:2] == ["line 1", "line 2"]
    assert len(played.pauses) == 3


def test_an_arriving_line_resets_the_count_of_failures() -> None:
    quiet = (KEEP_ALIVE,)
    assert PlayedConnections(*[quiet] * 9, (log(1), DONE)).found == ["line 1"]
    with pytest.raises(ServiceUnreachable, match="broke off"):
        PlayedConnections((log(1),), (), (), ())


def test_no_connection_is_tried_again_with_growing_pauses() -> None:
    refused = httpx.ConnectError("refused")
    assert PlayedConnections(refused, refused, (DONE,)).pauses == [1.0, 2.0]
    with pytest.raises(ServiceUnreachable):
        PlayedConnections(refused, refused, refused)


def test_refusals_are_raised_or_waited_for_as_everywhere() -> None:
    body = {"error": {"code": "resource_not_found", "message": "m", "details": []}}
    with pytest.raises(ResourceNotFound):
        PlayedConnections(httpx.Response(404, json=body))
    busy = httpx.Response(503, headers={"Retry-After": "4"})
    assert PlayedConnections(busy, (DONE,)).pauses == [4.0]


def test_events_of_a_later_release_are_passed_over() -> None:
    later = b"id: t5\nevent: checkpoint\ndata: {}\n\n: comment\nretry: 10\n\ndata: plain\n\n"
    assert PlayedConnections((later + log(6) + DONE,)).found == ["line 6"]


@pytest.mark.parametrize(
    "line",
    [
        httpx.Response(200, json={"logs": []}),
        (b"event: log\ndata: a patient's name\n\n",),
        (b'event: log\ndata: {"level": "info"}\n\n',),
        (b"data: \xff\xfe\n",),
        (b"data: " + b"x" * (LONGEST_EVENT_BYTES + 1),),
        ((b"data: " + b"x" * 1000 + b"\n") * 1100,),
    ],
    ids=["no stream", "no JSON", "field missing", "no UTF-8", "endless line", "endless event"],
)
def test_a_stream_outside_this_contract_is_a_bad_response(line: Any) -> None:
    with pytest.raises(BadResponse) as raised:
        PlayedConnections(line)
    assert "patient" not in str(raised.value)


@given(st.lists(st.integers(1, 400), max_size=40), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_do_not_depend_on_where_blocks_are_cut(cuts: list[int], end: str) -> None:
    whole = (log(1) + KEEP_ALIVE + STEP + "id: u\ndata: ä\ndata: b\n\n".encode() + DONE).replace(
        b"\n", end.encode()
    )
    expected = list(EventReader().feed(whole + b"\n"))
    assert [(one.kind, one.id) for one in expected] == [
        ("log", "t1"), ("metrics", "t9"), ("message", "u"), ("done", "u"),
    ]  # fmt: skip
    assert expected[2].data == "ä\nb"
    reader, found, place = EventReader(), [], 0
    for cut in [*cuts, len(whole)]:
        found += reader.feed(whole[place : place + cut])
        place += cut
    found += reader.feed(b"\n")
    assert found == expected


def test_both_clients_follow_over_a_broken_connection() -> None:
    asked: list[httpx.Request] = []
    lines: list[StreamedAnswer] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        is_first = "after" not in request.url.params
        lines.append(
            StreamedAnswer(log(1), log(2), breaks=True)
            if is_first
            else StreamedAnswer(log(3), DONE)
        )
        return httpx.Response(200, headers=EVENTS, stream=lines[-1])

    for found in both_lists(handle, lambda client: client.jobs.follow_logs("ft_1")):
        assert [one.message for one in found] == ["line 1", "line 2", "line 3"]
    for request in asked:
        assert request.headers["accept"] == "text/event-stream"
        assert request.url.params["stream"] == "true"
    assert [request.url.params.get("after") for request in asked] == [None, "t2"] * 2
    assert all(line.closed for line in lines)


def test_leaving_early_closes_the_connection() -> None:
    line = StreamedAnswer(log(1), log(2), DONE)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=EVENTS, stream=line))
    with Client(SETTINGS, transport) as client:
        entries = client.jobs.follow_logs("ft_1")
        next(entries)
        assert line.closed == 0
        entries.close()
    assert line.closed == 1


def test_both_clients_raise_the_fault_of_a_stream() -> None:
    body = {"error": {"code": "resource_not_found", "message": "no such job", "details": []}}
    with pytest.raises(ResourceNotFound, match="no such job"):
        both_lists(
            lambda _: httpx.Response(404, json=body), lambda client: client.jobs.follow_logs("x")
        )
