"""Functions of a minute and the candidate's weight that return how both deployments behave in it.

What happens in a certain minute happens in one that is drawn: a fixed one could be just where the gates look. Next:
`kinds.py` says how a rollout must end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.unit.gates.drawn.worlds import PER_MINUTE, Behaviour, Minute, MinuteOf, Random, Sites
from tuneship.gates.metrics.series import Arm


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


def loaded(number: int, weight: int, arm: Arm) -> Behaviour:
    share = weight / 100 if arm == "candidate" else 1 - weight / 100
    return Behaviour(time=0.8 + 0.2 * share)


def ramp(number: int) -> float:
    return min(max(number, 0), 120) / 120


def incidents(
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


def sticky(number: int, alone: float = 0.0) -> Callable[[Random], MinuteOf]:
    def make(rng: Random) -> MinuteOf:
        sites = Sites.of_health(rng, number, alone)
        return lambda _number, _weight: Minute(sites=sites)

    return make


def large_caller(
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


def night_job(*, keyed: bool = True, time: float = 1.0) -> Callable[[Random], MinuteOf]:
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


def growing_load(rng: Random) -> MinuteOf:
    """The load of one replica each grows fourfold in 40 minutes, and time with each replica's load."""
    begin = int(rng.integers(0, 15))

    def minute_of(number: int, weight: int) -> Minute:
        requests = PER_MINUTE * (1 + 3 * min(max(number - begin, 0) / 40, 1))

        def one(share: float) -> Behaviour:
            return Behaviour(time=0.7 + 0.3 * requests * share / PER_MINUTE)

        return Minute(requests, one(1 - weight / 100), one(weight / 100), replicas=(1, 1))

    return minute_of


@dataclass
class Shifts:
    """Remembers when the weight changed, and from what."""

    weight: int = 0
    before: int = 0
    at: int = 0

    def see(self, number: int, weight: int) -> None:
        if weight != self.weight:
            self.before, self.weight, self.at = self.weight, weight, number


def conversations(_: Random) -> MinuteOf:
    """Conversations that have just moved are three times as slow until the cache knows them, in some three minutes.

    Six of ten requests go on with a conversation; the others are as cold at either deployment.
    """
    shifts = Shifts()

    def minute_of(number: int, weight: int) -> Minute:
        shifts.see(number, weight)
        moved = (weight - shifts.before) / weight if weight else 0.0
        cold = 0.6 * moved * math.exp(-(number - shifts.at) / 3)
        return Minute(candidate=Behaviour(slow_share=cold, slow_factor=3.0))

    return minute_of


def new_replicas(requests: float) -> Callable[[Random], MinuteOf]:
    """Each increase brings one more replica, which is three times as slow for two minutes."""

    def make(_: Random) -> MinuteOf:
        shifts, number_of = Shifts(), {5: 1, 25: 2, 50: 3, 75: 4, 80: 4, 100: 5}

        def minute_of(number: int, weight: int) -> Minute:
            shifts.see(number, weight)
            replicas = number_of.get(weight, 1)
            is_cold = replicas > 1 and number - shifts.at < 2 and weight != 80
            share = 1 / replicas if is_cold else 0.0
            one = Behaviour(slow_share=share, slow_factor=3.0)
            return Minute(requests, candidate=one, replicas=(5, replicas))

        return minute_of

    return make


def bad_minute(requests: float) -> Callable[[Random], MinuteOf]:
    def make(rng: Random) -> MinuteOf:
        at = int(rng.integers(0, 19))
        bad = Behaviour(errors=0.2)
        return lambda number, _weight: Minute(
            requests, candidate=bad if number == at else Behaviour()
        )

    return make


def restart(rng: Random) -> MinuteOf:
    at = int(rng.integers(0, 19))
    bad = Behaviour(errors=0.4, time=2.0)
    # So many fail for one minute in a rollout that its share of a minute is drawn as well.
    part = float(rng.uniform(0.1, 0.5))
    bad = replace(bad, errors=0.4 * part)
    return lambda number, _weight: Minute(candidate=bad if number == at else Behaviour())


def baseline_fails(rng: Random) -> MinuteOf:
    begin = int(rng.integers(0, 20))
    return lambda number, _weight: Minute(
        baseline=Behaviour(errors=0.08 if number >= begin else 0.005)
    )


def baseline_slows(rng: Random) -> MinuteOf:
    begin = int(rng.integers(0, 20))
    return lambda number, _weight: Minute(baseline=Behaviour(time=1.8 if number >= begin else 1.0))


def outage(rng: Random) -> MinuteOf:
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


def night(number: int) -> float:
    return 4.0 * 75.0 ** min(max(number, 0) / 240, 1.0)


def lost_buckets(rng: Random) -> MinuteOf:
    lost = rng.random(2000) < 0.1
    return lambda number, _weight: Minute(
        lost=("baseline", "candidate") if number > 0 and lost[number] else ()
    )


def loses_counts(rng: Random) -> MinuteOf:
    phase = int(rng.integers(0, 10))
    return lambda number, _weight: Minute(
        lost=("candidate",) if number >= 0 and number % 10 == phase else ()
    )


def crashes(rng: Random) -> MinuteOf:
    crash = rng.random(2000) < 1 / 15
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=0.4 if number >= 0 and crash[number] else 0.005)
    )


def slow_morning(_: Random) -> MinuteOf:
    """Both become six times slower in an hour."""

    def minute_of(number: int, _: int) -> Minute:
        time = 1 + 5 * min(max(number, 0) / 60, 1)
        worse = 1.6 if number >= 0 else 1.0
        return Minute(PER_MINUTE, Behaviour(time=time), Behaviour(time=worse * time))

    return minute_of


def flapping_usual(rng: Random) -> MinuteOf:
    phase = int(rng.integers(0, 2))
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=0.08 if number >= 0 and number % 2 == phase else 0.005)
    )


def prompts(number: int, _: int, arm: Arm) -> Behaviour:
    share = 0.3 if arm == "candidate" and number >= 0 else 0.15
    return Behaviour(slow_share=share, slow_factor=2.5)


def streams(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(slow_share=0.3, slow_factor=6.0)


def cold(number: int, _: int, arm: Arm) -> Behaviour:
    return (
        Behaviour(time=2.5, errors=0.03) if arm == "candidate" and 0 <= number < 3 else Behaviour()
    )


def late(minute: int, **worse: Any) -> Callable[[Random], MinuteOf]:
    bad = Minute(candidate=replace(Behaviour(), **worse))
    return lambda _: lambda number, _weight: bad if number >= minute else Minute()


def by_minute(make: Callable[[int], Behaviour]) -> Callable[[Random], MinuteOf]:
    return lambda _: (
        lambda number, _weight: Minute(candidate=make(number) if number >= 0 else Behaviour())
    )


def retries(_number: int, _weight: int, _arm: Arm) -> Behaviour:
    return Behaviour(repeats=3.0)


def hourly(rng: Random) -> MinuteOf:
    phase = int(rng.integers(0, 60))

    def minute_of(number: int, _: int) -> Minute:
        is_busy = (number + phase) % 60 < 3
        one = Behaviour(time=1.5 if is_busy else 1.0)
        return Minute(PER_MINUTE * (5 if is_busy else 1), one, one)

    return minute_of


def stale(rng: Random, errors: float = 0.005) -> MinuteOf:
    old = rng.random(2000) < 0.25
    return lambda number, _weight: Minute(
        candidate=Behaviour(errors=errors), unseen=bool(number > 0 and old[number])
    )


def flapping(rng: Random) -> MinuteOf:
    fine, bad = Behaviour(errors=0.003), Behaviour(errors=0.08)
    phase = int(rng.integers(0, 2))
    return lambda number, _weight: Minute(
        baseline=fine, candidate=bad if number >= 0 and number % 2 == phase else fine
    )


def stalled(_: Random) -> MinuteOf:
    stall = Minute(baseline=Behaviour(time=3.0))
    slow = Minute(candidate=Behaviour(time=1.5))
    return lambda number, _weight: slow if number >= 0 else stall if number >= -2 else Minute()


def clocks(rng: Random) -> MinuteOf:
    """Stop the service's clock for two minutes in twenty. Three buckets come at once after that."""
    phase = int(rng.integers(0, 20))
    return lambda number, _weight: Minute(unseen=number > 0 and (number + phase) % 20 in (7, 8))


def pause(rng: Random) -> MinuteOf:
    begin = int(rng.integers(1, 20))
    return lambda number, _weight: Minute(0.0 if begin <= number < begin + 180 else PER_MINUTE)


def demo_hang(_: Random) -> MinuteOf:
    hang = Behaviour(errors=0.0, hang=0.2, patience_s=120.0, times_out=True)
    fine = Behaviour(errors=0.0)
    return lambda number, _weight: Minute(40.0, fine, hang if number >= 0 else fine)


def stalls(rng: Random) -> MinuteOf:
    """15 requests a second of the driver and 5 of users, and in each minute two seconds in which all stands still."""
    at = int(rng.integers(60))
    usual, stalled = Behaviour(time=0.5), Behaviour(time=4.0)

    def second_of(number: int, _weight: int) -> Minute:
        now = stalled if (number - at) % 60 < 2 else usual
        return Minute(20.0, now, now)

    return second_of
