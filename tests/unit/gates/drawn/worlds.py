"""Requests drawn one by one, and counted in buckets as the service counts them.

`kinds.py` has the functions that say what happens in each minute at each weight of the candidate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np

from tests.unit.gates.rollouts import START
from tuneship.gates.series import ARMS, Arm, ArmTraffic, Bucket, InFlightAges

Random = np.random.Generator
EDGES = (*(float(2**power) for power in range(18)), math.inf)
"""Edges of the histogram, as the service publishes them."""
PER_MINUTE, HOUR_BEFORE = 300.0, 60


@dataclass(frozen=True)
class Behaviour:
    """The way a deployment treats one minute's requests. A share may be an array with one value per request."""

    errors: Any = 0.005
    blank: float = 0.002
    time: Any = 1.0
    """Factor on log-normal times with p50 400 and p95 900 ms."""
    tail: float = 0.0
    """Share of answers whose time is multiplied by a Pareto(1.1) factor."""
    slow_share: float = 0.0
    slow_factor: float = 1.0
    cancelled: float = 0.005
    """Share of requests whose callers disconnect out of habit."""
    refused: float = 0.003
    hang: float = 0.0
    patience_s: float = 10.0
    """Seconds that a caller waits for a request that hangs."""
    times_out: bool = False
    """Whether a hanging request ends by the server's time-out, as an error, and not by its caller."""
    words: float = 1.0
    vanish: float = 0.0
    """Share of requests that nobody counts."""
    clustered: float = 0.0
    """Correlation of the errors of one minute. Each minute draws its own error rate, with `errors` as the mean."""
    repeats: float = 1.0
    """Average number of times a caller sends a failing request, each time to the same deployment."""


@dataclass(frozen=True)
class Minute:
    """The traffic of one minute, or of one bucket where buckets are shorter."""

    requests: float = PER_MINUTE
    baseline: Behaviour = Behaviour()
    candidate: Behaviour = Behaviour()
    sites: "Sites | None" = None
    unseen: bool = False
    """Whether the look of this minute gets an old answer."""


MinuteOf = Callable[[int, int], Minute]
"""Function of (minute since the start, candidate's weight). Minutes before the start are negative."""


class Sites:
    """Callers with routing keys. Each has one draw that decides at every weight which deployment it belongs to."""

    def __init__(self, rng: Random, number: int) -> None:
        self.sizes = rng.dirichlet(np.full(number, 2.0))
        self.place = rng.permutation((np.arange(number) + rng.random(number)) / number) * 100.0
        if number < 50:
            self.place = rng.random(number) * 100.0
        self.errors = np.minimum(0.005 * rng.lognormal(0.0, 0.8, number), 0.2)
        self.time = rng.lognormal(0.0, 0.3, number)

    def split(self, rng: Random, requests: int, weight: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the sites of the baseline's requests, and those of the candidate's."""
        site = rng.choice(len(self.sizes), size=requests, p=self.sizes)
        at_candidate = self.place[site] < weight
        return site[~at_candidate], site[at_candidate]


@dataclass
class Service:
    """Draws requests and counts them in buckets, as the service does."""

    rng: Random
    minute_of: MinuteOf
    seconds: int = 60
    waiting: dict[Arm, list[tuple[float, float, bool]]] = field(
        default_factory=lambda: {arm: [] for arm in ARMS}
    )
    """Hanging requests by arm: when they came, when they will end, and whether the server's time-out ends them."""

    def bucket(self, number: int, weight: int, *, counts_all: bool) -> Bucket:
        minute = self.minute_of(number, weight)
        total = int(self.rng.poisson(minute.requests))
        behaviour = {"baseline": minute.baseline, "candidate": minute.candidate}
        requests: dict[Arm, int] = {}
        if minute.sites is not None:
            drawn = minute.sites.split(self.rng, total, weight)
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

    def _serve(
        self, arm: Arm, n: int, b: Behaviour, number: int, *, counts_all: bool
    ) -> ArmTraffic:
        rng = self.rng
        vanished = int(rng.binomial(n, b.vanish)) if b.vanish else 0
        hung = int(rng.binomial(n - vanished, b.hang)) if b.hang else 0
        cancelled, timed_out = self._hang(arm, hung, b, number)
        left = n - vanished - hung
        disconnected = int(rng.binomial(left, b.cancelled))
        refused = int(rng.binomial(left - disconnected, b.refused))
        left -= disconnected + refused
        errors, callers, left = self._fail(left, b)
        below = np.searchsorted(np.sort(self._times(left, b)), EDGES, side="right")
        return ArmTraffic(
            requests=left + errors + timed_out,
            errors=errors + timed_out,
            empty=int(rng.binomial(left, b.blank)),
            output_tokens=float(rng.poisson(40.0 * b.words * left)),
            histogram=tuple(map(int, below)) if left else None,
            cancelled=disconnected + cancelled if counts_all else None,
            refused=refused if counts_all else None,
            error_callers=callers + timed_out if counts_all else None,
        )

    def _times(self, left: int, b: Behaviour) -> np.ndarray:
        rng = self.rng
        factor = b.time if np.ndim(b.time) == 0 else np.resize(b.time, left)
        times = 400.0 * factor * np.exp(rng.standard_normal(left) * 0.493)
        if b.tail:
            times = np.where(rng.random(left) < b.tail, times * (rng.pareto(1.1, left) + 1), times)
        if b.slow_share:
            times = np.where(rng.random(left) < b.slow_share, times * b.slow_factor, times)
        return times

    def _fail(self, left: int, b: Behaviour) -> tuple[int, int, int]:
        """Return the errors, the number of their callers, and the requests that are left."""
        rng = self.rng
        if b.repeats > 1.0:
            runs = int(rng.poisson(left * b.errors / b.repeats))
            errors = int(rng.geometric(1.0 / b.repeats, runs).sum()) if runs else 0
            return errors, runs, max(0, left - runs)
        if b.clustered:
            size = 1.0 / b.clustered - 1.0
            errors = int(rng.binomial(left, rng.beta(b.errors * size, (1.0 - b.errors) * size)))
            return errors, errors, left - errors
        if np.ndim(b.errors) == 0:
            errors = int(rng.binomial(left, b.errors))
        else:
            errors = int((rng.random(left) < np.resize(b.errors, left)).sum())
        return errors, errors, left - errors

    def _hang(self, arm: Arm, hung: int, b: Behaviour, number: int) -> tuple[int, int]:
        """Return how many hanging requests their callers ended in this bucket, and how many timed out."""
        begin = float(number * self.seconds)
        came = begin + self.rng.random(hung) * self.seconds
        self.waiting[arm] += [(at, at + b.patience_s, b.times_out) for at in came]
        ended = [one for one in self.waiting[arm] if one[1] <= begin + self.seconds]
        self.waiting[arm] = [one for one in self.waiting[arm] if one[1] > begin + self.seconds]
        timed_out = sum(one[2] for one in ended)
        return len(ended) - timed_out, timed_out

    def in_flight(self, arm: Arm, number: int) -> InFlightAges:
        """Return the snapshot of requests in flight at the end of this bucket."""
        now = float((number + 1) * self.seconds)
        ages = sorted((now - at) * 1000.0 for at, _, _ in self.waiting[arm])
        return InFlightAges(EDGES, tuple(map(int, np.searchsorted(ages, EDGES, side="right"))))
