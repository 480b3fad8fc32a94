"""Evidence about "x of n requests", bucket by bucket, that stays valid at any number of looks.

One e-process against the candidate (harm), one for it (pass), and an early warning that only holds. Pure arithmetic
with `math.log`; it knows no metrics, no steps and no verdict. All values are natural logarithms: e-values overflow.

Why a limit holds for every number of looks: each harm factor has mean <= 1 for every candidate within the margin.
Absolute: because p_k > d. Relative: E[A^x_c B^x_b] <= exp(p_b (r n_c + n_b)(th0 (A-1) + (1-th0)(B-1))) = 1 on the
margin, whatever the shared rate p_b does. So the product E is a supermartingale and P(ever >= 1/a) <= a (Ville 1939;
arXiv 1810.08240, 2011.03567). The relative factor asks only for p_c(one limit) <= r p_b(another limit), so a limit that
both deployments are measured by may differ from bucket to bucket, as long as it is known before the bucket begins.

What decides is E~, E with a cap on bursts: E~_t = min(E_t, E~_(t-1) * min(max(E_t / E_(t-1), 1), c)), E~_0 = E_0 = 1.
It is E_t or less by its first argument, on every path: {ever E~ >= 1/a} lies within {ever E >= 1/a}, so the limit above
holds for it too, and likewise for weighted sums of terms and for the smallest of several alternatives. The cap c is for
requests that depend on each other, of which the limit knows nothing. A fall first uses up what the cap cut off, and
lowers E~ only where E comes down to it: so errors that come and go add up, and what quiet buckets refute is refuted.
There are two caps: c = 4 for 1/alpha, and c = 10^3.5 for 10^6, so that one bucket alone never decides.
Next: `tallies.py` makes the counts, `canary.py` decides.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import add, mul
from typing import Literal, NamedTuple

from tuneship.gates.statistics.fold import fold

# Multiples of the margin that the harm test bets on, log-spaced, equal weights.
GRID = tuple(1.3 * (12.0 / 1.3) ** (k / 11) for k in range(12))
# Shares of the margin that the pass test bets on: the further inside a candidate is, the sooner the
# small ones prove it.
PASS_GRID = tuple(k / 10 for k in range(1, 10))
LOG_GRID = tuple(map(math.log, GRID))
LOG_PASS_GRID = tuple(map(math.log, PASS_GRID))
# One bucket multiplies a half by at most 4: requests of one burst depend on each other.
LOG_BURST_CAP = math.log(4.0)
# So much evidence within a few buckets is no burst of dependent requests, and each further bucket harms
# callers. It takes two buckets at least.
LOG_FAST_CAP, LOG_FAST_TIER = math.log(10**3.5), math.log(1e6)
# Weaker than what a rollback needs: what passes wrongly is still watched during the bake.
LOG_PROVEN = math.log(10.0)
LOG_WARN = math.log(5.0)
# The weights of the four kinds of proof, and the newest buckets that the third one is made of.
PROOF_ALL, PROOF_OTHERS, PROOF_BUCKETS = 0.4, 0.2, 20
# Buckets of the early warning, and of the question whether slowness still goes on.
WARNING_BUCKETS, NOW_BUCKETS = 15, 5
# One-sided 5 % at a single look. It is peeked at, so it may hold and never roll back; with one or
# two bad requests the normal approximation says nothing.
Z_WARN, Z_MIN_BAD = 1.645, 3
# A fault that is there from the start shows at the first step, where it harms fewest callers, so that
# step gets most of the weight; the other steps share the rest for what only shows under more load.
FIRST_STEP_SHARE = 0.58
# A new term at every look would find a late regression no sooner and divide the weight further.
LOOKS_PER_TERM, TERMS_KEPT = 5, 12

Logs = Sequence[float]

_FACTORS_KEPT = 8192


class BucketCounts(NamedTuple):
    """One bucket: requests and bad ones of the candidate (n_c, x_c) and the baseline (n_b, x_b).

    `w_c`, `v_c`: the candidate's beyond a farther limit, where a gate compares these with x_b for harm and for proof.
    """

    n_c: int
    x_c: int
    n_b: int = 0
    x_b: int = 0
    w_c: int = 0
    v_c: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The margins of a gate. Harm must exceed every given margin, proof only one.

    `harm`: p_c <= harm (proof: p_c >= ok). `ratio`: p_c <= ratio p_b (>=). `farther`: the candidate's share beyond a
    limit that is so many cells farther is at most (for proof: at least) the baseline's beyond the nearer one.
    """

    ratio: float | None
    harm: float | None
    ok: float | None
    farther: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of the harm mixture: the first bucket of each start, its weight, and the weight left for later
    starts.
    """

    starts: tuple[int, ...]
    weights: tuple[float, ...]
    idle: float
    # Only so many of the newest are weighed; leaving one out only lowers E.
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class Harm:
    """Natural logs of E after the last bucket: capped at 4 a bucket, at 10^3.5 (the fast tier), and without a cap."""

    log_e: float
    log_fast: float
    log_uncapped: float


@dataclass(frozen=True, slots=True)
class Proof:
    """How strongly all says that the candidate is inside the pass margin, and the sums of all counts."""

    log_e: float
    counts: BucketCounts
    # The exponents of the first of its parts.
    logs: Logs


def step_terms(starts: Sequence[int], steps: int) -> Terms:
    """Terms of the compared steps that began at these bucket indexes."""
    weights = [1.0]
    if steps > 1:
        weights = [FIRST_STEP_SHARE] + [(1.0 - FIRST_STEP_SHARE) / (steps - 1)] * (steps - 1)
    begun = min(len(starts), len(weights))
    return Terms(tuple(starts[:begun]), tuple(weights[:begun]), math.fsum(weights[begun:]))


def wait_terms(starts: Sequence[int]) -> Terms:
    """Terms of a wait of unknown length: v_j = 6 / (pi^2 j^2), newest 12 kept."""
    weights, idle = _wait_weights(len(starts))
    return Terms(tuple(starts), weights, idle, TERMS_KEPT)


@lru_cache
def _wait_weights(number: int) -> tuple[tuple[float, ...], float]:
    # Nobody knows how many terms there will be, so the weights are those of a series that sums to 1.
    weights = tuple(6.0 / (math.pi * j) ** 2 for j in range(1, number + 1))
    return weights, max(0.0, 1.0 - math.fsum(weights))


@dataclass(frozen=True, slots=True)
class _Half:
    """One alternative of one term after some buckets: 12 sums, their mixture, and the mixture with capped bursts."""

    sums: Logs = (0.0,) * len(GRID)
    log_e: float = 0.0
    capped: float = 0.0
    fast: float = 0.0

    def after(self, factor: Logs | None) -> "_Half":
        """Add one bucket; None is a bucket without information."""
        if factor is None:
            return self
        sums = list(map(add, self.sums, factor))
        # The mean over the grid of the products, not the product of means: one bet is held throughout.
        value = log_sum_exp(sums) - _LOG_GRID_SIZE
        rise = max(value - self.log_e, 0.0)
        capped = min(value, self.capped + min(rise, LOG_BURST_CAP))
        return _Half(sums, value, capped, min(value, self.fast + min(rise, LOG_FAST_CAP)))


_Halves = tuple[_Half, ...]


def harm(
    buckets: Sequence[BucketCounts],
    limits: Limits,
    terms: Terms,
    *,
    absolute_only: bool = False,
    key: Hashable = None,
) -> Harm:
    """Evidence that the candidate is beyond the margin.

    `absolute_only` is for the bake where no baseline takes traffic: `limits.harm` is then the whole margin.
    `key`: names whose counts these are, so that the next look goes on from here.
    """

    def step(walk: tuple[_Halves, ...], bucket: BucketCounts | None) -> tuple[_Halves, ...]:
        return _harm_step(walk, bucket, limits, absolute_only, terms.kept)

    name = ("harm", key, limits, absolute_only, terms.kept)
    walk = fold(name, _with_starts(buckets, terms.starts), (), step)
    weights = list(map(math.log, terms.weights[-(terms.kept or len(terms.starts)) :]))
    # A term that has not begun has evidence 1: its weight keeps the mixture's mean at 1 from the start.
    rest = [math.log(terms.idle)] if terms.idle > 0.0 else []
    # The margin is the largest of the alternatives, so harm is shown only where all of them show it.
    pairs = list(zip(weights, walk, strict=True))
    return Harm(
        log_sum_exp([w + min(h.capped for h in halves) for w, halves in pairs] + rest),
        log_sum_exp([w + min(h.fast for h in halves) for w, halves in pairs] + rest),
        log_sum_exp([w + min(h.log_e for h in halves) for w, halves in pairs] + rest),
    )


def _with_starts(
    buckets: Sequence[BucketCounts], starts: Sequence[int]
) -> list[BucketCounts | None]:
    """Put None where a term begins."""
    found: list[BucketCounts | None] = []
    last = 0
    for start in starts:
        at = min(start, len(buckets))
        found += [*buckets[last:at], None]
        last = at
    return [*found, *buckets[last:]]


def _harm_step(
    walk: tuple[_Halves, ...],
    bucket: BucketCounts | None,
    limits: Limits,
    absolute_only: bool,
    kept: int | None,
) -> tuple[_Halves, ...]:
    if bucket is None:
        number = 1 if absolute_only else _alternatives(limits)
        new = (*walk, (_Half(),) * number)
        return new[-kept:] if kept else new
    if not walk:
        return walk
    factors: list[Logs | None] = []
    n_c, x_c, n_b, x_b, w_c, _ = bucket
    if limits.harm is not None:
        factors.append(_absolute_factor(n_c, x_c, limits.harm))
    if not absolute_only:
        if limits.ratio is not None:
            factors.append(_relative_factor(n_c, x_c, n_b, x_b, limits.ratio, "harm"))
        if limits.farther:
            factors.append(_relative_factor(n_c, w_c, n_b, x_b, 1.0, "harm"))
    return tuple(
        tuple(half.after(factor) for half, factor in zip(halves, factors, strict=True))
        for halves in walk
    )


def _alternatives(limits: Limits) -> int:
    return (limits.harm is not None) + (limits.ratio is not None) + (limits.farther is not None)


@lru_cache(_FACTORS_KEPT)
def _absolute_factor(n: int, x: int, d: float) -> Logs | None:
    """The 12 log factors `x log(p_k/d) + (n-x) log((1-p_k)/(1-d))`; None for a bucket without information."""
    if not n:
        return None
    bad, good = _absolute_logs(d)
    return [x * up + (n - x) * down for up, down in zip(bad, good, strict=True)]


@lru_cache
def _absolute_logs(d: float) -> tuple[Logs, Logs]:
    # At a rate of 1 a single good request would refute everything, for ever.
    rates = [max(min(d * rho, 0.9), d) for rho in GRID]
    return [math.log(p / d) for p in rates], [math.log((1.0 - p) / (1.0 - d)) for p in rates]


@lru_cache(4 * _FACTORS_KEPT)
def _relative_factor(
    n_c: int, x_c: int, n_b: int, x_b: int, ratio: float, side: Literal["harm", "pass"]
) -> Logs | None:
    """The log factors `x_c log(th_k/th0) + x_b log((1-th_k)/(1-th0))`; None for a bucket without information.

    Written with one logarithm per grid point: with L_k = log((r n_c + n_b) / (r rho_k n_c + n_b)),
    log(th_k/th0) = log rho_k + L_k and the other is L_k.
    """
    # Given how many are bad in all, the candidate's part does not depend on the shared rate: what hits
    # both moves nothing. Without a bad request, or without one arm, there is nothing to divide.
    if not (n_c and n_b and (x_c or x_b)):
        return None
    grid, log_grid = (GRID, LOG_GRID) if side == "harm" else (PASS_GRID, LOG_PASS_GRID)
    weighted = ratio * n_c
    total, bad = weighted + n_b, x_c + x_b
    shrink = [math.log(total / (weighted * rho + n_b)) for rho in grid]
    return [x_c * up + bad * down for up, down in zip(log_grid, shrink, strict=True)]


def proof(
    buckets: Sequence[BucketCounts],
    limits: Limits,
    *,
    also: Sequence[BucketCounts] | None = None,
    key: Hashable = None,
) -> Proof:
    """Evidence that the candidate is inside the pass margin *now*; proven from log 10 on.

    The null says that all bounds are exceeded, so evidence against any of them refutes it, and so does their mean; harm
    needs the smallest. Four such means are weighed: over all buckets; over all with a factor per bucket, so that an
    incident may be refuted by one bound and quiet minutes by another; over the newest buckets; and over `also`, where
    other buckets count as well.
    """
    size = math.log(_alternatives(limits) * len(PASS_GRID))
    logs, by_bucket, counts, factors = _proof_of(buckets, limits, (key, "compared"))
    newest = list(map(math.fsum, zip(*factors, strict=True)))
    wider = logs if also is None else _proof_of(also, limits, (key, "also"))[0]
    now = log_sum_exp(newest) - size if newest else 0.0
    parts = [
        log_sum_exp(logs) - size + math.log(PROOF_ALL),
        by_bucket + math.log(PROOF_OTHERS),
        now + math.log(PROOF_OTHERS),
        log_sum_exp(wider) - size + math.log(PROOF_OTHERS),
    ]
    # What was proven long ago does not stand against newest buckets that say the opposite as strongly.
    # A smaller value only makes a wrong proof rarer.
    log_e = min(log_sum_exp(parts), now + 2.0 * LOG_PROVEN)
    return Proof(log_e, BucketCounts(*counts), logs)


# Beside the sums, the factors of the newest buckets.
_Sums = tuple[Logs, float, tuple[int, ...], tuple[Logs, ...]]


def _proof_of(buckets: Sequence[BucketCounts], limits: Limits, key: Hashable) -> _Sums:
    none = (0.0,) * (_alternatives(limits) * len(PASS_GRID))
    size = math.log(len(none))

    def step(sums: _Sums, bucket: BucketCounts) -> _Sums:
        logs, by_bucket, counts, newest = sums
        factor = _pass_logs(bucket, limits)
        return (
            tuple(map(add, logs, factor)),
            by_bucket + log_sum_exp(factor) - size,
            tuple(map(add, counts, bucket)),
            (*newest[1 - PROOF_BUCKETS :], factor),
        )

    return fold(("proof", key, limits), buckets, (none, 0.0, (0,) * 6, ()), step)


@lru_cache(_FACTORS_KEPT)
def _pass_logs(bucket: BucketCounts, limits: Limits) -> Logs:
    """Logarithms of the factors of one bucket, nine for each alternative."""
    n_c, x_c, n_b, x_b, _, v_c = bucket
    none = (0.0,) * len(PASS_GRID)
    logs: list[float] = []
    d = limits.ok
    if limits.harm is not None and d is not None:
        logs += [
            x_c * log_k + (n_c - x_c) * math.log((1.0 - k * d) / (1.0 - d))
            for k, log_k in zip(PASS_GRID, LOG_PASS_GRID, strict=True)
        ]
    if limits.ratio is not None:
        logs += _relative_factor(n_c, x_c, n_b, x_b, limits.ratio, "pass") or none
    if limits.farther:
        logs += _relative_factor(n_c, v_c, n_b, x_b, 1.0, "pass") or none
    return logs


def requests_to_proof(proof: Proof, limits: Limits) -> int | None:
    """Candidate requests needed until the proof if all goes on as before; None if it never comes.

    Every exponent is linear in the requests, so "as so far" multiplies all of them by one factor.
    """
    n, size = proof.counts.n_c, math.log(len(proof.logs))
    logs = proof.logs if n else _pass_logs(BucketCounts(1, 0), limits)
    # No exponent grows with more requests; the rounding of a rate on the margin is no growth.
    if max(logs) <= 1e-12:
        return None
    # The first part of the proof counts by its weight, as if the others said nothing.
    wanted = LOG_PROVEN - math.log(PROOF_ALL + PROOF_OTHERS) + size
    # The largest exponent alone reaches the proof here, so the sum of all does no later.
    enough = math.ceil(wanted / max(logs) * max(n, 1))

    def log_e_at(requests: int) -> float:
        return log_sum_exp(list(map(mul, logs, repeat(requests / max(n, 1)))))

    return max(0, bisect_left(range(enough), wanted, key=log_e_at) - n)


def early_z(buckets: Sequence[BucketCounts], limits: Limits) -> float | None:
    """Stratified z against the harm margin, the smallest of its parts; None while one has no variance."""
    parts: list[float | None] = []
    # With the absolute half alone, there is no baseline.
    if limits.ratio is not None:
        parts.append(_relative_z([(b.n_c, b.x_c, b.n_b, b.x_b) for b in buckets], limits.ratio))
    if limits.farther:
        parts.append(_relative_z([(b.n_c, b.w_c, b.n_b, b.x_b) for b in buckets], 1.0))
    if limits.harm is not None:
        n, x, d = sum(b.n_c for b in buckets), sum(b.x_c for b in buckets), limits.harm
        parts.append((x - d * n) / math.sqrt(n * d * (1.0 - d)) if n else None)
    known = [z for z in parts if z is not None]
    return min(known) if len(known) == len(parts) else None


def _relative_z(rows: Sequence[tuple[int, int, int, int]], ratio: float) -> float | None:
    score = variance = 0.0
    # Stratified by bucket: pooled over steps of different weight, a shared incident would look like
    # a bad candidate.
    for n_c, x_c, n_b, x_b in rows:
        if n_c and n_b:
            th0 = ratio * n_c / (ratio * n_c + n_b)
            score += x_c - th0 * (x_c + x_b)
            variance += (x_c + x_b) * th0 * (1.0 - th0)
    return score / math.sqrt(variance) if variance > 0.0 else None


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
