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
from tuneship.gates.metrics.series import ARMS, Arm, ArmTraffic, Bucket, InFlightAges
from tuneship.gates.statistics.cells import NO_CELLS, PER_DOUBLING, Cells

Random = np.random.Generator
# Edges of the histogram, as the service publishes them.
EDGES = (*(float(2**power) for power in range(18)), math.inf)
PER_MINUTE, HOUR_BEFORE = 300.0, 60
TOKENS, LENGTHS_SPREAD, TOKEN_LIMIT = 40.0, 0.6, 512
# The service draws a larger key's requests one by one, and counts at most this share of an arm from a smaller one.
LARGE_KEY, SMALL_KEY_CAP = 0.02, 0.05


@dataclass(frozen=True)
class Behaviour:
    """The way a deployment treats one minute's requests. A share may be an array with one value per request."""

    errors: Any = 0.005
    blank: float = 0.002
    # Factor on log-normal times with p50 400 and p95 900 ms.
    time: Any = 1.0
    # Standard deviation of the logarithm of the times.
    spread: float = 0.493
    least_ms: float = 0.0
    # Share of answers whose time is multiplied by a Pareto(1.1) factor.
    tail: float = 0.0
    slow_share: Any = 0.0
    slow_factor: float = 1.0
    # Share of requests whose callers disconnect out of habit.
    cancelled: Any = 0.005
    refused: Any = 0.003
    hang: float = 0.0
    # Seconds that a caller waits for a request that hangs.
    patience_s: float = 10.0
    # Whether a hanging request ends by the server's time-out, as an error, and not by its caller.
    times_out: bool = False
    words: float = 1.0
    # Share of the answers that are a full stop.
    full_stops: float = 0.0
    # Share of the answers that go on to the token limit, and take as much longer.
    loops: float = 0.0
    # Share of requests that nobody counts.
    vanish: float = 0.0
    # Correlation of the errors of one minute. Each minute draws its own error rate, with `errors` as the mean.
    clustered: float = 0.0
    # Average number of times a caller sends a failing request, each time to the same deployment.
    repeats: float = 1.0


@dataclass(frozen=True)
class Minute:
    """The traffic of one minute, or of one bucket where buckets are shorter."""

    requests: float = PER_MINUTE
    baseline: Behaviour = Behaviour()
    candidate: Behaviour = Behaviour()
    sites: "Sites | None" = None
    # Whether the look of this minute gets an old answer.
    unseen: bool = False
    # Deployments whose counts of this minute are lost.
    lost: tuple[Arm, ...] = ()
    # Running replicas of the baseline and the candidate.
    replicas: tuple[int, int] | None = None


# Function of (minute since the start, candidate's weight). Minutes before the start are negative.
MinuteOf = Callable[[int, int], Minute]


@dataclass
class Sites:
    """Callers with routing keys. Each has one draw that decides at every weight which deployment it belongs to.

    What a caller sends fails, takes time or is refused by its own factor. `alone`: requests beside them that are drawn
    one by one, as a share of all.
    """

    sizes: np.ndarray
    place: np.ndarray
    factors: dict[str, np.ndarray]
    alone: float = 0.0
    # Large keys that the service has seen for a minute.
    known: frozenset[int] = frozenset()

    @classmethod
    def of_health(cls, rng: Random, number: int, alone: float = 0.0) -> "Sites":
        """Callers of different sizes and health."""
        factors = {
            "errors": np.minimum(rng.lognormal(0.0, 0.8, number), 40.0),
            "time": rng.lognormal(0.0, 0.3, number),
        }
        sizes = rng.dirichlet(np.full(number, 2.0))
        sites = cls(sizes, rng.random(number) * 100.0, factors, alone)
        return replace(sites, known=frozenset(np.nonzero(sites.shares > LARGE_KEY)[0].tolist()))

    @property
    def shares(self) -> np.ndarray:
        return self.sizes * (1.0 - self.alone)

    def split(self, rng: Random, requests: int, weight: int) -> dict[Arm, np.ndarray]:
        """Draw the site of each of the baseline's and of the candidate's requests; -1 is nobody's."""
        chances = np.append(self.shares, self.alone)
        site = rng.choice(len(chances), size=requests, p=chances / chances.sum())
        place = np.append(self.place, 0.0)[site]
        one_by_one = np.isin(site, [*self.known, len(self.sizes)])
        place = np.where(one_by_one, rng.random(requests) * 100.0, place)
        site = np.where(site == len(self.sizes), -1, site)
        return {
            "baseline": self._capped(site[place >= weight]),
            "candidate": self._capped(site[place < weight]),
        }

    def _capped(self, site: np.ndarray) -> np.ndarray:
        most = max(1, int(SMALL_KEY_CAP * len(site)))
        kept = np.ones(len(site), dtype=bool)
        for one in np.unique(site):
            if one >= 0 and one not in self.known:
                kept[np.nonzero(site == one)[0][most:]] = False
        return site[kept]

    def apply(self, behaviour: Behaviour, site: np.ndarray) -> Behaviour:
        """Return the behaviour that these callers' requests meet."""
        values = {
            name: getattr(behaviour, name) * np.append(factor, 1.0)[site]
            for name, factor in self.factors.items()
        }
        return replace(behaviour, **values)

    def callers_of_half(self, sites: np.ndarray) -> int:
        counts = np.unique(sites[sites >= 0], return_counts=True)[1].tolist()
        counts = sorted([*counts, *[1] * int((sites < 0).sum())], reverse=True)
        return int(np.searchsorted(np.cumsum(counts), len(sites) / 2)) + 1 if counts else 0


@dataclass
class Service:
    """Draws requests and counts them in buckets, as the service does."""

    rng: Random
    minute_of: MinuteOf
    seconds: int = 60
    # Hanging requests by arm: when they came, when they will end, and whether the server's time-out ends them.
    waiting: dict[Arm, list[tuple[float, float, bool]]] = field(
        default_factory=lambda: {arm: [] for arm in ARMS}
    )

    def bucket(self, number: int, weight: int) -> Bucket:
        minute = self.minute_of(number, weight)
        total = int(self.rng.poisson(minute.requests))
        behaviour = {"baseline": minute.baseline, "candidate": minute.candidate}
        requests: dict[Arm, int] = {}
        sites: dict[Arm, np.ndarray] = {}
        of_half = None
        if minute.sites is not None:
            sites = minute.sites.split(self.rng, total, weight)
            requests = {arm: len(sites[arm]) for arm in ARMS}
            behaviour = {arm: minute.sites.apply(behaviour[arm], sites[arm]) for arm in ARMS}
            of_half = minute.sites.callers_of_half(np.concatenate([sites[arm] for arm in ARMS]))
        else:
            n_c = int(self.rng.binomial(total, weight / 100.0))
            requests = {"baseline": total - n_c, "candidate": n_c}
        end = START + timedelta(seconds=self.seconds * (number + 1))
        traffic: dict[Arm, ArmTraffic] = {}
        for i, arm in enumerate(ARMS):
            served = self._serve(arm, requests[arm], behaviour[arm], number, sites.get(arm))
            replicas = minute.replicas[i] if minute.replicas else None
            served = replace(served, callers_of_half=of_half, replicas=replicas)
            traffic[arm] = ArmTraffic() if arm in minute.lost else served
        return Bucket(end, traffic["baseline"], traffic["candidate"])

    def _serve(
        self, arm: Arm, n: int, b: Behaviour, number: int, sites: np.ndarray | None
    ) -> ArmTraffic:
        rng = self.rng
        left = np.arange(n)

        def take(share: Any) -> np.ndarray:
            """Draw which of the requests that are left end in this way."""
            nonlocal left
            chance = share if np.ndim(share) == 0 else share[left]
            hit = rng.random(len(left)) < chance
            taken, left = left[hit], left[~hit]
            return taken

        if b.vanish:
            take(b.vanish)
        hung = take(b.hang) if b.hang else left[:0]
        cancelled, timed_out = self._hang(arm, len(hung), b, number)
        disconnected, refused = take(b.cancelled), take(b.refused)
        if b.repeats > 1.0:
            runs = min(int(rng.poisson(len(left) * b.errors / b.repeats)), len(left))
            errors = int(rng.geometric(1.0 / b.repeats, runs).sum()) if runs else 0
            left, callers = left[runs:], runs
        else:
            share = b.errors
            if b.clustered:
                size = 1.0 / b.clustered - 1.0
                share = rng.beta(b.errors * size, (1.0 - b.errors) * size)
            failed = take(share)
            errors, callers = len(failed), self._callers(failed, sites)
        tokens, factor = self._answers(len(left), b)
        times = self._times(left, b) * factor
        below = np.searchsorted(np.sort(times), EDGES, side="right")
        blank = int(rng.binomial(len(left), b.blank))
        # A blank answer has no token.
        lengths = tokens[blank:]
        return ArmTraffic(
            requests=len(left) + errors + timed_out,
            errors=errors + timed_out,
            empty=blank,
            output_tokens=float(lengths.sum()),
            histogram=tuple(map(int, below)) if len(left) else None,
            cancelled=len(disconnected) + cancelled,
            refused=len(refused),
            error_callers=callers + timed_out,
            cells=cells_of(times),
            cells_per_token=cells_of(times / tokens),
            token_cells=cells_of(np.append(lengths, np.ones(blank))),
            cancelled_callers=self._callers(disconnected, sites) + cancelled,
            refused_callers=self._callers(refused, sites),
        )

    @staticmethod
    def _callers(requests: np.ndarray, sites: np.ndarray | None) -> int:
        if sites is None:
            return len(requests)
        of = sites[requests]
        return len(np.unique(of[of >= 0])) + int((of < 0).sum())

    def _answers(self, left: int, b: Behaviour) -> tuple[np.ndarray, np.ndarray]:
        """Draw the tokens of each answer, and the factor on its time that comes from them."""
        rng = self.rng
        median = TOKENS * b.words / math.exp(LENGTHS_SPREAD**2 / 2)
        tokens = np.maximum(np.rint(median * rng.lognormal(0.0, LENGTHS_SPREAD, left)), 1.0)
        tokens = np.minimum(tokens, TOKEN_LIMIT)
        factor = np.ones(left)
        for share, length in ((b.full_stops, 1.0), (b.loops, float(TOKEN_LIMIT))):
            if share:
                hit = rng.random(left) < share
                factor = np.where(hit, factor * np.maximum(length / median, 0.2), factor)
                tokens = np.where(hit, length, tokens)
        return tokens, factor

    def _times(self, left: np.ndarray, b: Behaviour) -> np.ndarray:
        rng, n = self.rng, len(left)
        factor = b.time if np.ndim(b.time) == 0 else b.time[left]
        times = 400.0 * factor * np.exp(rng.standard_normal(n) * b.spread)
        if b.tail:
            times = np.where(rng.random(n) < b.tail, times * (rng.pareto(1.1, n) + 1), times)
        if np.ndim(b.slow_share) or b.slow_share:
            share = b.slow_share if np.ndim(b.slow_share) == 0 else b.slow_share[left]
            times = np.where(rng.random(n) < share, times * b.slow_factor, times)
        return np.maximum(times, b.least_ms) if b.least_ms else times

    def _hang(self, arm: Arm, hung: int, b: Behaviour, number: int) -> tuple[int, int]:
        """Return how many hanging requests their callers ended in this bucket, and how many timed out."""
        if not hung and not self.waiting[arm]:
            return 0, 0
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


def cells_of(values: np.ndarray) -> Cells:
    """Count values by cell, as the service does."""
    places = np.ceil(PER_DOUBLING * np.log2(np.maximum(values, 1e-6)) - 1e-9).astype(int)
    if not len(places):
        return NO_CELLS
    least = int(places.min())
    counts = np.bincount(places - least)
    (used,) = np.nonzero(counts)
    return Cells(tuple((used + least).tolist()), tuple(counts[used].tolist()))
