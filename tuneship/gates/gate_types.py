"""A gate as fixed for a rollout, and the readings of gates and thresholds at one look. Next: `record.py` keeps them."""

from dataclasses import dataclass
from typing import Literal

Source = Literal["series", "probes"]
GateState = Literal["harm", "hold", "open", "proven", "not_evaluated", "not_available", "disabled"]


@dataclass(frozen=True)
class Gate:
    """One gate as fixed when the rollout begins. Only `active` gates test, and they share alpha."""

    name: str
    reason: str
    source: Source = "series"
    state: Literal["active", "not_evaluated", "not_available", "disabled"] = "active"


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """The limits of a bucket: the baseline's median, its p95, and 1.48 times its p99, of this many answers.

    In ms, or in ms per output token.
    """

    typical_ms: float
    slow_ms: float
    very_slow_ms: float
    requests: int
    per_token: bool = False


@dataclass(frozen=True, slots=True)
class UsualHour:
    """The baseline in the hour before the start, which later looks cannot read again."""

    limits: LatencyLimits | None = None
    # Output tokens of an answer that is too short or too long.
    too_short: float | None = None
    too_long: float | None = None
    # The most requests that one replica got in a bucket.
    load: float = 0.0


@dataclass(frozen=True)
class GateReading:
    """One gate at one look, each limit beside its value. `log_*` are natural logarithms."""

    name: str
    state: GateState
    reason: str = "none"
    candidate_requests: int = 0
    candidate_bad: int = 0
    baseline_requests: int = 0
    baseline_bad: int = 0
    candidate_share: float | None = None
    baseline_share: float | None = None
    ratio_limit: float | None = None
    harm_limit: float | None = None
    ok_limit: float | None = None
    log_e_harm: float | None = None
    log_e_harm_limit: float | None = None
    log_u_harm: float | None = None
    log_u_harm_limit: float | None = None
    log_e_ok: float | None = None
    log_e_ok_limit: float | None = None
    z: float | None = None
    z_limit: float | None = None
    requests_to_proof: int | None = None
    # z of the newest five buckets, by which a latency gate shows that the slowness goes on.
    z_now: float | None = None


@dataclass(frozen=True)
class ThresholdReading:
    """One plain threshold at one look: its limit and its value (None: not known, or too few requests)."""

    name: str
    reason: str
    limit: float
    value: float | None
    requests: int

    @property
    def is_above(self) -> bool:
        """Whether the value exceeds the limit; a value at the limit is within it."""
        return self.value is not None and self.value > self.limit
