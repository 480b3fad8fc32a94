"""Evidence about "x of n requests", bucket by bucket, that stays valid at any number of looks.

One e-process against the candidate (harm), one for it (pass), and an early warning that only holds. Pure arithmetic
with `math.log`; it knows no metrics, no steps and no verdict. All values are natural logarithms: e-values overflow.

Why a limit holds for every number of looks: each harm factor has mean <= 1 for every candidate within the margin.
Absolute: because p_k > d. Relative: E[A^x_c B^x_b] <= exp(p_b (r n_c + n_b)(th0 (A-1) + (1-th0)(B-1))) = 1 on the
margin, whatever the shared rate p_b does. So the product E is a supermartingale and P(ever >= 1/a) <= a (Ville 1939;
arXiv 1810.08240, 2011.03567).

What decides is E~, E with a cap on bursts: E~_t = min(E_t, E~_(t-1) * min(max(E_t / E_(t-1), 1), 4)), E~_0 = E_0 = 1.
It is E_t or less by its first argument, on every path: {ever E~ >= 1/a} lies within {ever E >= 1/a}, so the limit above
holds for it too, and likewise for weighted sums of terms and for the smaller of two halves. The cap is for requests
that depend on each other, of which the limit knows nothing. A rise counts by at most 4. A fall first uses up what the
cap cut off, and lowers E~ only where E comes down to it: so errors that come and go add up, and what quiet buckets
refute is refuted. Formula version 1 charged every fall at once.
Next: `tallies.py` makes the counts, `canary.py` decides.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import add, mul
from typing import Literal, NamedTuple

# Multiples of the margin that the harm test bets on, log-spaced, equal weights.
GRID = tuple(1.3 * (12.0 / 1.3) ** (k / 11) for k in range(12))
# Shares of the margin that the pass test bets on: the further inside a candidate is, the sooner the
# small ones prove it.
PASS_GRID = tuple(k / 10 for k in range(1, 10))
LOG_GRID = tuple(map(math.log, GRID))
LOG_PASS_GRID = tuple(map(math.log, PASS_GRID))
# One bucket multiplies a half by at most 4: requests of one burst depend on each other.
LOG_BURST_CAP = math.log(4.0)
# So much uncapped evidence is no burst of dependent requests, and each further bucket harms callers.
LOG_UNCAPPED_TIER = math.log(1e6)
# Weaker than what a rollback needs: what passes wrongly is still watched during the bake.
LOG_PROVEN = math.log(10.0)
LOG_WARN, LOG_RELEASE = math.log(5.0), math.log(2.0)
# The looks after a warm-up repeat the proof of all looks, so they need only point the same way.
LOG_HEARD = math.log(2.0)
# One-sided 5 % at a single look. It is peeked at, so it may hold and never roll back; with one or
# two bad requests the normal approximation says nothing.
Z_WARN, Z_MIN_BAD = 1.645, 3
# A fault that is there from the start shows at the first step, where it harms fewest callers, so that
# step gets most of the weight; the other steps share the rest for what only shows under more load.
FIRST_STEP_SHARE = 0.58
# A new term at every look would find a late regression no sooner and divide the weight further.
LOOKS_PER_TERM, TERMS_KEPT = 5, 12

Logs = Sequence[float]

# Each look weighs all buckets again. What was worked out for the earlier ones is remembered; no
# number changes.
_FACTORS_KEPT, _WALKS_KEPT, _SERIES_KEPT = 8192, 512, 256


class BucketCounts(NamedTuple):
    """One bucket: requests and bad ones of the candidate (n_c, x_c) and the baseline (n_b, x_b)."""

    n_c: int
    x_c: int
    n_b: int = 0
    x_b: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The margin of a gate: harm null `p_c <= max(ratio * p_b, harm)`, pass null `p_c >= max(ratio * p_b, ok)`."""

    ratio: float
    harm: float
    ok: float


@dataclass(frozen=True, slots=True)
class Term:
    """One start point of the harm mixture: the index of its first bucket and its weight."""

    start: int
    weight: float


@dataclass(frozen=True, slots=True)
class Harm:
    """Natural logs of E_harm (burst-capped, decides and warns) and U_harm (uncapped) after the last bucket."""

    log_e: float
    log_u: float
    warned: bool


def step_terms(starts: Sequence[int], steps: int) -> tuple[list[Term], float]:
    """Terms of the compared steps that began at these bucket indexes, and the weight of those still to begin."""
    weights = [1.0]
    if steps > 1:
        weights = [FIRST_STEP_SHARE] + [(1.0 - FIRST_STEP_SHARE) / (steps - 1)] * (steps - 1)
    return list(map(Term, starts, weights)), math.fsum(weights[len(starts) :])


def wait_terms(starts: Sequence[int]) -> tuple[list[Term], float]:
    """Terms of a wait of unknown length: v_j = 6 / (pi^2 j^2), newest 12 kept (dropping one only lowers E)."""
    # Nobody knows how many terms there will be, so the weights are those of a series that sums to 1.
    weights = [6.0 / (math.pi * j) ** 2 for j in range(1, len(starts) + 1)]
    return list(map(Term, starts, weights))[-TERMS_KEPT:], max(0.0, 1.0 - math.fsum(weights))


def harm(
    buckets: Sequence[BucketCounts],
    limits: Limits,
    terms: Sequence[Term],
    idle: float,
    *,
    absolute_only: bool = False,
    charge_falls: bool = False,
) -> Harm:
    """Evidence that the candidate is beyond the margin. `idle`: weight of terms that have not begun, counted once each.

    `absolute_only` is for the bake, where no baseline takes traffic: `limits.harm` is then the whole margin.
    `charge_falls`: as in formula version 1, every fall lowers the capped evidence at once.
    """
    how = _How(limits, tuple(terms), idle, absolute_only, charge_falls)
    walk = _walk(tuple(buckets), how)
    # A term that has not begun has evidence 1: its weight keeps the mixture's mean at 1 from the start.
    rest = [math.log(idle)] if idle > 0.0 else []
    log_none = log_sum_exp([*map(math.log, (term.weight for term in terms)), *rest])
    # The margin is the larger of the two, so harm is shown only where both halves show it.
    uncapped = [math.log(t.term.weight) + min(h.log_e for h in t.halves) for t in walk.terms]
    log_e = log_none if walk.log_e is None else walk.log_e
    return Harm(log_e, log_sum_exp([*uncapped, *rest]), walk.warned)


@dataclass(frozen=True, slots=True)
class _Half:
    """One half of one term after some buckets: 12 sums, their mixture, and the same with bursts capped."""

    sums: Logs = (0.0,) * len(GRID)
    log_e: float = 0.0
    capped: float = 0.0

    def after(self, factor: Logs | None, *, charge_falls: bool) -> "_Half":
        """Add one bucket; None stands for a bucket without information."""
        if factor is None:
            return self
        sums = list(map(add, self.sums, factor))
        # The mean over the grid of the products, not the product of means: one bet is held throughout.
        value = log_sum_exp(sums) - _LOG_GRID_SIZE
        change = min(value - self.log_e, LOG_BURST_CAP)
        if charge_falls:
            return _Half(sums, value, self.capped + change)
        return _Half(sums, value, min(value, self.capped + max(change, 0.0)))


@dataclass(frozen=True, slots=True)
class _TermWalk:
    term: Term
    # The absolute half, and the relative half where a baseline takes traffic.
    halves: tuple[_Half, ...]


@dataclass(frozen=True, slots=True)
class _Walk:
    """The harm mixture after `seen` buckets."""

    seen: int
    terms: tuple[_TermWalk, ...]
    # The mixture so far; None before the first bucket of the first term.
    log_e: float | None = None
    warned: bool = False


class _How(NamedTuple):
    """The arguments of `harm`, by which one mixture weighs its buckets."""

    limits: Limits
    terms: tuple[Term, ...]
    idle: float
    absolute_only: bool
    charge_falls: bool


_walks: dict[tuple[tuple[BucketCounts, ...], _How], _Walk] = {}


def _walk(buckets: tuple[BucketCounts, ...], how: _How) -> _Walk:
    """The mixture over all buckets, continued from the previous look's where that is still cached."""
    halves = (_Half(),) if how.absolute_only else (_Half(), _Half())
    start = _Walk(0, tuple(_TermWalk(term, halves) for term in how.terms))
    # A look mostly adds one bucket to those of the look before; anything else starts from the front.
    walk = _walks.get((buckets, how)) or _walks.get((buckets[:-1], how)) or start
    for bucket in buckets[walk.seen :]:
        walk = _step(walk, bucket, how)
    # Forgetting all costs one slow look; keeping an order of use would cost something at every look.
    if len(_walks) >= _WALKS_KEPT:
        _walks.clear()
    _walks[buckets, how] = walk
    return walk


def _step(walk: _Walk, bucket: BucketCounts, how: _How) -> _Walk:
    first = min((one.term.start for one in walk.terms), default=walk.seen + 1)
    if walk.seen < first:
        return _Walk(walk.seen + 1, walk.terms)
    limits = how.limits
    factors = (
        _absolute_factor(bucket, limits.harm),
        _relative_factor(bucket, limits.ratio, "harm"),
    )

    def after(one: _TermWalk) -> _TermWalk:
        if walk.seen < one.term.start:
            return one
        pairs = zip(one.halves, factors, strict=False)
        halves = (half.after(factor, charge_falls=how.charge_falls) for half, factor in pairs)
        return _TermWalk(one.term, tuple(halves))

    terms = tuple(map(after, walk.terms))
    values = [math.log(t.term.weight) + min(half.capped for half in t.halves) for t in terms]
    rest = [math.log(how.idle)] if how.idle > 0.0 else []
    log_e = log_sum_exp([*values, *rest])
    # The warning switches on at 5 and off only below 2, so that it does not flicker.
    warned = log_e >= (LOG_RELEASE if walk.warned else LOG_WARN)
    return _Walk(walk.seen + 1, terms, log_e, warned)


@lru_cache(_FACTORS_KEPT)
def _absolute_factor(b: BucketCounts, d: float) -> Logs | None:
    """The 12 log factors `x log(p_k/d) + (n-x) log((1-p_k)/(1-d))`; None for a bucket without information."""
    if not b.n_c:
        return None
    bad, good = _absolute_logs(d)
    return [b.x_c * up + (b.n_c - b.x_c) * down for up, down in zip(bad, good, strict=True)]


@lru_cache
def _absolute_logs(d: float) -> tuple[Logs, Logs]:
    # At a rate of 1 a single good request would refute everything, for ever.
    rates = [max(min(d * rho, 0.9), d) for rho in GRID]
    return [math.log(p / d) for p in rates], [math.log((1.0 - p) / (1.0 - d)) for p in rates]


@lru_cache(2 * _FACTORS_KEPT)
def _relative_factor(b: BucketCounts, ratio: float, side: Literal["harm", "pass"]) -> Logs | None:
    """The log factors `x_c log(th_k/th0) + x_b log((1-th_k)/(1-th0))`; None for a bucket without information.

    Written with one logarithm per grid point: with L_k = log((r n_c + n_b) / (r rho_k n_c + n_b)),
    log(th_k/th0) = log rho_k + L_k and the other is L_k.
    """
    # Given how many are bad in all, the candidate's part does not depend on the shared rate: what hits
    # both moves nothing. Without a bad request, or without one arm, there is nothing to divide.
    if not (b.n_c and b.n_b and (b.x_c or b.x_b)):
        return None
    grid, log_grid = (GRID, LOG_GRID) if side == "harm" else (PASS_GRID, LOG_PASS_GRID)
    weighted = ratio * b.n_c
    total, bad = weighted + b.n_b, b.x_c + b.x_b
    shrink = [math.log(total / (weighted * rho + b.n_b)) for rho in grid]
    return [b.x_c * up + bad * down for up, down in zip(log_grid, shrink, strict=True)]


def log_e_ok(buckets: Sequence[BucketCounts], limits: Limits) -> float:
    """Evidence that the candidate is inside the pass margin *now*; proven from log 10 on."""
    return log_sum_exp(_pass_logs(tuple(buckets), limits)) - _LOG_PASS_SIZE


@lru_cache(_SERIES_KEPT)
def _pass_logs(buckets: tuple[BucketCounts, ...], limits: Limits) -> list[float]:
    """Logarithms of the 18 exponentials: 9 absolute, 9 relative."""
    n, x = sum(b.n_c for b in buckets), sum(b.x_c for b in buckets)
    d = limits.ok
    absolute = [
        x * log_k + (n - x) * math.log((1.0 - k * d) / (1.0 - d))
        for k, log_k in zip(PASS_GRID, LOG_PASS_GRID, strict=True)
    ]
    # Most buckets of most gates hold nothing bad, and every look weighs all again: skip them here.
    rows = [
        factor
        for b in buckets
        if (b.x_c or b.x_b) and (factor := _relative_factor(b, limits.ratio, "pass")) is not None
    ]
    relative = list(map(math.fsum, zip(*rows, strict=True))) if rows else [0.0] * len(PASS_GRID)
    # The null says that both bounds are exceeded. Evidence against either refutes it, and so does the
    # mean of both, whereas harm needs the smaller of the two.
    return absolute + relative


def requests_to_proof(buckets: Sequence[BucketCounts], limits: Limits) -> int | None:
    """Candidate requests needed until `log_e_ok` reaches log 10 if all goes on as before; None if it never does.

    Every exponent is linear in the requests, so "as so far" multiplies all of them by one factor.
    """
    n = sum(b.n_c for b in buckets)
    logs = _pass_logs(tuple(buckets) if n else (BucketCounts(1, 0),), limits)
    # No exponent grows with more requests; the rounding of a rate on the margin is no growth.
    if max(logs) <= 1e-12:
        return None
    # The largest exponent alone reaches the proof here, so the sum of all does no later.
    enough = math.ceil((LOG_PROVEN + _LOG_PASS_SIZE) / max(logs) * max(n, 1))

    def log_e_at(requests: int) -> float:
        scaled = list(map(mul, logs, repeat(requests / max(n, 1))))
        return log_sum_exp(scaled) - _LOG_PASS_SIZE

    return max(0, bisect_left(range(enough), LOG_PROVEN, key=log_e_at) - n)


def early_z(buckets: Sequence[BucketCounts], limits: Limits) -> float | None:
    """Stratified z against the harm margin, the smaller of relative and absolute; None while one has no variance."""
    return _early_z(tuple(buckets), limits)


@lru_cache(_SERIES_KEPT)
def _early_z(buckets: tuple[BucketCounts, ...], limits: Limits) -> float | None:
    score = variance = 0.0
    # Stratified by bucket: pooled over steps of different weight, a shared incident would look like
    # a bad candidate.
    for b in buckets:
        if not (b.n_c and b.n_b):
            continue
        th0 = limits.ratio * b.n_c / (limits.ratio * b.n_c + b.n_b)
        bad = b.x_c + b.x_b
        score += b.x_c - th0 * bad
        variance += bad * th0 * (1.0 - th0)
    n, x = sum(b.n_c for b in buckets), sum(b.x_c for b in buckets)
    d = limits.harm
    if variance <= 0.0 or not n:
        return None
    return min(score / math.sqrt(variance), (x - d * n) / math.sqrt(n * d * (1.0 - d)))


def early_warning(buckets: Sequence[BucketCounts], limits: Limits) -> bool:
    """Whether z speaks against the candidate: that holds the exposure, but is no proof and never rolls back."""
    z = early_z(buckets, limits)
    return z is not None and z > Z_WARN and sum(b.x_c for b in buckets) >= Z_MIN_BAD


def log_sum_exp(logs: Logs) -> float:
    """log(sum(exp(v))). `fsum` rounds once, so the result depends neither on the order nor on the Python version."""
    try:
        total = math.fsum(map(math.exp, logs))
    except OverflowError:
        total = math.inf
    if 1e-250 < total < 1e250:  # what underflowed is below one part in 10^50
        return math.log(total)
    top = max(logs)
    return top + math.log(math.fsum([math.exp(value - top) for value in logs]))


_LOG_GRID_SIZE = math.log(len(GRID))
_LOG_PASS_SIZE = math.log(2 * len(PASS_GRID))
