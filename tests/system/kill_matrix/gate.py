"""The proxy of the fault tests, told to stop one request: before the service sees it, or after it acted.

A test then kills whom it wants, and says what becomes of the request: it goes on, or its connection is cut. So a point
of the chain is hit exactly, and not by the clock.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tests.support.fakes.proxy import Exchange, Fault, Proxy, passed, reset

Request = tuple[str, str]
"""Method, and a pattern of the whole path."""
UPLOAD: Request = ("POST", "/v1/datasets")
JOB: Request = ("POST", "/v1/fine-tuning/jobs")
DEPLOYMENT: Request = ("POST", "/v1/deployments")
ENDPOINT: Request = ("POST", "/v1/canary-endpoints")
SHIFT: Request = ("PATCH", "/v1/canary-endpoints/[^/]+")
LEASE: Request = ("POST", "/v1/canary-endpoints/[^/]+/lease")


@dataclass(frozen=True)
class Point:
    """A moment of the chain: these requests in this order, and the last of them is stopped."""

    name: str
    requests: tuple[Request, ...]
    is_after: bool = False
    """The service has acted, and its answer is held back."""
    is_first_release: bool = False
    """Only a release that makes its endpoint comes by here."""


POINTS = (
    Point("before-upload", (UPLOAD,)),
    Point("after-upload", (UPLOAD,), is_after=True),
    Point("before-job", (JOB,)),
    Point("after-job", (JOB,), is_after=True),
    Point("before-deployment", (DEPLOYMENT,)),
    Point("after-deployment", (DEPLOYMENT,), is_after=True),
    Point("before-endpoint", (ENDPOINT,), is_first_release=True),
    Point("after-endpoint", (ENDPOINT,), is_after=True, is_first_release=True),
    Point("before-shift", (SHIFT,)),
    Point("after-shift", (SHIFT,), is_after=True),
    Point("mid-shift", (SHIFT, LEASE)),
    Point("bake", (SHIFT, SHIFT, LEASE)),
    Point("settle", (SHIFT, SHIFT, SHIFT, LEASE)),
)
"""`mid-shift` is the first look at 50 %, `bake` at 95 %, `settle` at 100 %."""


class Gate(Proxy):
    """Stops at one point at a time."""

    def __init__(self, service_port: int) -> None:
        """Everything passes."""
        super().__init__(service_port)
        self.reached = threading.Event()
        self._goes_on: Future[bool] = Future()
        self._under_way: set[Any] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As any proxy; but whoever it serves may be killed, and then nothing else keeps the task."""
        self._under_way.add(task := asyncio.current_task())
        try:
            await super()._serve(reader, writer)
        finally:
            self._under_way.discard(task)
            writer.close()

    @property
    def url(self) -> str:
        """What the pipeline takes for the service."""
        return f"http://127.0.0.1:{self.port}"

    def stop_at(self, point: Point) -> None:
        """Hold the request of this point once; `reached` tells when it is there."""
        self.reached, self._goes_on = threading.Event(), Future()
        self._await(list(point.requests), self._holding(point.is_after))

    def let_pass(self) -> None:
        """What is held goes on."""
        self._goes_on.set_result(True)

    def cut(self) -> None:
        """What is held is lost, and its connection reset."""
        self._goes_on.set_result(False)

    def _await(self, requests: Sequence[Request], last: Fault) -> None:
        async def pass_and_await_the_next(exchange: Exchange) -> None:
            await passed(exchange)
            self._await(requests[1:], last)

        self.play(*requests[0], [last if len(requests) == 1 else pass_and_await_the_next])

    def _holding(self, is_after: bool) -> Fault:
        async def hold(exchange: Exchange) -> None:
            answer = await exchange.pass_on() if is_after else b""
            self.reached.set()
            if not await asyncio.wrap_future(self._goes_on):
                reset(exchange.writer)
                return
            await exchange.answer(answer or await exchange.pass_on())

        return hold
