"""Roll-outs on requests drawn one by one: how often each rule is wrong, and how soon it is right.

`python -m tests.gates.drawn --runs 60` prints the table of `docs/gates.md`; `--row NAME` one row of it. Each kind of
traffic is a function of minute and weight; the rules are ours (`tuneship.gates.canary.judge`, look by look, with a
record as the flow writes it), Argo's and Kayenta's in a few lines. All draws come from the seeds that are named.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np

from tests.gates.rollouts import RUNNING, START, plan_with
from tuneship.gates.canary import judge
from tuneship.gates.latency import freeze_first_limits, freeze_limits
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.readings import choose_gates
from tuneship.gates.record import Begun, Look, Record, SplitConfirmed, Verdict
from tuneship.gates.series import ARMS, Arm, Bucket, InFlight, Series, Traffic

Random = np.random.Generator
EDGES = (*(float(2**power) for power in range(18)), math.inf)
"""As the service publishes them."""
PER_MINUTE, HOUR_BEFORE = 300.0, 60
WATCHED = 30
"""Minutes that a rival watches at 100 %."""


@dataclass(frozen=True)
class Behaviour:
    """How a deployment treats one minute's requests. A share may be an array: one value per request."""

    errors: Any = 0.005
    blank: float = 0.002
    time: Any = 1.0
    """Factor on log-normal times with p50 400 and p95 900 ms."""
    tail: float = 0.0
    """Share of answers whose time is multiplied by a Pareto(1.1) factor."""
    slow_share: float = 0.0
    slow_factor: float = 1.0
    cancelled: float = 0.005
    """Callers who hang up out of habit."""
    refused: float = 0.003
    hang: float = 0.0
    patience_s: float = 10.0
    """How long a caller waits for a request that hangs."""
    times_out: bool = False
    """What hangs ends by the server's time-out, as an error, and not by the caller."""
    words: float = 1.0
    vanish: float = 0.0
    """Share of requests that nobody counts."""
    repeats: float = 1.0
    """How often a caller repeats a failing request on average, each time at the same deployment."""


@dataclass(frozen=True)
class Minute:
    """What happens in one minute, or in one bucket where they are shorter."""

    requests: float = PER_MINUTE
    baseline: Behaviour = Behaviour()
    candidate: Behaviour = Behaviour()
    sites: "Sites | None" = None
    unseen: bool = False
    """The look of this minute gets an old answer."""


World = Callable[[int, int], Minute]
"""(minute since the start, candidate's weight); minutes before the start are negative."""


@dataclass(frozen=True)
class Kind:
    """One kind of traffic, and what must become of the roll-out."""

    name: str
    make: Callable[[Random], World]
    must: str = "be promoted"
    most: float | None = 0.05
    """Share of runs that may end otherwise; None: reported only."""
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: int = 60
    note: str = ""
    first_row: int = 0

    @property
    def must_be_promoted(self) -> bool:
        return self.must == "be promoted"


class Sites:
    """Callers with routing keys: each belongs to one deployment, decided by its own draw, at every weight."""

    def __init__(self, rng: Random, number: int) -> None:
        self.sizes = rng.dirichlet(np.full(number, 2.0))
        self.place = rng.permutation((np.arange(number) + rng.random(number)) / number) * 100.0
        if number < 50:
            self.place = rng.random(number) * 100.0
        self.errors = np.minimum(0.005 * rng.lognormal(0.0, 0.8, number), 0.2)
        self.time = rng.lognormal(0.0, 0.3, number)

    def split(self, rng: Random, requests: int, weight: int) -> tuple[np.ndarray, np.ndarray]:
        """The sites of the baseline's requests, and of the candidate's."""
        site = rng.choice(len(self.sizes), size=requests, p=self.sizes)
        at_candidate = self.place[site] < weight
        return site[~at_candidate], site[at_candidate]


@dataclass
class Service:
    """Draws requests and counts them in buckets, as the service would."""

    rng: Random
    world: World
    seconds: int = 60
    waiting: dict[Arm, list[tuple[float, float, bool]]] = field(
        default_factory=lambda: {arm: [] for arm in ARMS}
    )
    """By arm the requests that hang: when they came, when they will end, and whether by the server's time-out."""

    def bucket(self, number: int, weight: int, *, counts_all: bool) -> Bucket:
        minute = self.world(number, weight)
        total = int(self.rng.poisson(minute.requests))
        behaviour = {"baseline": minute.baseline, "candidate": minute.candidate}
        if minute.sites is not None:
            drawn = minute.sites.split(self.rng, total, weight)
            requests: dict[Arm, int] = {}
            for arm, site in zip(ARMS, drawn, strict=True):
                one = behaviour[arm]
                behaviour[arm] = replace(
                    one,
                    errors=one.errors * minute.sites.errors[site] / 0.005,
                    time=one.time * minute.sites.time[site],
                )
                requests[arm] = len(site)
        else:
            n_c = int(self.rng.binomial(total, weight / 100.0))
            requests = {"baseline": total - n_c, "candidate": n_c}
        end = START + timedelta(seconds=self.seconds * (number + 1))
        traffic = {
            arm: self._serve(arm, requests[arm], behaviour[arm], number, counts_all=counts_all)
            for arm in ARMS
        }
        return Bucket(end, traffic["baseline"], traffic["candidate"])

    def _serve(self, arm: Arm, n: int, b: Behaviour, number: int, *, counts_all: bool) -> Traffic:
        rng = self.rng
        vanished = int(rng.binomial(n, b.vanish)) if b.vanish else 0
        hung = int(rng.binomial(n - vanished, b.hang)) if b.hang else 0
        cancelled, timed_out = self._hang(arm, hung, b, number)
        left = n - vanished - hung
        gone = int(rng.binomial(left, b.cancelled))
        refused = int(rng.binomial(left - gone, b.refused))
        left -= gone + refused
        errors, callers, left = self._fail(left, b)
        time = b.time if np.ndim(b.time) == 0 else np.resize(b.time, left)
        latency = 400.0 * time * np.exp(rng.standard_normal(left) * 0.493)
        if b.tail:
            latency = np.where(
                rng.random(left) < b.tail, latency * (rng.pareto(1.1, left) + 1), latency
            )
        if b.slow_share:
            latency = np.where(rng.random(left) < b.slow_share, latency * b.slow_factor, latency)
        below = np.searchsorted(np.sort(latency), EDGES, side="right")
        return Traffic(
            requests=left + errors + timed_out,
            errors=errors + timed_out,
            empty=int(rng.binomial(left, b.blank)),
            output_tokens=float(rng.poisson(40.0 * b.words * left)),
            histogram=tuple(map(int, below)) if left else None,
            cancelled=gone + cancelled if counts_all else None,
            refused=refused if counts_all else None,
            error_callers=callers + timed_out if counts_all else None,
        )

    def _fail(self, left: int, b: Behaviour) -> tuple[int, int, int]:
        """Errors, their callers, and the requests that are left."""
        rng = self.rng
        if b.repeats > 1.0:
            runs = int(rng.poisson(left * b.errors / b.repeats))
            errors = int(rng.geometric(1.0 / b.repeats, runs).sum()) if runs else 0
            return errors, runs, max(0, left - runs)
        if np.ndim(b.errors) == 0:
            errors = int(rng.binomial(left, b.errors))
        else:
            errors = int((rng.random(left) < np.resize(b.errors, left)).sum())
        return errors, errors, left - errors

    def _hang(self, arm: Arm, hung: int, b: Behaviour, number: int) -> tuple[int, int]:
        """Those that ended in this bucket: by their callers, by the server's time-out."""
        begin = float(number * self.seconds)
        came = begin + self.rng.random(hung) * self.seconds
        self.waiting[arm] += [(at, at + b.patience_s, b.times_out) for at in came]
        ended = [one for one in self.waiting[arm] if one[1] <= begin + self.seconds]
        self.waiting[arm] = [one for one in self.waiting[arm] if one[1] > begin + self.seconds]
        timed_out = sum(one[2] for one in ended)
        return len(ended) - timed_out, timed_out

    def in_flight(self, arm: Arm, number: int) -> InFlight:
        """The snapshot at the end of this bucket."""
        now = float((number + 1) * self.seconds)
        ages = sorted((now - at) * 1000.0 for at, _, _ in self.waiting[arm])
        return InFlight(EDGES, tuple(map(int, np.searchsorted(ages, EDGES, side="right"))))


@dataclass(frozen=True)
class Run:
    """How one roll-out ended."""

    is_promoted: bool
    looks: int
    """Until it was promoted (weight above the compared steps), or stopped."""
    reason: str = ""
    minutes: int = 0
    """In all, the bake included."""

    @property
    def is_inconclusive(self) -> bool:
        return self.reason == "inconclusive"


def series_of(buckets: Sequence[Bucket], service: Service | None = None, at: int = 0) -> Series:
    newest = buckets[-1].end if buckets else None
    snapshots = {arm: service.in_flight(arm, at) for arm in ARMS} if service else {}
    return Series(
        buckets=tuple(buckets),
        at=newest or START,
        newest=dict.fromkeys(ARMS, newest),
        edges_ms=dict.fromkeys(ARMS, EDGES),
        counts_empty=True,
        in_flight=snapshots,
    )


PUBLISHED = {
    "metrics": {
        "token_usage": {"empty_count": []},
        "error_rate": {"cancelled_count": [], "refused_count": [], "error_callers": []},
    }
}
BARE = {"metrics": {"token_usage": {"empty_count": []}}}


def roll_out(kind: Kind, seed: int, *, before: bool = False, **fields: Any) -> Run:
    """One roll-out by our gates. `before`: by formula version 1, on what a service of that time published."""
    rng = np.random.default_rng([seed, kind.first_row])
    service = Service(rng, kind.make(rng), kind.seconds)
    plan = plan_with(**{"interval": f"{kind.seconds}s", **kind.plan, **fields})
    counts_all = not before
    hour = [service.bucket(i, 0, counts_all=counts_all) for i in range(-HOUR_BEFORE, 0)]
    freeze = freeze_first_limits if before else freeze_limits
    record = Record(
        (
            Begun(
                "ro_1",
                "cep_1",
                {},
                plan.digest(),
                choose_gates(plan, BARE if before else PUBLISHED),
                freeze(series_of(hour), tuple(reversed(hour))),
                formula_version="1" if before else "",
            ),
            SplitConfirmed(plan.known_steps[0], START),
        )
    )
    return _looks(service, plan, record, counts_all=counts_all)


ENDS = (Verdict.ROLLBACK, Verdict.PAUSE, Verdict.ABORT, Verdict.BAKED)


def _looks(service: Service, plan: CanaryPlan, record: Record, *, counts_all: bool) -> Run:
    buckets: list[Bucket] = []
    seen = 0
    promoted_at = 0
    for minute in count():
        buckets.append(service.bucket(minute, record.weight, counts_all=counts_all))
        seen = seen if service.world(minute, record.weight).unseen else len(buckets)
        snapshot = service if counts_all else None
        look = judge(series_of(buckets[:seen], snapshot, minute), RUNNING, RUNNING, plan, record)
        record = record.plus(look)
        if look.verdict is Verdict.PROMOTE:
            promoted_at = look.number
        if look.verdict in (Verdict.ADVANCE, Verdict.PROMOTE):
            record = record.plus(SplitConfirmed(look.next_weight or -1, look.at))
        if look.verdict in ENDS:
            break
    return _run(look, promoted_at)


def _run(look: Look, promoted_at: int) -> Run:
    if look.verdict is Verdict.BAKED:
        return Run(True, promoted_at, minutes=look.number)
    inconclusive = "max_looks" in look.reasons
    reason = "inconclusive" if inconclusive else look.reason
    return Run(False, look.number, reason, look.number)


# The rivals, in a few lines, on the same traffic: five minutes a step, then half an hour at 100 %.

STEPS = (5, 25, 50, 75)


def _watched(kind: Kind, seed: int) -> tuple[list[Bucket], list[Bucket]]:
    """The hour before, and the buckets of a roll-out that nothing stops."""
    rng = np.random.default_rng([seed, kind.first_row])
    service = Service(rng, kind.make(rng), kind.seconds)
    hour = [service.bucket(i, 0, counts_all=True) for i in range(-HOUR_BEFORE, 0)]
    weights = [step for step in STEPS for _ in range(5)] + [100] * WATCHED
    return hour, [service.bucket(i, w, counts_all=True) for i, w in enumerate(weights)]


def _p95(traffic: Traffic) -> float | None:
    if not traffic.histogram:
        return None
    i = int(np.searchsorted(traffic.histogram, 0.95 * traffic.histogram[-1]))
    low, high = (EDGES[i - 1] if i else 0.5), min(EDGES[i], 2 * EDGES[-2])
    before = traffic.histogram[i - 1] if i else 0
    part = (0.95 * traffic.histogram[-1] - before) / (traffic.histogram[i] - before)
    return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))


def argo(kind: Kind, seed: int, failure_limit: int) -> Run:
    """Each minute success >= 95 % and p95 <= 1.5 x the baseline's earlier p95; more failures than the limit abort."""
    hour, buckets = _watched(kind, seed)
    usual = statistics.median(p95 for b in hour if (p95 := _p95(b.baseline)) is not None)
    failures = 0
    for minute, bucket in enumerate(buckets, start=1):
        one = bucket.candidate
        p95 = _p95(one)
        slow = p95 is not None and p95 > 1.5 * usual
        failures += (one.requests > 0 and one.errors > 0.05 * one.requests) or slow
        if failures > failure_limit:
            return Run(False, minute, "check", minute)
    return Run(True, 20, minutes=len(buckets))


def kayenta(kind: Kind, seed: int) -> Run:
    """Mann-Whitney on the buckets' values, 98 %, 25 % tolerance, at the end of each step; no bake."""
    _, buckets = _watched(kind, seed)
    for step in range(len(STEPS)):
        part = buckets[5 * step : 5 * step + 5]
        if any(_is_higher(part, value) for value in (_error_share, _p95)):
            return Run(False, 5 * step + 5, "metric", 5 * step + 5)
    return Run(True, 20, minutes=20)


def _error_share(traffic: Traffic) -> float | None:
    return traffic.errors / traffic.requests if traffic.requests else None


def _is_higher(part: Sequence[Bucket], value: Callable[[Traffic], float | None]) -> bool:
    ours = [one for b in part if (one := value(b.candidate)) is not None]
    theirs = [1.25 * one for b in part if (one := value(b.baseline)) is not None]
    n, m = len(ours), len(theirs)
    if not n or not m:
        return False
    u = sum((x > y) + 0.5 * (x == y) for x in ours for y in theirs)
    z = (u - n * m / 2 - 0.5) / math.sqrt(n * m * (n + m + 1) / 12)
    return 0.5 * math.erfc(z / math.sqrt(2)) < 0.02


# The kinds.


def steady(**candidate: Any) -> Callable[[Random], World]:
    """A candidate that behaves in one way from the first minute on."""
    minute = Minute(candidate=replace(Behaviour(), **candidate))
    before = Minute()
    return lambda _: lambda number, _weight: minute if number >= 0 else before


def both(make: Callable[[int, int, Arm], Behaviour], requests: Callable[[int], float]) -> Any:
    return lambda _: (
        lambda number, weight: Minute(
            requests(number), make(number, weight, "baseline"), make(number, weight, "candidate")
        )
    )


def constant(_: int) -> float:
    return PER_MINUTE


def _loaded(number: int, weight: int, arm: Arm) -> Behaviour:
    share = weight / 100 if arm == "candidate" else 1 - weight / 100
    return Behaviour(time=0.8 + 0.2 * share)


def _ramp(number: int) -> float:
    return min(max(number, 0), 120) / 120


def _incidents(rng: Random) -> World:
    starts = {int(at) for at in np.nonzero(rng.random(400) < 1 / 60)[0]}

    def world(number: int, _: int) -> Minute:
        if number in starts or number - 1 in starts:
            bad = Behaviour(errors=0.15, time=2.0)
            return Minute(PER_MINUTE, bad, bad)
        return Minute()

    return world


def _sticky(number: int) -> Callable[[Random], World]:
    def make(rng: Random) -> World:
        sites = Sites(rng, number)
        return lambda _number, _weight: Minute(sites=sites)

    return make


def _prompts(number: int, _: int, arm: Arm) -> Behaviour:
    share = 0.3 if arm == "candidate" and number >= 0 else 0.15
    return Behaviour(slow_share=share, slow_factor=2.5)


def _streams(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(slow_share=0.3, slow_factor=6.0)


def _cold(number: int, _: int, arm: Arm) -> Behaviour:
    return (
        Behaviour(time=2.5, errors=0.03) if arm == "candidate" and 0 <= number < 3 else Behaviour()
    )


def _late(minute: int, **worse: Any) -> Callable[[Random], World]:
    bad = Minute(candidate=replace(Behaviour(), **worse))
    return lambda _: lambda number, _weight: bad if number >= minute else Minute()


def _by_minute(make: Callable[[int], Behaviour]) -> Callable[[Random], World]:
    return lambda _: (
        lambda number, _weight: Minute(candidate=make(number) if number >= 0 else Behaviour())
    )


def _retries(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(repeats=3.0)


def _hourly(number: int) -> float:
    return PER_MINUTE * (5 if number % 60 < 3 else 1)


def _busy(number: int, _: int, __: Arm) -> Behaviour:
    return Behaviour(time=1.5 if number % 60 < 3 else 1.0)


def _stale(rng: Random) -> World:
    old = rng.random(2000) < 0.25
    return lambda number, _weight: Minute(unseen=bool(number > 0 and old[number]))


def _clocks(_: Random) -> World:
    """The service's clock stands for two minutes in twenty: three buckets come at once then."""
    return lambda number, _weight: Minute(unseen=number % 20 in (7, 8))


DEMO = {
    "steps": [10, 25, 50, 100],
    "look_every_seconds": 1.0,
    "bake_looks": 15,
    "latency_gates": {"per_output_token": True},
}


def _demo_hang(_: Random) -> World:
    hang = Behaviour(errors=0.0, hang=0.2, patience_s=120.0, times_out=True)
    fine = Behaviour(errors=0.0)
    return lambda number, _weight: Minute(40.0, fine, hang if number >= 0 else fine)


STOPPED = "be stopped"
_ALL = (
    Kind("equal", steady()),
    Kind("load: time grows with a deployment's share", both(_loaded, constant)),
    Kind("heavy tail in both", both(lambda *_: Behaviour(tail=0.08), constant)),
    Kind("200 sticky sites of different health", _sticky(200)),
    Kind(
        "morning ramp: traffic x4, time x1.7 in two hours",
        both(
            lambda number, *_: Behaviour(time=1 + 0.7 * _ramp(number)),
            lambda number: PER_MINUTE * (1 + 3 * _ramp(number)),
        ),
    ),
    Kind("shared incident once an hour", _incidents),
    Kind("errors in runs of 15", both(lambda *_: Behaviour(repeats=15.0), constant)),
    Kind("12 sticky sites of different health", _sticky(12), most=None, note="a key is no request"),
    Kind(
        "twice as many long prompts at the candidate",
        both(_prompts, constant),
        most=None,
        note="slower by its own margin; needs slices",
    ),
    Kind("cold start: x2.5 and 3 % errors for 3 min", both(_cold, constant), most=0.10),
    Kind("two machines: the candidate's is 10 % slower", steady(time=1.1)),
    Kind("retries by a gateway", both(_retries, constant)),
    Kind("streams and whole answers mixed", both(_streams, constant), most=0.10),
    Kind("bursts at the hour: traffic x5, time x1.5", both(_busy, _hourly)),
    Kind("a third deployment takes 30 %", lambda _: lambda *_: Minute(PER_MINUTE * 0.7)),
    Kind("every fourth look reads an old answer", _stale),
    Kind("the service's clock stands for two minutes in 20", _clocks),
    Kind(
        "5 % of the callers hang up by habit", both(lambda *_: Behaviour(cancelled=0.05), constant)
    ),
    Kind("requests split one by one, none lost", steady(), plan={"split_check": True}),
    Kind("5 % errors", steady(errors=0.05), STOPPED, 0.02),
    Kind("1.5 x slower", steady(time=1.5), STOPPED, 0.02),
    Kind(
        "4 % of the answers 20 x slower", steady(slow_share=0.04, slow_factor=20.0), STOPPED, 0.02
    ),
    Kind(
        "drift: +0.15 points of errors a minute",
        _by_minute(lambda n: Behaviour(errors=0.005 + 0.0015 * n)),
        STOPPED,
        0.02,
    ),
    Kind(
        "crash minute (40 % errors) every 15 min",
        _by_minute(lambda n: Behaviour(errors=0.4 if n % 15 == 14 else 0.005)),
        STOPPED,
        0.02,
    ),
    Kind("a slice of 5 % in which half fails", steady(errors=0.03), STOPPED, 0.02),
    Kind(
        "a slice of 2 % in which half fails",
        steady(errors=0.015),
        STOPPED,
        None,
        note="hardly above the margin",
    ),
    Kind(
        "a slice of 1 % in which half fails",
        steady(errors=0.01),
        STOPPED,
        None,
        note="on the margin",
    ),
    Kind("30 % hang, callers wait 10 s", steady(hang=0.3), STOPPED, 0.02),
    Kind("smaller context: the longest 10 % refused", steady(refused=0.1), STOPPED, 0.02),
    Kind("answers of a fifth of the words", steady(words=0.2), STOPPED, 0.02),
    Kind("wrong answers (nothing counts them)", steady(), STOPPED, None, note="needs evaluations"),
    Kind(
        "fine for 90 min, then 10 % errors, x2",
        _late(90, errors=0.1, time=2.0),
        STOPPED,
        None,
        note="after the bake: the watch",
    ),
    Kind("one replica of three stuck", steady(hang=1 / 3, patience_s=30.0), STOPPED, 0.02),
    Kind(
        "flapping: 8 % errors every second minute v 0.3 %",
        _by_minute(lambda n: Behaviour(errors=0.08 if n % 2 else 0.003)),
        STOPPED,
        0.02,
    ),
    Kind(
        "20 % of the requests vanish",
        steady(vanish=0.2),
        STOPPED,
        0.02,
        plan={"split_check": True},
    ),
    Kind(
        "20 % hang, time-out 120 s, the demo's plan",
        _demo_hang,
        STOPPED,
        0.02,
        plan=DEMO,
        seconds=1,
    ),
)
KINDS = {kind.name: replace(kind, first_row=row) for row, kind in enumerate(_ALL)}
"""By name, numbered, so that every kind draws from seeds of its own."""


def runs_of(kind: Kind, seeds: Iterable[int], **fields: Any) -> list[Run]:
    return [roll_out(kind, seed, **fields) for seed in seeds]


def share_wrong(kind: Kind, runs: Sequence[Run]) -> float:
    """Share of the runs that did not end as they must."""
    return sum(run.is_promoted != kind.must_be_promoted for run in runs) / len(runs)


def _cell(kind: Kind, runs: Sequence[Run]) -> str:
    """What went wrong in percent (+ inconclusive), and when it was promoted or stopped."""
    percent = 100.0 / len(runs)
    right = [run for run in runs if run.is_promoted == kind.must_be_promoted]
    wrong = [run for run in runs if run.is_promoted != kind.must_be_promoted]
    at = f" @{statistics.median(run.looks for run in right):.0f}" if right else ""
    unclear = sum(run.is_inconclusive for run in wrong)
    more = f" (+{percent * unclear:.0f})" if unclear else ""
    reasons = sorted({run.reason for run in wrong if run.reason and not run.is_inconclusive})
    why = f" {', '.join(reasons)}" if reasons else ""
    return f"{percent * (len(wrong) - unclear):.0f}{more}{why}{at}"


def table(
    names: Sequence[str], runs: int, first_seed: int, fields: dict[str, Any]
) -> Iterator[str]:
    """The rows as Markdown. Cells: wrong in percent (+ inconclusive), why, and @ the median look of what is right."""
    seeds = range(first_seed, first_seed + runs)
    plan = f" Plan: {fields}." if fields else ""
    yield f"{runs} runs a row, seeds {seeds.start} to {seeds.stop - 1}.{plan}"
    yield ""
    yield "| kind | must | tuneship | formula 1 | Argo 0 | Argo 3 | Kayenta | |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in names:
        kind = KINDS[name]
        cells = [
            _cell(kind, runs_of(kind, seeds, **fields)),
            _cell(kind, runs_of(kind, seeds, before=True)),
        ]
        rivals: list[Callable[[int], Run]] = [
            lambda seed, kind=kind: argo(kind, seed, 0),
            lambda seed, kind=kind: argo(kind, seed, 3),
            lambda seed, kind=kind: kayenta(kind, seed),
        ]
        if kind.seconds == 60:
            cells += [_cell(kind, [rule(seed) for seed in seeds]) for rule in rivals]
        else:
            cells += ["-"] * 3
        yield f"| {name} | {kind.must} | {' | '.join(cells)} | {kind.note} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--row", choices=list(KINDS), action="append")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument(
        "--plan", default="bake_weight=95", help="fields of the plan as name=value, comma-separated"
    )
    given = parser.parse_args()
    pairs = [one.split("=") for one in given.plan.split(",") if one]
    fields = {name: int(value) for name, value in pairs}
    for line in table(given.row or list(KINDS), given.runs, given.seed, fields):
        print(line, flush=True)  # noqa: T201 - a command's output


if __name__ == "__main__":
    main()
