"""A proxy that holds one request: before the service sees it, or after the service has acted.

A test then kills a process and decides what happens to the request: it goes on, or its connection is cut. So the kill
hits a point of the release exactly and does not depend on timing.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tests.support.fakes.proxy import Exchange, Fault, Proxy, passed, reset

# A method and a pattern for the whole path.
Request = tuple[str, str]
UPLOAD: Request = ("POST", "/v1/datasets")
JOB: Request = ("POST", "/v1/fine-tuning/jobs")
DEPLOYMENT: Request = ("POST", "/v1/deployments")
EVALUATION: Request = ("POST", "/v1/evaluations")
FINDINGS: Request = ("GET", "/v1/evaluations/[^/]+")
ENDPOINT: Request = ("POST", "/v1/canary-endpoints")
SHIFT: Request = ("PATCH", "/v1/canary-endpoints/[^/]+")
LEASE: Request = ("POST", "/v1/canary-endpoints/[^/]+/lease")


@dataclass(frozen=True)
class Point:
    """A point of the release: the last of these requests, which come in this order, is held."""

    name: str
    requests: tuple[Request, ...]
    # Whether the answer is held, after the service has acted, instead of the request.
    is_after: bool = False
    # Whether only a release that creates its endpoint reaches this point.
    is_first_release: bool = False


# `mid-shift` is the first look at 50 %, `bake` at 95 %, `settle` at 100 %.
POINTS = (
    Point("before-upload", (UPLOAD,)),
    Point("after-upload", (UPLOAD,), is_after=True),
    Point("before-job", (JOB,)),
    Point("after-job", (JOB,), is_after=True),
    Point("before-deployment", (DEPLOYMENT,)),
    Point("after-deployment", (DEPLOYMENT,), is_after=True),
    Point("before-evaluation", (EVALUATION,)),
    Point("after-evaluation", (EVALUATION,), is_after=True),
    Point("mid-evaluation", (EVALUATION, FINDINGS)),
    Point("before-endpoint", (ENDPOINT,), is_first_release=True),
    Point("after-endpoint", (ENDPOINT,), is_after=True, is_first_release=True),
    Point("before-shift", (SHIFT,)),
    Point("after-shift", (SHIFT,), is_after=True),
    Point("mid-shift", (SHIFT, LEASE)),
    Point("bake", (SHIFT, SHIFT, LEASE)),
    Point("settle", (SHIFT, SHIFT, SHIFT, LEASE)),
)


class HoldingProxy(Proxy):
    """A proxy that holds a request at one point at a time."""

    def __init__(self, service_port: int) -> None:
        """Let everything pass at first."""
        super().__init__(service_port)
        self.reached = threading.Event()
        self._goes_on: Future[bool] = Future()
        self._tasks: set[Any] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection; keep its task referenced, because the peer that kept it alive may be killed."""
        self._tasks.add(task := asyncio.current_task())
        try:
            await super()._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    @property
    def url(self) -> str:
        """Address that the pipeline uses as the service's."""
        return f"http://127.0.0.1:{self.port}"

    def stop_at(self, point: Point) -> None:
        """Hold the request of this point once; the event `reached` is set when it has arrived."""
        self.reached, self._goes_on = threading.Event(), Future()
        self._await(list(point.requests), self._holding(point.is_after))

    def let_pass(self) -> None:
        """Let the held request go on."""
        self._goes_on.set_result(True)

    def cut(self) -> None:
        """Drop the held request and reset its connection."""
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
