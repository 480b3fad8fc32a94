"""Requests of the main API in the background, of a resource that is no batch."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tests.support.service.in_process import ANSWER, Service
from tuneship.contract.errors import ApiError
from tuneship.contract.generation import Generate
from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.answering import BackgroundAnswer, BackgroundCaller
from tuneship.service.background_requests.background_run import BackgroundRun, BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.context.context import Context
from tuneship.service.generation.generation_run import GenerationRun
from tuneship.service.generation.routing import RoutingTarget

KEPT = {
    "key_id": "0" * 8,
    "scopes": ["generate"],
    "address": "10.0.0.1",
    "is_private": True,
    "is_address_known": True,
    "key_lifetime_s": None,
}


@dataclass(frozen=True)
class Example:
    """A prompt for a deployment; what is kept is its number and how it ended."""

    number: int
    deployment: str

    async def begin(self, context: Context) -> tuple[GenerationRun, Callable[[], bytes]]:
        wanted = Generate(prompt="a", max_tokens=8)
        target = RoutingTarget(self.deployment)
        run = GenerationRun(context, target, wanted, time.perf_counter())
        return run, lambda: bytes(f"{self.number} {run.generation.completion}", "utf-8")

    def failed(self, context: Context, error: ApiError) -> tuple[int, bytes]:
        return error.status, f"{self.number} {error.status}".encode()

    def unanswered(self, why_not: str) -> bytes:
        return f"{self.number} {why_not}".encode()


def kept_of(
    service: Service, examples: Sequence[Example], started: Callable[[BackgroundRun], None]
) -> list[str]:
    """Run the examples to their end, after a look at the run, and return what was kept."""
    kept: list[str] = []

    def store(answers: Sequence[BackgroundAnswer]) -> None:
        kept.extend(one.content.decode() for one in answers)

    async def work() -> None:
        parts = service.parts
        caller = BackgroundCaller("alice", KEPT, "create_example", "ex_1")
        pace = BackgroundPace(parts.in_flight, lambda _: True, parts.drain)
        new_context, threads = partial(Context, parts), Threads("examples", 1)
        run = BackgroundRun(new_context, caller, pace, threads, BackgroundTiming())
        begun = asyncio.create_task(run.run(iter(examples), store))
        await asyncio.to_thread(started, run)
        await begun

    asyncio.run_coroutine_threadsafe(work(), service.loop).result(60)
    return kept


def test_answers_and_refusals_are_kept_in_the_order_of_the_requests(service: Service) -> None:
    deployment = service.deployment("answers")
    targets = ["dep_nobody" if number == 3 else deployment for number in range(80)]
    examples = [Example(number, target) for number, target in enumerate(targets)]
    kept = kept_of(service, examples, lambda _: None)
    endings = ["404" if target == "dep_nobody" else ANSWER for target in targets]
    assert kept == [f"{number} {ending}" for number, ending in enumerate(endings)]
    assert all(frame["is_background"] for frame in service.engines.asked)


def test_cancelled_requests_are_kept_as_unanswered(service: Service) -> None:
    deployment = service.deployment("answers")
    service.engines.may_answer.clear()

    def cancel(run: BackgroundRun) -> None:
        service.until(lambda: len(service.engines.asked) == 1)
        service.loop.call_soon_threadsafe(run.cancel, "enough")

    examples = [Example(number, deployment) for number in range(80)]
    kept = kept_of(service, examples, cancel)
    service.engines.may_answer.set()
    assert kept == [f"{number} enough" for number in range(80)]
    assert len(service.engines.asked) == 1
