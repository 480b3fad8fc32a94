"""Tails and quantiles of the distributions that small counts are compared with, by `math` alone. Pure."""

import math
from functools import lru_cache

# Two-sided 95 % and one-sided 5 % of the normal distribution.
Z_TWO_SIDED_95, Z_ONE_SIDED_5 = 1.959963984540054, 1.645
# The fraction converges in some square root of the degrees of freedom; 10^8 of them need fewer terms.
_MOST_TERMS = 100_000
_TINY = 1e-300
_PRECISION = 1e-16


def fair_coin_tail(heads: int, tosses: int) -> float:
    """Probability that a fair coin shows at least this many heads."""
    if heads <= 0 or heads > tosses:
        return float(heads <= 0)
    if 2 * heads <= tosses:
        # Terms are summed where they fall from the first on, which is beyond the middle.
        return 1.0 - fair_coin_tail(tosses - heads + 1, tosses)
    log_first = math.lgamma(tosses + 1) - math.lgamma(heads + 1) - math.lgamma(tosses - heads + 1)
    total = term = 1.0
    for k in range(heads, tosses):
        term *= (tosses - k) / (k + 1)
        total += term
        if term < total * _PRECISION:
            break
    return math.exp(log_first - tosses * math.log(2.0) + math.log(total))


def student_tail(t: float, freedom: int) -> float:
    """Probability that Student's t with these degrees of freedom is at least `t`."""
    if t < 0.0:
        return 1.0 - student_tail(-t, freedom)
    if math.isinf(t):
        return 0.0
    square = t * t
    return 0.5 * _incomplete_beta(
        freedom / (freedom + square), square / (freedom + square), freedom / 2.0, 0.5
    )


@lru_cache
def student_quantile(tail: float, freedom: int) -> float:
    """Student's t that is exceeded with the probability `tail`, which is below one half."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        low, high = high, 2.0 * high
    while high - low > 1e-13 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if student_tail(middle, freedom) > tail else (low, middle)
    return 0.5 * (low + high)


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularised incomplete beta function of x; `rest` is 1 - x, given because x may be almost 1."""
    if x <= 0.0 or rest <= 0.0:
        return float(rest <= 0.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _incomplete_beta(rest, x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log(rest)) / a
    return front * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1.0 / _away_from_0(1.0 - (a + b) * x / (a + 1.0))
    found = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for part in (even, odd):
            d = 1.0 / _away_from_0(1.0 + part * d)
            c = _away_from_0(1.0 + part / c)
            change = c * d
            found *= change
        if abs(change - 1.0) < 1e-15:
            break
    return found


def _away_from_0(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
