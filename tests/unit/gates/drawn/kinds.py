"""The kinds of traffic, and how a rollout must end on each of them.

What happens in a certain minute happens in one that is drawn: a fixed one could be just where the gates look.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.unit.gates.drawn.worlds import PER_MINUTE, Behaviour, Minute, MinuteOf, Random, Sites
from tuneship.gates.series import Arm


@dataclass(frozen=True)
class Kind:
    """One kind of traffic, and how the rollout must end on it."""

    name: str
    make: Callable[[Random], MinuteOf]
    must: str = "be promoted"
    most: float | None = 0.05
    """Largest share of runs that may end otherwise. With None the share is only reported."""
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: int = 60
    by: int | None = None
    """Latest look at which the median run must have stopped."""
    lag: int = 0
    """Number of looks until a shift takes effect, although it was read back before."""
    note: str = ""
    has_past: bool = True
    """Whether the endpoint had traffic in the hour before."""
    row: int = 0

    @property
    def must_be_promoted(self) -> bool:
        return self.must == "be promoted"


def steady(**candidate: Any) -> Callable[[Random], MinuteOf]:
    """Return traffic on which the candidate behaves in the same way from the first minute on."""
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


def _incidents(
    every: int, minutes: int, baseline: float = 0.005, candidate: float = 0.005
) -> Callable[[Random], MinuteOf]:
    """Both fail 15 % and take twice as long for some minutes."""

    def make(rng: Random) -> MinuteOf:
        starts = np.nonzero(rng.random(900) < 1 / every)[0]
        bad_minutes = {int(at) + i for at in starts for i in range(minutes)}
        bad = Behaviour(errors=0.15, time=2.0)
        usual = Behaviour(errors=baseline), Behaviour(errors=candidate)

        def minute_of(number: int, _: int) -> Minute:
            return Minute(PER_MINUTE, *((bad, bad) if number in bad_minutes else usual))

        return minute_of

    return make


def pair(baseline: Behaviour, candidate: Behaviour) -> Callable[[Random], MinuteOf]:
    """Return traffic on which both deployments behave in the same way throughout."""
    minute = Minute(PER_MINUTE, baseline, candidate)
    return lambda _: lambda _number, _weight: minute


def _sticky(number: int, alone: float = 0.0) -> Callable[[Random], MinuteOf]:
    def make(rng: Random) -> MinuteOf:
        sites = Sites.of_health(rng, number, alone)
        return lambda _number, _weight: Minute(sites=sites)

    return make


def _large_caller(
    share: float, *, late: bool = False, **factors: float
) -> Callable[[Random], MinuteOf]:
    """One caller among many sends this share of the requests, which end in another way by these factors."""

    def make(rng: Random) -> MinuteOf:
        plain = Sites(np.array([share]), rng.random(1) * 100, {}, 1 - share, frozenset({0}))
        plain.sizes = np.array([1.0])
        other = replace(plain, factors={name: np.array([f]) for name, f in factors.items()})
        begin = int(rng.integers(1, 20)) if late else -1000
        return lambda number, _weight: Minute(sites=other if number >= begin else plain)

    return make


def _night_job(*, keyed: bool = True, time: float = 1.0) -> Callable[[Random], MinuteOf]:
    """A job that begins within the first 15 minutes sends as much as all others, and takes three times as long.

    `time`: factor on the candidate's times from the start on.
    """

    def make(rng: Random) -> MinuteOf:
        begin = int(rng.integers(0, 15))
        # While it slows the baseline only, it hides a candidate that is slow.
        place = np.array([99.9]) if time != 1.0 else rng.random(1) * 100.0
        slow = {"time": np.array([3.0])}
        first = Sites(np.array([1.0]), place, slow, 0.5)
        spread = replace(first, known=frozenset({0}))
        candidate = Behaviour(time=time)

        def minute_of(number: int, _: int) -> Minute:
            one = candidate if number >= 0 else Behaviour()
            if number < begin:
                return Minute(candidate=one)
            is_seen = number > begin or not keyed
            return Minute(2 * PER_MINUTE, candidate=one, sites=spread if is_seen else first)

        return minute_of

    return make


def _growing_load(rng: Random) -> MinuteOf:
    """The load of one replica each grows fourfold in 40 minutes, and time with each replica's load."""
    begin = int(rng.integers(0, 15))

    def minute_of(number: int, weight: int) -> Minute:
        requests = PER_MINUTE * (1 + 3 * min(max(number - begin, 0) / 40, 1))

        def one(share: float) -> Behaviour:
            return Behaviour(time=0.7 + 0.3 * requests * share / PER_MINUTE)

        return Minute(requests, one(1 - weight / 100), one(weight / 100), replicas=(1, 1))

    return minute_of


@dataclass
class _Shifts:
    """Remembers when the weight changed, and from what."""

    weight: int = 0
    before: int = 0
    at: int = 0

    def see(self, number: int, weight: int) -> None:
        if weight != self.weight:
            self.before, self.weight, self.at = self.weight, weight, number


def _conversations(_: Random) -> MinuteOf:
    """Conversations that have just moved are three times as slow until the cache knows them, in some three minutes.

    Six of ten requests go on with a conversation; the others are as cold at either deployment.
    """
    shifts = _Shifts()

    def minute_of(number: int, weight: int) -> Minute:
        shifts.see(number, weight)
        moved = (weight - shifts.before) / weight if weight else 0.0
        cold = 0.6 * moved * math.exp(-(number - shifts.at) / 3)
        return Minute(candidate=Behaviour(slow_share=cold, slow_factor=3.0))

    return minute_of


def _new_replicas(requests: float) -> Callable[[Random], MinuteOf]:
    """Each increase brings one more replica, which is three times as slow for two minutes."""

    def make(_: Random) -> MinuteOf:
        shifts, number_of = _Shifts(), {5: 1, 25: 2, 50: 3, 75: 4, 80: 4, 100: 5}

        def minute_of(number: int, weight: int) -> Minute:
            shifts.see(number, weight)
            replicas = number_of.get(weight, 1)
            is_cold = replicas > 1 and number - shifts.at < 2 and weight != 80
            share = 1 / replicas if is_cold else 0.0
            one = Behaviour(slow_share=share, slow_factor=3.0)
            return Minute(requests, candidate=one, replicas=(5, replicas))

        return minute_of

    return make


def _bad_minute(requests: float) -> Callable[[Random], MinuteOf]:
    def make(rng: Random) -> MinuteOf:
        at = int(rng.integers(0, 19))
        bad = Behaviour(errors=0.2)
        return lambda number, _weight: Minute(
            requests, candidate=bad if number == at else Behaviour()
        )

    return make


def _restart(rng: Random) -> MinuteOf:
    at = int(rng.integers(0, 19))
    bad = Behaviour(errors=0.4, time=2.0)
    # So many fail for one minute in a rollout that its share of a minute is drawn as well.
    part = float(rng.uniform(0.1, 0.5))
    bad = replace(bad, errors=0.4 * part)
    return lambda number, _weight: Minute(candidate=bad if number == at else Behaviour())


def _baseline_fails(rng: Random) -> MinuteOf:
    begin = int(rng.integers(0, 20))
    return lambda number, _weight: Minute(
        baseline=Behaviour(errors=0.08 if number >= begin else 0.005)
    )


def _baseline_slows(rng: Random) -> MinuteOf:
    begin = int(rng.integers(0, 20))
    return lambda number, _weight: Minute(baseline=Behaviour(time=1.8 if number >= begin else 1.0))


def _outage(rng: Random) -> MinuteOf:
    begin = int(rng.integers(2, 18))

    def minute_of(number: int, _: int) -> Minute:
        if begin <= number < begin + 6:
            bad = Behaviour(errors=0.6)
            return Minute(PER_MINUTE, bad, bad)
        if begin + 6 <= number < begin + 11:
            busy = Behaviour(errors=0.03, time=1.6)
            return Minute(3 * PER_MINUTE, busy, busy)
        return Minute()

    return minute_of


def _night(number: int) -> float:
    return 4.0 * 75.0 ** min(max(number, 0) / 240, 1.0)


def _lost_buckets(rng: Random) -> MinuteOf:
    lost = rng.random(2000) < 0.1
    return lambda number, _weight: Minute(
        lost=("baseline", "candidate") if number > 0 and lost[number] else ()
    )


def _loses_counts(rng: Random) -> MinuteOf:
    phase = int(rng.integers(0, 10))
    return lambda number, _weight: Minute(
        lost=("candidate",) if number >= 0 and number % 10 == phase else ()
    )


def _crashes(rng: Random) -> MinuteOf:
    crash = rng.random(2000) < 1 / 15
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=0.4 if number >= 0 and crash[number] else 0.005)
    )


def _slow_morning(_: Random) -> MinuteOf:
    """Both become six times slower in an hour."""

    def minute_of(number: int, _: int) -> Minute:
        time = 1 + 5 * min(max(number, 0) / 60, 1)
        worse = 1.6 if number >= 0 else 1.0
        return Minute(PER_MINUTE, Behaviour(time=time), Behaviour(time=worse * time))

    return minute_of


def _flapping_usual(rng: Random) -> MinuteOf:
    phase = int(rng.integers(0, 2))
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=0.08 if number >= 0 and number % 2 == phase else 0.005)
    )


def _prompts(number: int, _: int, arm: Arm) -> Behaviour:
    share = 0.3 if arm == "candidate" and number >= 0 else 0.15
    return Behaviour(slow_share=share, slow_factor=2.5)


def _streams(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(slow_share=0.3, slow_factor=6.0)


def _cold(number: int, _: int, arm: Arm) -> Behaviour:
    return (
        Behaviour(time=2.5, errors=0.03) if arm == "candidate" and 0 <= number < 3 else Behaviour()
    )


def _late(minute: int, **worse: Any) -> Callable[[Random], MinuteOf]:
    bad = Minute(candidate=replace(Behaviour(), **worse))
    return lambda _: lambda number, _weight: bad if number >= minute else Minute()


def _by_minute(make: Callable[[int], Behaviour]) -> Callable[[Random], MinuteOf]:
    return lambda _: (
        lambda number, _weight: Minute(candidate=make(number) if number >= 0 else Behaviour())
    )


def _retries(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(repeats=3.0)


def _hourly(rng: Random) -> MinuteOf:
    phase = int(rng.integers(0, 60))

    def minute_of(number: int, _: int) -> Minute:
        is_busy = (number + phase) % 60 < 3
        one = Behaviour(time=1.5 if is_busy else 1.0)
        return Minute(PER_MINUTE * (5 if is_busy else 1), one, one)

    return minute_of


def _stale(rng: Random, errors: float = 0.005) -> MinuteOf:
    old = rng.random(2000) < 0.25
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=errors), unseen=bool(number > 0 and old[number])
    )


def _flapping(rng: Random) -> MinuteOf:
    fine, bad = Behaviour(errors=0.003), Behaviour(errors=0.08)
    phase = int(rng.integers(0, 2))
    return lambda number, _weight: Minute(
        baseline=fine, candidate=bad if number >= 0 and number % 2 == phase else fine
    )


def _stalled(_: Random) -> MinuteOf:
    stall = Minute(baseline=Behaviour(time=3.0))
    slow = Minute(candidate=Behaviour(time=1.5))
    return lambda number, _weight: slow if number >= 0 else stall if number >= -2 else Minute()


def _clocks(rng: Random) -> MinuteOf:
    """Stop the service's clock for two minutes in twenty. Three buckets come at once after that."""
    phase = int(rng.integers(0, 20))
    return lambda number, _weight: Minute(unseen=number > 0 and (number + phase) % 20 in (7, 8))


def _pause(rng: Random) -> MinuteOf:
    begin = int(rng.integers(1, 20))
    return lambda number, _weight: Minute(0.0 if begin <= number < begin + 180 else PER_MINUTE)


DEMO = {
    "steps": [10, 25, 50, 100],
    "look_every_seconds": 1.0,
    "bake_looks": 15,
    "latency_gates": {"per_output_token": True},
}


def _demo_hang(_: Random) -> MinuteOf:
    hang = Behaviour(errors=0.0, hang=0.2, patience_s=120.0, times_out=True)
    fine = Behaviour(errors=0.0)
    return lambda number, _weight: Minute(40.0, fine, hang if number >= 0 else fine)


def _stalls(rng: Random) -> MinuteOf:
    """15 requests a second of the driver and 5 of users, and in each minute two seconds in which all stands still."""
    at = int(rng.integers(60))
    usual, stalled = Behaviour(time=0.5), Behaviour(time=4.0)

    def second_of(number: int, _weight: int) -> Minute:
        now = stalled if (number - at) % 60 < 2 else usual
        return Minute(20.0, now, now)

    return second_of


EXAMPLE = yaml.safe_load(
    (Path(__file__).parents[4] / "examples/release.yaml").read_text(encoding="utf-8")
)["canary"]
STOPPED = "be stopped"
ONE_LENGTH: dict[str, Any] = {"spread": math.log(1.12) / 1.645}
PER_TOKEN = {"latency_gates": {"per_output_token": True}}

_ALL = (
    # What must be promoted.
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
    Kind("shared incidents of 2 min, once an hour", _incidents(60, 2)),
    Kind("errors in runs of 15", both(lambda *_: Behaviour(repeats=15.0), constant)),
    Kind("12 sticky sites of different health", _sticky(12)),
    Kind("twice as many long prompts at the candidate", both(_prompts, constant), most=0.10),
    Kind("cold start: x2.5 and 3 % errors for 3 min", both(_cold, constant), most=0.10),
    Kind("two machines: the candidate's is 10 % slower", steady(time=1.1)),
    Kind("retries by a gateway", both(_retries, constant)),
    Kind("streams and whole answers mixed", both(_streams, constant), most=0.10),
    Kind("bursts at the hour: traffic x5, time x1.5", _hourly),
    Kind("a third deployment takes 30 %", lambda _: lambda *_: Minute(PER_MINUTE * 0.7)),
    Kind("every fourth look reads an old answer", _stale),
    Kind("the service's clock stands for two minutes in 20", _clocks),
    Kind(
        "5 % of the callers always disconnect early",
        both(lambda *_: Behaviour(cancelled=0.05), constant),
    ),
    Kind(
        "1 % errors in both, correlated within a minute (0.05)",
        both(lambda *_: Behaviour(errors=0.01, clustered=0.05), constant),
    ),
    Kind("a shift takes effect two minutes after it was read back", steady(), lag=2),
    Kind(
        "10 requests a minute, `steps: auto`",
        both(lambda *_: Behaviour(), lambda _: 10.0),
        most=None,
        plan={"steps": [50, 75, 100]},
    ),
    Kind("requests split one by one, none lost", steady(), plan={"split_check": True}),
    Kind(
        "answers of one length: 4 % slower",
        pair(Behaviour(**ONE_LENGTH), Behaviour(time=1.04, **ONE_LENGTH)),
    ),
    Kind("answers of one length: equal", pair(Behaviour(**ONE_LENGTH), Behaviour(**ONE_LENGTH))),
    Kind(
        "answers of one length, other edges: 4 % slower",
        pair(Behaviour(time=1.35, **ONE_LENGTH), Behaviour(time=1.404, **ONE_LENGTH)),
    ),
    Kind("nothing below 520 ms, p95 unchanged", steady(least_ms=520.0)),
    Kind("one replica each, load x4 during the rollout", _growing_load),
    Kind("20 % slower, `per_output_token`", steady(time=1.2), plan=PER_TOKEN),
    Kind("moved conversations meet a cold prefix cache", _conversations, most=0.10),
    Kind(
        "x1.4 at first, warms in an hour",
        _by_minute(lambda n: Behaviour(time=1 + 0.4 * max(0.0, 1 - n / 60))),
        most=0.10,
    ),
    Kind("a keyed night job, half of the requests, x3 time", _night_job()),
    Kind("a keyed caller of 9 % is always refused", _large_caller(0.09, refused=300.0)),
    Kind("a keyed caller of 9 % always disconnects", _large_caller(0.09, cancelled=200.0)),
    Kind("a keyed caller of 20 % turns to long prompts", _large_caller(0.2, late=True, time=2.5)),
    Kind("a driver beside 20 keyed callers", _sticky(20, alone=0.67), plan={"split_check": True}),
    Kind("the baseline begins to fail 8 %", _baseline_fails),
    Kind(
        "the baseline failed 8 % before: a fix",
        pair(Behaviour(errors=0.08), Behaviour()),
    ),
    Kind("shared outage of 6 min, then a herd of retries", _outage),
    Kind("0.8 v 0.2 % errors, shared incidents of 6 min", _incidents(40, 6, 0.002, 0.008)),
    Kind("equal, shared incidents of 6 min", _incidents(40, 6)),
    Kind("0.8 v 0.2 % errors", pair(Behaviour(errors=0.002), Behaviour(errors=0.008))),
    Kind("one bad minute (20 % errors) at 3,000 a minute", _bad_minute(3000.0)),
    Kind("one bad minute (20 % errors) at 300 a minute", _bad_minute(300.0)),
    Kind(
        "begun at 3 h: 4 a minute, 300 at 7 h; steps 50, 75",
        both(lambda *_: Behaviour(), _night),
        most=0.10,
        plan={"steps": [50, 75, 100]},
    ),
    Kind("begun at 3 h, default steps", both(lambda *_: Behaviour(), _night), most=0.10),
    Kind("both fail 3 %", both(lambda *_: Behaviour(errors=0.03), constant)),
    Kind("both 4 % blank", both(lambda *_: Behaviour(blank=0.04), constant)),
    Kind("a new replica after each increase", _new_replicas(300.0)),
    Kind("a new replica after each increase, 3,000 a minute", _new_replicas(3000.0)),
    Kind("a tenth of the buckets lost in both", _lost_buckets),
    Kind(
        "two time zones: traffic and time go up and down",
        both(
            lambda number, *_: Behaviour(time=1.25 + 0.25 * math.sin(number / 25)),
            lambda number: PER_MINUTE * (1.5 + 0.8 * math.sin(number / 25)),
        ),
    ),
    Kind("the baseline becomes slow", _baseline_slows),
    Kind("1.3 x as long answers", steady(words=1.3)),
    Kind(
        "lengths drift in both",
        both(lambda number, *_: Behaviour(words=1 + 0.5 * _ramp(number)), constant),
    ),
    Kind(
        "traffic fades to a third in an hour",
        both(
            lambda *_: Behaviour(),
            lambda number: PER_MINUTE * (1 - 2 / 3 * min(max(number, 0) / 60, 1)),
        ),
    ),
    Kind("the candidate restarts: 40 % errors, x2 for a minute", _restart),
    Kind("a new endpoint", steady(), has_past=False),
    Kind(
        "a new endpoint, heavy tail",
        both(lambda *_: Behaviour(tail=0.08), constant),
        has_past=False,
    ),
    Kind("a job without a key, half of the requests, x3 time", _night_job(keyed=False)),
    # What must be stopped.
    Kind("5 % errors", steady(errors=0.05), STOPPED, 0.02, by=12),
    Kind("1.5 x slower", steady(time=1.5), STOPPED, 0.02, by=20),
    Kind(
        "4 % of the answers 20 x slower", steady(slow_share=0.04, slow_factor=20.0), STOPPED, 0.02
    ),
    Kind(
        "drift: +0.15 points of errors a minute",
        _by_minute(lambda n: Behaviour(errors=0.005 + 0.0015 * n)),
        STOPPED,
        0.02,
    ),
    Kind("crash minutes (40 % errors), 1 in 15 at random", _crashes, STOPPED, 0.10),
    Kind("a slice of 5 % in which half fails", steady(errors=0.03), STOPPED, 0.02),
    Kind(
        "a slice of 2 % in which half fails",
        steady(errors=0.015),
        STOPPED,
        None,
        note="no bound: hardly above the margin",
    ),
    Kind(
        "a slice of 1 % in which half fails",
        steady(errors=0.01),
        STOPPED,
        None,
        note="not promised: on the margin",
    ),
    Kind("2 points more errors", steady(errors=0.025), STOPPED, 0.02),
    Kind(
        "1 point more of four faults each",
        pair(
            Behaviour(),
            Behaviour(errors=0.015, blank=0.012, cancelled=0.015, refused=0.013),
        ),
        STOPPED,
        0.10,
    ),
    Kind("30 % hang, callers wait 10 s", steady(hang=0.3), STOPPED, 0.02, by=5),
    Kind("smaller context: the longest 10 % refused", steady(refused=0.1), STOPPED, 0.02),
    Kind("answers of a fifth of the words", steady(words=0.2), STOPPED, 0.02, by=5),
    Kind("30 % are a full stop", steady(full_stops=0.3), STOPPED, 0.02, by=5),
    Kind("all are a full stop", steady(full_stops=1.0), STOPPED, 0.02, by=5),
    Kind("3 % loop to the token limit", steady(loops=0.03), STOPPED, 0.10),
    Kind("6 % loop, `per_output_token`", steady(loops=0.06), STOPPED, 0.02, plan=PER_TOKEN),
    Kind(
        "wrong answers (nothing counts them)",
        steady(),
        STOPPED,
        None,
        note="not promised: needs evaluations",
    ),
    Kind(
        "fine for 90 min, then 10 % errors, x2",
        _late(90, errors=0.1, time=2.0),
        STOPPED,
        None,
        note="not promised: after the bake",
    ),
    Kind("one replica of three stuck", steady(hang=1 / 3, patience_s=30.0), STOPPED, 0.02),
    Kind("flapping: 8 % errors every second minute v 0.3 %", _flapping, STOPPED, 0.02, by=15),
    Kind("two minutes at x3 before the start, then 1.5 x slower", _stalled, STOPPED, 0.02, by=20),
    Kind(
        "5 % errors, every fourth look reads an old answer",
        lambda rng: _stale(rng, errors=0.05),
        STOPPED,
        0.02,
    ),
    Kind(
        "20 % hang, time-out 120 s",
        steady(hang=0.2, patience_s=120.0, times_out=True),
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
    Kind("the candidate's counts of each tenth minute are lost", _loses_counts, STOPPED, 0.02),
    Kind(
        "20 % hang, time-out 120 s, the demo's plan",
        _demo_hang,
        STOPPED,
        0.02,
        plan=DEMO,
        seconds=1,
    ),
    Kind(
        "answers of one length: 1.4 x slower",
        pair(Behaviour(**ONE_LENGTH), Behaviour(time=1.4, **ONE_LENGTH)),
        STOPPED,
        0.02,
        by=15,
    ),
    Kind("both x6 in the morning, candidate x1.6", _slow_morning, STOPPED, 0.02, by=15),
    Kind(
        "candidate x1.5, a keyed job hides it at the baseline",
        _night_job(time=1.5),
        STOPPED,
        0.02,
    ),
    Kind(
        "the median doubles, p95 stays",
        steady(time=2.0, spread=math.log(900 / 800) / 1.645),
        STOPPED,
        0.02,
    ),
    Kind("1.5 x slower from minute 30 on", _late(30, time=1.5), STOPPED, 0.02, by=50),
    Kind("3 % errors from minute 30 on", _late(30, errors=0.03), STOPPED, 0.02, by=50),
    Kind("8 % errors every second minute", _flapping_usual, STOPPED, 0.02, by=15),
    # At the end, since each kind's seeds come from its place.
    Kind(
        "examples/release.yaml beside users, 2 s of each minute stalled",
        _stalls,
        plan=EXAMPLE,
        seconds=1,
    ),
    Kind("no traffic for three hours", _pause),
    Kind(
        "a cache answers half in 20 ms: 50 v 46 % hits",
        pair(
            Behaviour(slow_share=0.5, slow_factor=0.05),
            Behaviour(slow_share=0.46, slow_factor=0.05),
        ),
    ),
    Kind(
        "a cache answers 52 % in 20 ms, answers alike",
        both(lambda *_: Behaviour(slow_share=0.52, slow_factor=0.05, spread=0.2), constant),
    ),
    Kind(
        "a cache of 50 % is broken",
        pair(Behaviour(slow_share=0.5, slow_factor=0.05), Behaviour()),
        STOPPED,
        0.02,
    ),
)
KINDS = {kind.name: replace(kind, row=row) for row, kind in enumerate(_ALL)}
"""All kinds by name. They are numbered, so that every kind draws from seeds of its own."""
