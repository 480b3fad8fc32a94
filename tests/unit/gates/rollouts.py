"""A rollout without a network: metrics answers of two deployments' buckets, and a loop that acts on each `Look`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tuneship.gates.canary import Observed, decide
from tuneship.gates.metrics.metrics_reader import read_answer
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.readings import choose_gates
from tuneship.gates.record import (
    ApprovalAsked,
    Begun,
    Fact,
    Look,
    Probed,
    Resumed,
    RolloutRecord,
    SplitConfirmed,
    SplitIntended,
    Verdict,
    linked,
    to_line,
)
from tuneship.gates.view import DeploymentState

START = datetime(2026, 1, 1, tzinfo=UTC)
RUNNING = DeploymentState("running", 1)
EDGES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None]


@dataclass(frozen=True)
class Served:
    """The requests that one deployment served in one bucket, as the service would count them."""

    requests: int = 0
    errors: int = 0
    empty: int = 0
    output: float = 0.0
    quantiles: tuple[float, float, float] = (400.0, 900.0, 1500.0)
    histogram: Sequence[int] | None = None
    cancelled: int | None = None
    refused: int | None = None
    # Distinct callers among the errors. None, as in the fields above, stands for a server that does not publish it.
    callers: int | None = None


def lines_of(facts: Sequence[Fact], change: Callable[[str], str] = str) -> list[str]:
    """Write facts as lines, each with its hash; `change` edits a line before it gets one."""
    lines = [""]
    for fact in facts:
        lines.append(linked(lines[-1], change(to_line(fact))))
    return lines[1:]


# Each pair is the baseline and the candidate.
Buckets = Sequence[tuple[Served, Served]]


def plan_with(**fields: Any) -> CanaryPlan:
    """Return the default plan without waiting and with a bake at 100 %, whose absolute test is the harder one."""
    return CanaryPlan.model_validate(
        {
            "endpoint_id": "cep_1",
            "baseline_deployment_id": "dep_b",
            "candidate_deployment_id": "dep_c",
            "bake_weight": None,
            "wait_for_traffic": "0s",
            **fields,
        }
    )


def moment(bucket: float, seconds: int = 60) -> str:
    return (START + timedelta(seconds=bucket * seconds)).isoformat().replace("+00:00", "Z")


def answer(
    rows: Mapping[int, Served], *, end: float, seconds: int = 60, extended: bool = True
) -> dict[str, Any]:
    """Return the answer of §4.5 for these buckets. `extended` adds our arrays and leaves out empty buckets."""
    stamps = {i: moment(i, seconds) for i in rows}
    busy = {i: row for i, row in rows.items() if row.requests}
    ok = {i: row for i, row in busy.items() if row.requests > row.errors}
    latency: dict[str, Any] = {
        "timestamps": [stamps[i] for i in ok],
        **{f"p{p}": [row.quantiles[k] for row in ok.values()] for k, p in enumerate((50, 95, 99))},
    }
    errors: dict[str, Any] = {
        "timestamps": [stamps[i] for i in busy],
        "percentage": [100 * row.errors / row.requests for row in busy.values()],
    }
    usage: dict[str, Any] = {
        "timestamps": list(stamps.values()),
        "output": [row.output for row in rows.values()],
    }
    throughput: dict[str, Any] = {
        "timestamps": list(stamps.values()),
        "requests_per_second": [row.requests / seconds for row in rows.values()],
    }
    if extended:
        errors["request_count"] = [row.requests for row in busy.values()]
        errors["error_count"] = [row.errors for row in busy.values()]
        usage["empty_count"] = [row.empty for row in rows.values()]
        throughput["complete"] = [i + 1 <= end for i in rows]
        errors |= _of_callers(busy)
        if any(row.histogram for row in ok.values()):
            latency["histogram"] = {
                "le": EDGES,
                "counts": [list(row.histogram or ()) for row in ok.values()],
            }
    return {
        "end_time": moment(end, seconds),
        "interval": f"{seconds}s",
        "metrics": {
            "latency": latency,
            "error_rate": errors,
            "token_usage": usage,
            "throughput": throughput,
        },
    }


def _of_callers(busy: Mapping[int, Served]) -> dict[str, Any]:
    columns = {
        "cancelled_count": [row.cancelled for row in busy.values()],
        "refused_count": [row.refused for row in busy.values()],
        "error_callers": [row.callers for row in busy.values()],
    }
    return {name: values for name, values in columns.items() if any(v is not None for v in values)}


def in_flight(edges: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    """Return the snapshot of requests in flight. The last count is the number of all of them."""
    return {"requests": counts[-1], "ages_ms": {"le": [*edges, None], "counts": list(counts)}}


# Function of (bucket, candidate's weight) that returns what the baseline and the candidate served in it.
Maker = Callable[[int, int], tuple[Served, Served]]
Answers = Callable[[int, dict[str, Any], dict[str, Any]], tuple[Any, Any]]


def as_it_is(_: int, baseline: dict[str, Any], candidate: dict[str, Any]) -> tuple[Any, Any]:
    return baseline, candidate


@dataclass
class Rollout:
    """Runs one look per bucket until an end, with the record growing as the flow would write it."""

    plan: CanaryPlan
    make: Maker
    extended: bool = True
    answers: Answers = as_it_is
    seen: Callable[[int], tuple[DeploymentState, DeploymentState]] = lambda _: (RUNNING, RUNNING)
    probe: Callable[[Served, Served], Probed] | None = None
    act: Callable[[RolloutRecord], RolloutRecord] | None = None
    # Whether the service publishes cancelled and refused requests and callers of errors already before the start.
    counts_callers: bool = False
    # Function of the number of finished buckets: whether a person has paused the rollout.
    paused: Callable[[int], bool] = lambda _: False
    # Number of buckets that a look does not see yet (ingestion lag).
    looks_behind: int = 0
    record: RolloutRecord = field(default_factory=RolloutRecord)
    rows: list[tuple[Served, Served]] = field(default_factory=list[tuple[Served, Served]])
    weights: list[int] = field(default_factory=list[int])

    def begin(self) -> "Rollout":
        first = answer({}, end=0, extended=self.extended)
        if self.counts_callers:
            names = ("cancelled_count", "refused_count", "error_callers")
            first["metrics"]["error_rate"] |= {name: [] for name in names}
        begun = Begun(
            "ro_1",
            "cep_1",
            self.plan.model_dump(mode="json"),
            self.plan.digest(),
            choose_gates(self.plan, read_answer(first).metrics),
        )
        self.record = self.record.plus(begun)
        return self._shift(self.plan.known_steps[0], START)

    def _shift(self, weight: int, at: datetime | None) -> "Rollout":
        self.weights.append(weight)
        self.record = self.record.plus(
            SplitIntended(weight, "test"), SplitConfirmed(weight, at, version=len(self.weights))
        )
        return self

    def observe(self) -> Observed:
        end = len(self.rows)
        known = max(0, end - self.looks_behind)
        seconds = self.plan.bucket_seconds
        both = [
            answer(
                {i: row[arm] for i, row in enumerate(self.rows[:known])},
                end=end,
                seconds=seconds,
                extended=self.extended,
            )
            for arm in (0, 1)
        ]
        baseline, candidate = self.answers(len(self.record.looks) + 1, *both)
        return Observed(baseline, candidate, *self.seen(end), self.paused(end))

    def look(self) -> Look:
        """Let one bucket pass, take one look, and shift the traffic as it says."""
        self.rows.append(self.make(len(self.rows), self.record.weight))
        if self.probe:
            self.record = self.record.plus(self.probe(*self.rows[-1]))
        observed, looks = self.observe(), self.record.looks
        if looks and looks[-1].is_paused and not observed.is_paused:
            self.record = self.record.plus(Resumed())
        look = decide(observed, self.plan, self.record)
        self.record = self.record.plus(look)
        if look.verdict in (Verdict.ADVANCE, Verdict.PROMOTE):
            self._shift(look.next_weight or -1, look.at)
        if look.verdict is Verdict.ROLLBACK:
            self._shift(0, look.at)
        if look.verdict is Verdict.ASK:
            self.record = self.record.plus(ApprovalAsked(look.at))
        if self.act:
            self.record = self.act(self.record)
        return look

    def run(self, most: int = 400) -> Look:
        """Take looks until a verdict ends the rollout."""
        ends = (Verdict.ROLLBACK, Verdict.PAUSE, Verdict.ABORT, Verdict.BAKED)
        while (look := self.look()).verdict not in ends:
            if len(self.rows) >= most:
                break
        return look


class Steady:
    """600 requests a bucket, split exactly by weight, bad ones by cumulative rounding, as in the worked scenarios."""

    def __init__(self, requests: int = 600, **candidate: Any) -> None:
        self.requests = requests
        self.candidate = candidate
        self.carried = {"baseline": 0.0, "candidate": 0.0}

    def errors(self, arm: str, requests: int, share: float) -> int:
        before = round(self.carried[arm])
        self.carried[arm] += requests * share
        return round(self.carried[arm]) - before

    def __call__(self, bucket: int, weight: int) -> tuple[Served, Served]:
        n_c = self.requests * weight // 100
        n_b = self.requests - n_c
        share = self.candidate.get("errors", lambda *_: 0.003)(bucket, weight)
        quantiles = self.candidate.get("quantiles", (400.0, 900.0, 1500.0))
        return (
            Served(n_b, self.errors("baseline", n_b, 0.003), output=n_b * 40.0),
            Served(
                n_c, self.errors("candidate", n_c, share), output=n_c * 40.0, quantiles=quantiles
            ),
        )
