"""After the bake: compares each endpoint's serving deployment with its own first day, and reports what has become
worse.

An alarm is a line at WARNING, an event of the Prefect server and an artifact, once for each deployment and finding; it
never moves traffic. `<records>/watch/` keeps when a deployment began, the metrics of its first day (the service deletes
them after 90 days), and the alarms. The statistics are in `tuneship/gates/watch.py`.
"""

import hashlib
import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from pydantic import BaseModel, Field

from flows.rollout.abandoned import GuardView
from flows.rollout.split import Log, describe
from flows.shared.journal import FileLock, Journal, damage_of
from tasks.endpoints import NO_SUCH_ROUTE, every_canary_endpoint
from tasks.metrics import get_deployment_metrics
from tuneship.cards.markdown import code
from tuneship.client import ApiError, TuneshipError
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.metrics.metrics_reader import Metrics
from tuneship.gates.metrics.series import Unusable
from tuneship.gates.watch import (
    DAY,
    INTERVAL,
    QUARTER,
    WatchReading,
    asked_from,
    first_traffic,
    rounded_up,
    weigh,
)
from tuneship.prefect.connection import service_name

EVENT = "tuneship.watch.alarm"


class Alarm(BaseModel):
    """A deployment is worse than it was on its own first day."""

    endpoint_id: str
    deployment_id: str
    finding: str = Field(description="The gate: error, slow, very_slow, empty, abandoned, refused.")
    since: datetime = Field(description="The stretch of time that was weighed begins here.")
    requests: int
    bad: int
    first_requests: int = Field(description="At the same hours of the first day, or before.")
    first_bad: int

    @property
    def text(self) -> str:
        """The alarm in one line."""
        return (
            f"{self.deployment_id} on {self.endpoint_id} is worse than on its first day ({self.finding}): "
            f"{self.bad} of {self.requests} since {self.since:%Y-%m-%d %H:%M} UTC, "
            f"{self.first_bad} of {self.first_requests} then"
        )


@dataclass(frozen=True)
class ServingDeployment:
    """The one deployment that has all traffic of an endpoint."""

    endpoint_id: str
    deployment_id: str
    # The endpoint's last change.
    since: datetime

    @property
    def key(self) -> str:
        """The file name of this deployment's journal."""
        # The service's name may be an address, and has then signs that no file name may have.
        text = f"{service_name()}|{self.endpoint_id}|{self.deployment_id}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Memory:
    """The known facts about one deployment, in a journal."""

    def __init__(self, path: Path) -> None:
        """Read the journal. Raises OSError."""
        self._journal = Journal(path)
        self.facts, damaged = self._journal.read(_fact)
        self._damage = [damage_of(path, damaged)] if damaged else []

    def last(self, kind: str) -> dict[str, Any] | None:
        """The newest fact of this kind."""
        return next((fact for fact in reversed(self.facts) if fact["kind"] == kind), None)

    def has_reported(self, finding: str) -> bool:
        """Whether an alarm for this finding was raised before."""
        return any(fact["kind"] == "alarm" and fact["finding"] == finding for fact in self.facts)

    def add(self, kind: str, **fields: Any) -> None:
        """Remember a fact; where the disk takes no line, an alarm is repeated by the next run rather than lost."""
        fact = {"kind": kind, **fields}
        self._journal.append_if_possible(json.dumps(fact, separators=(",", ":")))
        self.facts.append(fact)

    @property
    def notes(self) -> list[str]:
        """Notes for people on lines that cannot be read or written."""
        unwritten = self._journal.unwritten
        return self._damage + ([unwritten] if unwritten else [])


def _fact(line: bytes) -> dict[str, Any] | None:
    # A fact without its own field is damaged, whatever else its line says.
    needed = {"began": "at", "first_day": "answer", "alarm": "finding"}
    with suppress(ValueError, KeyError, TypeError):
        fact = json.loads(line)
        if needed[fact["kind"]] in fact:
            return fact
    return None


def watch_endpoints(watch: GuardView, records: Path) -> tuple[list[Alarm], list[str]]:
    """Weigh every endpoint that one deployment serves alone. Returns the new alarms, and notes on failures.

    Never raises: the guard has more important work. A server that lists no endpoints is not watched.
    """
    alarms: list[Alarm] = []
    notes: list[str] = []
    try:
        endpoints = every_canary_endpoint()
    except TuneshipError as error:
        is_bare = isinstance(error, ApiError) and error.status in NO_SUCH_ROUTE
        return [], [] if is_bare else [f"no endpoint was watched ({describe(error)})"]
    for endpoint in endpoints:
        alone = [one.id for one in endpoint.deployments if one.traffic_percentage == 100]
        # A rollout and its bake have gates of their own; where several share the traffic, none serves alone.
        if endpoint.lease is not None or not alone:
            continue
        served = ServingDeployment(endpoint.id, alone[0], endpoint.updated_at)
        try:
            more, noted = _watch(served, watch, records / "watch" / f"{served.key}.jsonl")
            alarms += more
            notes += noted
        except Unusable as error:
            notes.append(f"{served.deployment_id} was not watched: {error}")
        except TuneshipError as error:
            notes.append(f"{served.deployment_id} was not watched ({describe(error)})")
        except Exception as error:  # one deployment, whatever is wrong, must not stop the others
            watch.log.exception("%s was not watched", served.deployment_id)
            notes.append(f"{served.deployment_id} was not watched ({type(error).__name__})")
    return alarms, notes


def _watch(
    served: ServingDeployment, watch: GuardView, path: Path
) -> tuple[list[Alarm], list[str]]:
    lock = FileLock(path.with_suffix(".lock"))
    if not lock.take():  # another guard watches it
        return [], []
    try:
        memory = Memory(path)
        seen = _look(served, memory, watch.now)
        if seen is None:
            return [], memory.notes
        readings, notes = seen
        alarms = [
            Alarm(
                endpoint_id=served.endpoint_id,
                deployment_id=served.deployment_id,
                finding=reading.gate,
                since=reading.begins,
                requests=reading.requests,
                bad=reading.bad,
                first_requests=reading.first_requests,
                first_bad=reading.first_bad,
            )
            for reading in readings
            if not memory.has_reported(reading.gate)
        ]
        _raise_alarms(alarms, readings, memory, watch)
        return alarms, notes + memory.notes
    finally:
        lock.release()


def _look(
    served: ServingDeployment, memory: Memory, now: datetime
) -> tuple[list[WatchReading], list[str]] | None:
    """Weigh one deployment. Returns its worse gates, each once, and notes; None in its first quarter hour."""
    began = _began(served, memory, now)
    if began is None or began + QUARTER > now:
        return None
    kept = memory.last("first_day")
    first: Metrics
    if kept:
        first = kept["answer"]
    else:
        first = _ask(served, began, min(now, began + DAY))
        # The last quarter hour of the first day is still being counted when the day ends.
        if now > began + DAY + QUARTER:
            memory.add("first_day", answer=first.model_dump(mode="json"))
    # Within its first day a deployment is compared with itself: one answer has both sides.
    recent = first if began + DAY > now else _ask(served, asked_from(began, now), now)
    weighed = weigh(first, recent, began, now)
    # Several stretches may show the same: the newest is reported.
    worse = {one.gate: one for one in weighed.readings if one.is_worse}
    notes = [
        f"{served.deployment_id} was not watched for {gate}: {why}"
        for gate, why in weighed.unusable.items()
    ]
    return list(worse.values()), notes


def _began(served: ServingDeployment, memory: Memory, now: datetime) -> datetime | None:
    """The start of a deployment's first day: its first traffic since it serves alone, or the first within the last 24
    hours.
    """
    known = memory.last("began")
    if known is not None:
        return datetime.fromisoformat(known["at"])
    # One that nobody used in its first 24 hours begins with the first traffic of the last 24.
    for start in (rounded_up(served.since), rounded_up(now - DAY)):
        until = min(now, start + DAY)
        if start < until and (at := first_traffic(_ask(served, start, until))) is not None:
            names = {"endpoint_id": served.endpoint_id, "deployment_id": served.deployment_id}
            memory.add("began", at=at.isoformat(), service=service_name(), **names)
            return at
    return None


def _ask(served: ServingDeployment, start: datetime, until: datetime) -> DeploymentMetrics:
    return get_deployment_metrics.fn(
        served.deployment_id,
        interval=INTERVAL,
        start_time=start,
        end_time=until,
        endpoint_id=served.endpoint_id,
    )


def _raise_alarms(
    alarms: Sequence[Alarm], readings: Sequence[WatchReading], memory: Memory, watch: GuardView
) -> None:
    """Raise the alarms, then remember them: if the process dies in between, they are raised twice rather than never."""
    for alarm in alarms:
        watch.log.warning(alarm.text)
        name = f"{service_name()}|{alarm.endpoint_id}|{alarm.deployment_id}|{alarm.finding}"
        endpoint = {
            "prefect.resource.id": f"tuneship.canary-endpoint.{alarm.endpoint_id}",
            "prefect.resource.role": "endpoint",
        }
        with _even_without_server(watch.log):
            emit_event(
                EVENT,
                resource={"prefect.resource.id": f"tuneship.deployment.{alarm.deployment_id}"},
                related=[endpoint],
                payload={**alarm.model_dump(mode="json"), "text": alarm.text},
                # The server keeps one event of an id: an alarm that is raised twice triggers once.
                id=uuid5(NAMESPACE_URL, name),
            )
    if alarms:
        with _even_without_server(watch.log):
            _show(alarms[0], readings)
    for alarm in alarms:
        memory.add("alarm", at=watch.now.isoformat(), **alarm.model_dump(mode="json"))


@contextmanager
def _even_without_server(log: Log) -> Generator[None]:
    """Continue without the Prefect server, whose absence is in the log."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what Prefect raises without its server is no single type
        log.warning("an alarm was not shown (%s)", type(error).__name__)


def _show(alarm: Alarm, readings: Sequence[WatchReading]) -> None:
    """Write a page on the run and among the artifacts, a new version with each new finding."""
    lines = [
        f"# {code(alarm.deployment_id)} is worse than on its first day",
        f"It serves all traffic of {code(alarm.endpoint_id)}. Nothing was moved: see to it, or roll back by a release.",
        "",
        "| finding | since (UTC) | now | first day | evidence | limit |",
        "|---|---|---|---|---|---|",
    ]
    for one in readings:
        # Either of two measures may have found it: the one that did is shown.
        log_e, limit = one.log_e, one.log_e_limit
        if log_e < limit:
            log_e, limit = one.log_u, one.log_u_limit
        lines.append(
            f"| {one.gate} | {one.begins.astimezone(UTC):%Y-%m-%d %H:%M} | {one.bad} of {one.requests} "
            f"| {one.first_bad} of {one.first_requests} | {log_e:.1f} | {limit:.1f} |"
        )
    lines += ["", 'Evidence and limits are natural logarithms: `docs/gates.md`, "After the bake".']
    key = re.sub(r"[^a-z0-9]+", "-", f"watch-{alarm.deployment_id}".lower())
    create_markdown_artifact("\n".join(lines), key=key, description=alarm.text)
