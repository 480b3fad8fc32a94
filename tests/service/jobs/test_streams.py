"""A job's stream sends every entry in order, resumes at any place, and leaves nothing behind when it ends."""

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import Service
from tests.support.service.processes import Serve, rows_file, start_job, trainer_at_work
from tests.support.waiting import until, until_async
from tuneship.contract.errors import ApiError
from tuneship.contract.reports.job_reports import JobLogEntry
from tuneship.service.answers.streaming import Frame, Stream
from tuneship.service.context.context import Context
from tuneship.service.context.notifier import Notifier
from tuneship.service.context.timing import ServiceTiming
from tuneship.service.http.streams import (
    EVENTS,
    LINES,
    StreamResponse,
    as_event,
    as_line,
    wanted_media,
)
from tuneship.service.jobs import stream as job_stream
from tuneship.service.jobs.stream import StreamPosition, _merged, job_frames

# So many epochs that seconds of training are left even if the test is slow to stop the process.
EPOCHS = 20
NOTIFIED_ONLY = ServiceTiming(stream_poll_s=3600.0)
DONE = {"event": "done", "data": "[DONE]"}


@dataclass
class Reader:
    """Reads an open stream."""

    response: httpx.Response
    text: str = ""

    def events(self) -> list[dict[str, str]]:
        blocks = self.text.split("\n\n")[:-1]
        return [
            dict(line.split(": ", 1) for line in block.split("\n"))
            for block in blocks
            if not block.startswith(":")
        ]

    async def read_until(self, holds: Callable[["Reader"], bool], patience_s: float = 120) -> None:
        async with asyncio.timeout(patience_s):
            async for text in self._texts:
                self.text += text
                if holds(self):
                    return

    def __post_init__(self) -> None:
        self._texts = self.response.aiter_text()


@asynccontextmanager
async def open_stream(
    service: Service, job_id: str, query: str = "", **headers: str
) -> AsyncIterator[Reader]:
    """Open a stream over a socket; leaving the context disconnects."""
    http = httpx.AsyncClient(base_url=service.url, headers=service.headers["alice"], timeout=120)
    path = f"/v1/fine-tuning/jobs/{job_id}/logs?stream=true{query}"
    async with http, http.stream("GET", path, headers=headers) as response:
        yield Reader(response)


def whole(service: Service, job_id: str, query: str = "", **headers: str) -> httpx.Response:
    """Read the stream of an ended job to its end; that of a running job would not return."""
    path = f"/v1/fine-tuning/jobs/{job_id}/logs?stream=true{query}"
    return service.call("GET", path, headers=headers)


def events(answer: httpx.Response) -> list[dict[str, str]]:
    return Reader(answer, answer.text).events()


@pytest.fixture
def live(start: Callable[..., Service]) -> Service:
    """A service whose streams look for news only when they are notified."""
    service = start(timing=NOTIFIED_ONLY)
    service.listen()
    return service


def ended_job(service: Service, steps: int = 3) -> str:
    number = len(service.engines.trainers)
    job_id = service.job()
    trainer = service.trainer(number)
    trainer.start_of(steps)
    for step in range(1, steps + 1):
        trainer.step(step, loss=1 / step)
        if step % 2 == 0:
            trainer.say({"kind": "log", "level": "warning", "message": f"after {step}"})
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    return job_id


@pytest.mark.both_databases
def test_an_ended_job_is_reported_whole_in_order_and_ends(service: Service) -> None:
    job_id = ended_job(service, steps=4)
    answer = whole(service, job_id)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    received = events(answer)
    assert received[-1] == DONE
    kinds = [one["event"] for one in received[:-1]]
    logs = [json.loads(one["data"]) for one in received if one["event"] == "log"]
    steps = [json.loads(one["data"]) for one in received if one["event"] == "metrics"]
    paged = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}/logs").json()["logs"]
    assert logs == paged
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    assert all(
        set(one) == {"step", "training_loss", "validation_loss", "learning_rate", "epoch"}
        for one in steps
    )
    # Logs: queued, attempt, training. Then steps 1, 2, the log "after 2", steps 3, 4, the log "after 4", completed.
    assert kinds == ["log"] * 3 + (["metrics"] * 2 + ["log"]) * 2 + ["log"]
    assert len({one["id"] for one in received[:-1]}) == len(kinds)


@pytest.mark.both_databases
def test_a_reader_who_was_cut_off_anywhere_misses_nothing_and_gets_nothing_twice(
    service: Service,
) -> None:
    job_id = ended_job(service)
    received = events(whole(service, job_id))
    for number, one in enumerate(received[:-1]):
        rest = received[number + 1 :]
        assert events(whole(service, job_id, **{"Last-Event-ID": one["id"]})) == rest
        assert events(whole(service, job_id, f"&after={one['id']}")) == rest
    first, last = received[0]["id"], received[-2]["id"]
    both = whole(service, job_id, f"&after={first}", **{"Last-Event-ID": last})
    assert events(both) == [DONE]


def test_pages_and_streams_go_on_from_each_other(service: Service) -> None:
    job_id = ended_job(service, steps=2)
    received = events(whole(service, job_id))
    path = f"/v1/fine-tuning/jobs/{job_id}/logs"
    page = service.call("GET", f"{path}?limit=3").json()["pagination"]["after"]
    assert events(whole(service, job_id, f"&after={page}")) == received[3:]
    middle = next(one["id"] for one in received if one["event"] == "metrics")
    rest = service.call("GET", path, params={"after": middle}).json()["logs"]
    assert rest == [json.loads(one["data"]) for one in received[4:-1] if one["event"] == "log"]


def test_lines_hold_the_same_objects_and_no_mark(service: Service) -> None:
    job_id = ended_job(service)
    answer = whole(service, job_id, accept="application/x-ndjson")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert found == [json.loads(one["data"]) for one in events(whole(service, job_id))[:-1]]


def test_more_than_one_reading_keeps_the_order(service: Service) -> None:
    job_id = ended_job(service, steps=9)

    context = Context(service.parts, "alice", "req_1")

    async def read(rows_at_once: int) -> bytes:
        frames = job_frames(context, job_id, StreamPosition(), rows_at_once)
        return b"".join([as_event(one) async for together in frames for one in together])

    expected = whole(service, job_id).content
    for size in (1, 2, 3, 5):
        assert service.run(read(size)) == expected


def test_a_live_job_is_reported_as_it_trains_and_the_stream_ends_with_it(live: Service) -> None:
    job_id = live.job()
    trainer = live.trainer()

    async def read() -> list[dict[str, str]]:
        async with open_stream(live, job_id) as reader:
            await reader.read_until(lambda one: "attempt 1 starts" in one.text)
            trainer.start_of(3)
            for step in (1, 2, 3):
                trainer.step(step)
                await reader.read_until(lambda one, step=step: f'"step":{step},' in one.text)
            trainer.complete()
            await reader.read_until(lambda one: "[DONE]" in one.text)
            await reader.read_until(lambda _: False)  # the service ends the answer
            return reader.events()

    received = live.run(read())
    assert received[-1] == DONE
    assert received == events(whole(live, job_id))


def test_a_resumed_training_tells_no_step_twice(live: Service) -> None:
    job_id = live.job()
    first = live.trainer(0)
    first.start_of(4)
    for step in (1, 2, 3):
        first.step(step)

    async def read() -> list[dict[str, str]]:
        async with open_stream(live, job_id) as reader:
            await reader.read_until(lambda one: '"step":3,' in one.text)
            first.code = -9
            second = await asyncio.to_thread(live.trainer, 1)
            second.start_of(4, resumed_from=1)
            for step in (2, 3, 4):
                second.step(step)
            second.complete()
            await reader.read_until(lambda one: "[DONE]" in one.text)
            return reader.events()

    received = live.run(read())
    steps = [json.loads(one["data"])["step"] for one in received if one["event"] == "metrics"]
    assert steps == [1, 2, 3, 4]
    assert "from step 1 on" in str(received)


def test_a_cancelled_job_ends_its_stream(live: Service) -> None:
    job_id = live.job()
    live.trainer().start_of(9)

    async def read() -> list[dict[str, str]]:
        async with open_stream(live, job_id) as reader:
            await reader.read_until(lambda one: "training 4 examples" in one.text)
            await live.ask("POST", f"/v1/fine-tuning/jobs/{job_id}/cancel")
            await reader.read_until(lambda one: "cancellation requested" in one.text)
            live.trainer().code = 0
            await reader.read_until(lambda one: "[DONE]" in one.text)
            return reader.events()

    received = live.run(read())
    assert received[-1] == DONE
    assert json.loads(received[-2]["data"])["message"] == "cancelled"


def waiting(service: Service) -> int:
    """The number of readers that wait at the notifier."""
    return sum(len(ones) for ones in service.parts.notifier._waiting.values())


def tasks_named(service: Service, name: str) -> int:
    async def count() -> int:
        return sum(name in repr(task) for task in asyncio.all_tasks())

    return service.run(count())


def test_a_reader_who_goes_away_leaves_nothing_behind(live: Service) -> None:
    job_id = live.job()
    live.trainer().start_of(9)

    async def come_and_go() -> None:
        async with open_stream(live, job_id) as reader:
            await reader.read_until(lambda one: "training 4 examples" in one.text)
            await until_async(lambda: waiting(live) == 1)  # the previous reader may still be there

    for _ in range(20):  # more than may be open at the same time
        live.run(come_and_go())
    live.until(lambda: waiting(live) == 0)
    for name in ("_send_frames", "_disconnected"):
        live.until(lambda name=name: tasks_named(live, name) == 0)
    live.until(lambda: live.database.engine.pool.checkedout() == 0)


def test_streams_of_one_client_are_bounded_and_wait_without_threads(live: Service) -> None:
    job_id = live.job()
    live.trainer().start_of(9)

    async def crowd() -> tuple[list[int], httpx.Response]:
        readers = [open_stream(live, job_id) for _ in range(16)]
        inside = [await one.__aenter__() for one in readers]
        for reader in inside:
            await reader.read_until(lambda one: "training 4 examples" in one.text)
        beyond = await live.ask("GET", f"/v1/fine-tuning/jobs/{job_id}/logs?stream=true")
        theirs = await live.ask("GET", f"/v1/fine-tuning/jobs/{job_id}/logs?stream=true", "bob")
        others = [(await live.ask("GET", "/v1/models")).status_code for _ in range(3)]
        # There is one connection of the supervisor and one of a look, not one for each stream.
        await until_async(lambda: live.database.engine.pool.checkedout() <= 4)
        for one in readers:
            await one.__aexit__(None, None, None)
        return [*others, theirs.status_code], beyond

    others, beyond = live.run(crowd())
    assert others == [200, 200, 200, 404]
    error = beyond.json()["error"]
    assert (beyond.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert error["request_id"] == beyond.headers["x-request-id"]
    assert (beyond.headers["retry-after"], beyond.headers["x-should-retry"]) == ("1", "true")
    live.until(lambda: waiting(live) == 0)
    live.engines.trainers[0].complete()
    live.until(lambda: live.job_status(job_id) == "completed")
    assert whole(live, job_id).status_code == 200


def test_a_drain_ends_streams_without_the_mark_of_an_end(live: Service) -> None:
    job_id = live.job()
    live.trainer().start_of(9)

    async def read() -> str:
        async with open_stream(live, job_id) as reader:
            await reader.read_until(lambda one: "training 4 examples" in one.text)
            live.parts.drain.begin()
            # The stream ended with a whole message, so the connection did not break.
            await reader.read_until(lambda _: False)
            return reader.text

    assert "[DONE]" not in live.run(read())
    live.until(lambda: waiting(live) == 0)


def test_a_silent_stream_says_that_it_lives(start: Callable[..., Service]) -> None:
    live = start(timing=replace(NOTIFIED_ONLY, keep_alive_s=0.05))
    live.listen()
    job_id = live.job()
    live.trainer().start_of(9)

    async def read(accept: str) -> str:
        async with open_stream(live, job_id, accept=accept) as reader:
            await reader.read_until(lambda one: "training 4 examples" in one.text)
            if accept == EVENTS:
                await reader.read_until(lambda one: ": keep-alive\n\n" in one.text)
            else:
                await asyncio.sleep(0.3)
            return reader.text

    assert live.run(read(EVENTS)).endswith(": keep-alive\n\n")
    assert live.run(read(LINES)).endswith("}\n")


def test_a_stream_that_fails_breaks_off_and_the_service_goes_on(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = live.job()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(job_stream.job_records, "steps_after", broken)
    with pytest.raises(httpx.RemoteProtocolError):
        whole(live, job_id)
    assert live.call("GET", "/v1/models").status_code == 200
    assert waiting(live) == 0


def test_a_reader_who_does_not_read_cannot_hold_the_end_up(service: Service) -> None:
    closed = threading.Event()

    async def endless() -> AsyncGenerator[Sequence[Frame]]:
        try:
            while True:
                yield [Frame("log", "a")]
        finally:
            closed.set()

    async def answer() -> None:
        stuck = asyncio.Event()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await stuck.wait()

        async def receive() -> MutableMapping[str, Any]:
            await stuck.wait()
            return {"type": "http.disconnect"}

        async def key_end() -> ApiError:
            await stuck.wait()
            raise AssertionError("the key has not ended")

        context = Context(service.parts, "alice", "req_1")
        response = StreamResponse(context, Stream(endless()), nullcontext(), key_end)
        sending = asyncio.create_task(response({"type": "http", "headers": []}, receive, send))
        await asyncio.sleep(0.05)
        assert not sending.done()
        service.parts.drain.begin()
        await asyncio.wait_for(sending, 60)

    service.run(answer())
    assert closed.is_set()


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ((), EVENTS),
        (("application/json",), EVENTS),
        (("*/*",), EVENTS),
        (("application/x-ndjson",), LINES),
        (("application/json, Application/X-NDJSON;q=0.9",), LINES),
        (("text/event-stream, application/x-ndjson",), EVENTS),
        (("application/json", "application/x-ndjson"), LINES),
    ],
)
def test_lines_come_only_when_they_are_asked_for(accept: tuple[str, ...], media: str) -> None:
    assert wanted_media(accept) == media


def test_text_of_several_lines_stays_one_event() -> None:
    assert as_event(Frame("done", "a\nb", "x")) == b"id: x\nevent: done\ndata: a\ndata: b\n\n"
    assert as_line(Frame("done", "[DONE]")) == b""
    entry = JobLogEntry.model_validate(
        {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "message": "a\nb"}
    )
    body = as_event(Frame("log", entry)).decode()
    assert re.fullmatch(r'event: log\ndata: \{.*"message":"a\\nb"\}\n\n', body)


@pytest.mark.parametrize(
    "place",
    [
        StreamPosition(),
        StreamPosition(7),
        StreamPosition(7, 0),
        StreamPosition(2**63 - 1, 2**62),
        StreamPosition(0, 5),
    ],
)
def test_a_place_survives_its_number(place: StreamPosition) -> None:
    assert StreamPosition.of(place.number) == place


def test_the_place_of_a_page_is_its_last_entry() -> None:
    assert StreamPosition(41).number == 41


def test_steps_lie_between_the_entries_of_their_time_even_when_reported_again() -> None:
    logs = [{"id": number} for number in (1, 2, 5, 9)]
    steps = [{"step": 1, "log_id": 2}, {"step": 2, "log_id": 5}, {"step": 3, "log_id": 2}]
    order = [one.get("step", -one.get("id", 0)) for one in _merged(logs, steps, 500)]
    assert order == [-1, -2, 1, -5, 2, 3, -9]


def test_a_bell_wakes_every_listener_of_its_resource_only() -> None:
    async def listen() -> list[bool]:
        notifier = Notifier()
        notifier.notify("nobody listens")
        with (
            notifier.listening("a") as one,
            notifier.listening("a") as two,
            notifier.listening("b") as other,
        ):
            await asyncio.to_thread(notifier.notify, "a")
            await asyncio.wait_for(asyncio.gather(one.wait(), two.wait()), 60)
            heard = [one.is_set(), two.is_set(), other.is_set()]
        assert not notifier._waiting
        return heard

    assert asyncio.run(listen()) == [True, True, False]


def followed(
    serve: Serve, job_id: str, received: list[dict[str, str]], steps_wanted: int | None = None
) -> None:
    """Append the frames after the last known one, up to the end or to so many steps; then disconnect."""
    headers = serve.headers
    if received:
        headers["Last-Event-ID"] = received[-1]["id"]
    url = f"{serve.url}/v1/fine-tuning/jobs/{job_id}/logs?stream=true"
    frame: dict[str, str] = {}
    with httpx.stream("GET", url, headers=headers, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if line and name:
                frame[name] = value
            elif frame:
                received.append(frame)
                frame = {}
                if steps_wanted is not None and len(steps_of(received)) >= steps_wanted:
                    return


def steps_of(received: list[dict[str, str]]) -> list[int]:
    return [json.loads(one["data"])["step"] for one in received if one["event"] == "metrics"]


@pytest.mark.slow
@pytest.mark.soak
def test_a_real_training_is_followed_over_a_cut_line_and_a_killed_service(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data")
    received: list[dict[str, str]] = []
    again: list[dict[str, str]] = []
    try:
        job_id = start_job(serve.client(), rows_file(tmp_path / "rows.jsonl", 64), epochs=EPOCHS)
        followed(serve, job_id, received, steps_wanted=3)
        os.kill(trainer_at_work(serve, job_id, steps=20), signal.SIGSTOP)  # till it is killed
        followed(serve, job_id, received, steps_wanted=20)
        assert received[-1] != DONE
        serve.kill()
        serve.start()
        followed(serve, job_id, received)
        followed(serve, job_id, again)
    finally:
        serve.stop()
    assert received[-1] == again[-1] == DONE
    assert steps_of(received) == list(range(1, 8 * EPOCHS + 1))
    logs = [[one["data"] for one in each if one["event"] == "log"] for each in (received, again)]
    assert logs[0] == logs[1]
    assert '"message":"attempt 2 starts"' in str(logs[0])


@pytest.mark.slow
@pytest.mark.soak
def test_a_service_that_was_asked_to_end_does_not_wait_for_its_readers(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data")
    received: list[dict[str, str]] = []
    job_id = start_job(serve.client(), rows_file(tmp_path / "rows.jsonl", 64), epochs=400)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(followed, serve, job_id, received)
        until(lambda: len(steps_of(received)) > 3)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(300) == 0
        reading.result(300)  # the last message was whole, so nothing is raised
    assert received[-1] != DONE
    serve.stop()
