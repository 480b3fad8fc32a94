"""The traffic driver: sends prompts to the endpoint at a steady rate and counts the answers per deployment.

Each prompt is sent once, because an error must reach the gate; a 429 is no observation and slows the driver. Answers
are streamed, so that the head names the deployment before the answer ends. It keeps counts, never text. The counts
become a `Probed` fact of `tuneship/gates/record.py`.
"""

import asyncio
import json
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any, Self, cast

from flows.shared.errors import BadInput
from tuneship.client import ApiError, AsyncClient, ServiceUnreachable, TuneshipError
from tuneship.contract.generation import Generate, Generation
from tuneship.gates.kinds import BAD_ANSWERS
from tuneship.gates.plan import DriverTraffic
from tuneship.gates.record import Probed
from tuneship.settings import ClientSettings

# A server may ask for an hour; a rollout whose driver is silent for that long ends for lack of requests.
LONGEST_SLOWDOWN_S = 10.0
# Answers that the driver cuts off count as abandoned, and would be in the baseline of the next release.
FINISH_WITHIN_S = 10.0
STOP_WITHIN_S = 1.0


def read_prompts(file: Path) -> list[str]:
    """Read the `instruction` or `prompt` of each JSON line. Raises `BadInput` with line numbers, never text."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: the prompts cannot be read ({type(error).__name__})") from None
    prompts: list[str] = []
    bad: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = None
        with suppress(ValueError):
            row: Any = json.loads(line)
            fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
            prompt = fields.get("instruction") or fields.get("prompt")
        if prompt and isinstance(prompt, str):
            prompts.append(prompt)
        else:
            bad.append(f"line {number}: no instruction and no prompt")
    if bad or not prompts:
        raise BadInput(f"{file}: unusable as prompts", bad or ["no lines"])
    return prompts


class AnswerCounts:
    """Counts answers by deployment. Written by the driver's thread, taken by the flow's."""

    def __init__(self) -> None:
        """Start with empty counts."""
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, str]] = Counter()

    def answered(self, answer: Generation) -> None:
        """Count an answer and its faults."""
        bad = [gate for gate, is_bad in BAD_ANSWERS.items() if is_bad(answer)]
        with self._lock:
            self._seen.update((answer.deployment_id, kind) for kind in ("requests", *bad))

    def failed(self, deployment_id: str) -> None:
        """Count a request that its deployment did not answer."""
        with self._lock:
            self._seen.update((deployment_id, kind) for kind in ("requests", "failed"))

    def broke_off(self, deployment_id: str | None) -> None:
        """Count a request whose answer broke off; None: before its head named a deployment."""
        with self._lock:
            self._seen[deployment_id or "", "abandoned"] += 1

    def take(self, baseline: str, candidate: str) -> Probed:
        """Return the counts since the last call, as a fact for the record."""
        with self._lock:
            seen, self._seen = self._seen, Counter()
        return Probed(
            candidate_requests=seen[candidate, "requests"],
            baseline_requests=seen[baseline, "requests"],
            candidate_failed=seen[candidate, "failed"],
            baseline_failed=seen[baseline, "failed"],
            candidate_bad={gate: seen[candidate, gate] for gate in BAD_ANSWERS},
            baseline_bad={gate: seen[baseline, gate] for gate in BAD_ANSWERS},
            candidate_abandoned=seen[candidate, "abandoned"],
            baseline_abandoned=seen[baseline, "abandoned"],
            unanswered=seen["", "abandoned"],
        )


class TrafficDriver:
    """A thread that drives an endpoint while the `with` block runs.

    At its end nothing more is sent, and open answers have ten seconds to end.
    """

    def __init__(
        self,
        settings: ClientSettings,
        endpoint_id: str,
        traffic: DriverTraffic,
        prompts: Sequence[str],
    ) -> None:
        """Prepare the thread; requests are sent from the beginning of the `with` block."""
        self.counts = AnswerCounts()
        self._settings = settings
        self._endpoint_id = endpoint_id
        self._traffic = traffic
        self._prompts = cycle(prompts)
        self._name, self._sent = secrets.token_hex(8), count()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._slow_until = 0.0
        self._thread = threading.Thread(target=self._run, name="traffic-driver", daemon=True)

    def __enter__(self) -> Self:
        """Start sending."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sending, and wait for the answers that are still open."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(FINISH_WITHIN_S + STOP_WITHIN_S)

    def _run(self) -> None:
        # A runner also closes the generators of answers that are cut off, which the garbage collector could not.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._drive_until_stopped())

    async def _drive_until_stopped(self) -> None:
        client = AsyncClient(self._settings).with_options(
            tries=1, timeout_s=self._traffic.timeout_seconds
        )
        try:
            # Answers that are still open at the limit are cut off.
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as sending:
                    driving = sending.create_task(self._drive(client, sending))
                    await self._stopped.wait()
                    driving.cancel()
                    limit.reschedule(self._loop.time() + FINISH_WITHIN_S)
        finally:
            await client.close()

    async def _drive(self, client: AsyncClient, sending: asyncio.TaskGroup) -> None:
        slots = asyncio.Semaphore(self._traffic.max_in_flight)
        pause = 1.0 / self._traffic.requests_per_second
        due = self._loop.time()
        while True:
            await slots.acquire()
            now = self._loop.time()
            # A delay is not made up for by a burst.
            due = max(due + pause, now, self._slow_until)
            await asyncio.sleep(due - now)
            sending.create_task(self._send(client, slots))

    async def _send(self, client: AsyncClient, slots: asyncio.Semaphore) -> None:
        request = Generate(prompt=next(self._prompts))
        if self._traffic.max_tokens is not None:
            request = request.model_copy(update={"max_tokens": self._traffic.max_tokens})
        served_by: list[str] = []

        def note_deployment(headers: Mapping[str, str]) -> None:
            if deployment_id := headers.get("x-deployment-id"):
                served_by.append(deployment_id)

        # A new routing key for each request: each is drawn by the split, and counts as a caller of its own.
        key = f"{self._name}-{next(self._sent)}"
        own_client = client.with_options(routing_key=key, heard=note_deployment)
        try:
            async with (
                asyncio.timeout(self._traffic.timeout_seconds),
                aclosing(own_client.canary_endpoints.stream(self._endpoint_id, request)) as pieces,
            ):
                async for piece in pieces:
                    if isinstance(piece, Generation):  # the whole reply comes last
                        break
                else:
                    raise ServiceUnreachable("the stream ended without its reply")
            self.counts.answered(piece)
        except ApiError as error:
            deployment_id = error.headers.get("x-deployment-id") or next(iter(served_by), None)
            if error.status == 429:
                wait = min(error.retry_after or 1, LONGEST_SLOWDOWN_S)
                self._slow_until = self._loop.time() + wait
            # The caller's own 4xx is no observation; a failure that names no deployment counts for none.
            elif error.status >= 500 and deployment_id is not None:
                self.counts.failed(deployment_id)
        except (TuneshipError, TimeoutError):
            self.counts.broke_off(served_by[0] if served_by else None)
            self._slow_until = self._loop.time() + 1.0
        finally:
            slots.release()
