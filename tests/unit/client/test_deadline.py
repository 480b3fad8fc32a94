"""A deadline of the caller ends a call, whatever the service does: silence, pauses, or an answer that never ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.unit.client.both_clients import SETTINGS
from tuneship.client import AsyncClient, Client, DeadlineExceeded, Options

PAGE = {"data": [], "models": [], "pagination": {"total": 0, "limit": 20, "offset": 0}}

EVENTS = {"content-type": "text/event-stream"}


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Send a byte now and then, for ever, each soon enough for a reader that limits only the time of a single read."""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            time.sleep(0.001)
            yield b" "

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.001)
            yield b" "


def ended(answer: Callable[[httpx.Request], httpx.Response], left_s: float) -> list[str]:
    """Return what each client raises when its deadline is this many seconds away."""

    def options() -> Options:
        return Options(ends_at=time.monotonic() + left_s)

    with (
        Client(SETTINGS, httpx.MockTransport(answer), options()) as client,
        pytest.raises(DeadlineExceeded) as blocking,
    ):
        client.models.list()

    async def run() -> str:
        async with AsyncClient(SETTINGS, httpx.MockTransport(answer), options()) as client:
            with pytest.raises(DeadlineExceeded) as raised:
                await client.models.list()
        return str(raised.value)

    return [str(blocking.value), asyncio.run(run())]


def test_nothing_is_sent_after_the_deadline() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json=PAGE)

    assert ended(answer, -1.0) == ["list_models: no answer before the deadline"] * 2
    assert sent == []


def test_a_pause_that_lasts_longer_than_the_deadline_is_not_begun() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(503, headers={"Retry-After": "300"}, json={})

    ended(answer, 60.0)

    assert len(sent) == 2, "one of each client"


def test_an_answer_that_never_ends_is_cut_off() -> None:
    ended(lambda _: httpx.Response(200, stream=Endless()), 0.05)


def test_a_followed_stream_ends_at_the_deadline_although_it_never_falls_silent() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=EVENTS, stream=Endless())

    def options() -> Options:
        return Options(ends_at=time.monotonic() + 0.05)

    with (
        Client(SETTINGS, httpx.MockTransport(answer), options()) as client,
        pytest.raises(DeadlineExceeded, match="get_job_logs"),
    ):
        list(client.jobs.follow_logs("ft_1"))

    async def run() -> None:
        async with AsyncClient(SETTINGS, httpx.MockTransport(answer), options()) as client:
            with pytest.raises(DeadlineExceeded, match="get_job_logs"):
                async for _ in client.jobs.follow_logs("ft_1"):
                    pass

    asyncio.run(run())


def test_a_request_waits_no_longer_than_what_is_left() -> None:
    waited: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"])
        raise httpx.ReadTimeout("silence", request=request)

    patient = SETTINGS.model_copy(update={"connect_timeout_s": 1000.0, "read_timeout_s": 1000.0})
    ends = Options(ends_at=time.monotonic() + 300, tries=1)
    with (
        Client(patient, httpx.MockTransport(answer), ends) as client,
        pytest.raises(Exception, match="list_models: no answer"),
    ):
        client.models.list()

    assert all(0 < seconds <= 300 for seconds in waited[0].values())
