"""The kinds of traffic, and how a rollout must end on each of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

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


def _incidents(rng: Random) -> MinuteOf:
    starts = {int(at) for at in np.nonzero(rng.random(400) < 1 / 60)[0]}

    def minute_of(number: int, _: int) -> Minute:
        if number in starts or number - 1 in starts:
            bad = Behaviour(errors=0.15, time=2.0)
            return Minute(PER_MINUTE, bad, bad)
        return Minute()

    return minute_of


def _sticky(number: int) -> Callable[[Random], MinuteOf]:
    def make(rng: Random) -> MinuteOf:
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


def _late(minute: int, **worse: Any) -> Callable[[Random], MinuteOf]:
    bad = Minute(candidate=replace(Behaviour(), **worse))
    return lambda _: lambda number, _weight: bad if number >= minute else Minute()


def _by_minute(make: Callable[[int], Behaviour]) -> Callable[[Random], MinuteOf]:
    return lambda _: (
        lambda number, _weight: Minute(candidate=make(number) if number >= 0 else Behaviour())
    )


def _retries(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(repeats=3.0)


def _hourly(number: int) -> float:
    return PER_MINUTE * (5 if number % 60 < 3 else 1)


def _busy(number: int, _: int, __: Arm) -> Behaviour:
    return Behaviour(time=1.5 if number % 60 < 3 else 1.0)


def _stale(rng: Random, errors: float = 0.005) -> MinuteOf:
    old = rng.random(2000) < 0.25
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=errors), unseen=bool(number > 0 and old[number])
    )


def _flapping(_: Random) -> MinuteOf:
    fine, bad = Behaviour(errors=0.003), Behaviour(errors=0.08)
    return lambda number, _weight: Minute(
        baseline=fine, candidate=bad if number > 0 and number % 2 else fine
    )


def _stalled(_: Random) -> MinuteOf:
    stall = Minute(baseline=Behaviour(time=3.0))
    slow = Minute(candidate=Behaviour(time=1.5))
    return lambda number, _weight: slow if number >= 0 else stall if number >= -2 else Minute()


def _clocks(_: Random) -> MinuteOf:
    """Stop the service's clock for two minutes in twenty. Three buckets come at once after that."""
    return lambda number, _weight: Minute(unseen=number % 20 in (7, 8))


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
    Kind(
        "12 sticky sites of different health",
        _sticky(12),
        most=None,
        note="bound 5 % not met: a key is not a request",
    ),
    Kind(
        "twice as many long prompts at the candidate",
        both(_prompts, constant),
        most=None,
        note="bound 10 % not met: slower by its own prompts",
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
        note="not promised: too few requests, as the forecast says",
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
        note="bound 2 % not met: hardly above the margin",
    ),
    Kind(
        "a slice of 1 % in which half fails",
        steady(errors=0.01),
        STOPPED,
        None,
        note="not promised: on the margin",
    ),
    Kind("30 % hang, callers wait 10 s", steady(hang=0.3), STOPPED, 0.02),
    Kind("smaller context: the longest 10 % refused", steady(refused=0.1), STOPPED, 0.02),
    Kind("answers of a fifth of the words", steady(words=0.2), STOPPED, 0.02),
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
    Kind(
        "flapping: 8 % errors every second minute v 0.3 %",
        _flapping,
        STOPPED,
        0.02,
        by=12,
    ),
    Kind("two minutes at x3 before the start, then 1.5 x slower", _stalled, STOPPED, 0.02),
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
    Kind(
        "20 % hang, time-out 120 s, the demo's plan",
        _demo_hang,
        STOPPED,
        0.02,
        plan=DEMO,
        seconds=1,
    ),
)
KINDS = {kind.name: replace(kind, row=row) for row, kind in enumerate(_ALL)}
"""All kinds by name. They are numbered, so that every kind draws from seeds of its own."""
