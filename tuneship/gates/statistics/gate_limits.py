"""The limits of a single gate in a plan: the share that is harm, and the share that is proof. Next: `plan.py`."""

from dataclasses import replace

from pydantic import Field

from tuneship.contract.common import StrictModel
from tuneship.gates.statistics.cells import cell_of
from tuneship.gates.statistics.evidence import Limits

RATIO = "Bad share allowed, as a multiple of the baseline's."
HARM = "Bad share always allowed before a rollback."
PROVEN = "Bad share below which the gate may be proven."
TIMES = "How many times slower answers may be before a rollback; 4.4 % is the resolution."
TIMES_OK = "How many times slower the gate disproves when it is proven."


class GateLimits(StrictModel):
    """Limits of one gate. A gate that is on but has a null among them is not evaluated and blocks the promotion."""

    ratio: float | None = Field(
        default=None,
        ge=1,
        le=100,
        description=RATIO,
    )
    harm: float | None = Field(default=None, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=None, gt=0, le=0.5, description=PROVEN)

    def limits(self) -> Limits | None:
        """The limits harm, proof and ratio of this gate, or None when one of them is missing."""
        # A null never means "no limit": the gate is not evaluated, and nothing is promoted past it.
        if self.ratio is None or self.harm is None or self.ok is None:
            return None
        return Limits(ratio=self.ratio, harm=self.harm, ok=self.ok)


class ErrorGate(GateLimits):
    """Server failures, time-outs and broken streams."""

    ratio: float | None = Field(default=1.5, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.01, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.02, gt=0, le=0.5, description=PROVEN)
    slo_max: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Error share above which no deployment is promoted and a baseline counts as unhealthy.",
    )


# By its definition 5 % of the baseline's own answers are slow, so these limits lie above that, and
# those of `VerySlowGate` above 1 %.
class SlowGate(GateLimits):
    """Share of answers slower than the baseline's p95 of the last ten minutes."""

    ratio: float | None = Field(default=1.5, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.075, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.10, gt=0, le=0.5, description=PROVEN)
    times: float = Field(default=1.24, ge=1, le=100, description=TIMES)
    times_ok: float = Field(default=1.41, ge=1, le=100, description=TIMES_OK)

    def limits(self) -> Limits | None:
        """The margins as counts and as time."""
        limits = super().limits()
        return replace(limits, farther=_farther(self.times, self.times_ok)) if limits else None


class TypicalGate(StrictModel):
    """Compares how many of the candidate's answers are slower than the baseline's median."""

    # Where no answer takes about the median time, as with a cache that half of the requests hit, a
    # longer time counts the same answers: equal deployments differ by nothing, and only a share is proof.
    ratio: float = Field(
        default=1.25,
        ge=1,
        le=1.9,
        description="Share of answers slower than the baseline's median allowed, as a multiple of the baseline's.",
    )
    times: float = Field(default=1.48, ge=1, le=100, description=TIMES)
    times_ok: float = Field(default=1.76, ge=1, le=100, description=TIMES_OK)

    def limits(self) -> Limits | None:
        """The margins as a share and as time."""
        return Limits(self.ratio, None, None, _farther(self.times, self.times_ok))


def _farther(times: float, times_ok: float) -> tuple[int, int]:
    return round(cell_of(times)), round(cell_of(times_ok))


class VerySlowGate(GateLimits):
    """Share of answers slower than 1.48 x the baseline's p99 of the last ten minutes."""

    ratio: float | None = Field(default=2.0, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.02, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.04, gt=0, le=0.5, description=PROVEN)


class ShortGate(GateLimits):
    """Answers much shorter than nearly all of the baseline's."""

    ratio: float | None = Field(default=2.0, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.02, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.04, gt=0, le=0.5, description=PROVEN)


class LongGate(GateLimits):
    """Answers much longer than nearly all of the baseline's, for example in a loop."""

    ratio: float | None = Field(default=2.0, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.02, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.04, gt=0, le=0.5, description=PROVEN)


class CrashRule(StrictModel):
    """One bucket in which the candidate alone fails so often that no statistics over time are needed."""

    failures: int = Field(default=20, ge=5, description="Failures of different callers, at least.")
    share: float = Field(
        default=0.3, gt=0, le=1, description="Share of the candidate's requests, at least."
    )


class EmptyGate(GateLimits):
    """Blank completions."""

    ratio: float | None = Field(default=1.5, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.01, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.02, gt=0, le=0.5, description=PROVEN)


class AbandonedGate(GateLimits):
    """Callers who disconnect before their answer ends; they have many reasons for that, so the ratio is wide."""

    ratio: float | None = Field(default=2.0, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.01, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.02, gt=0, le=0.5, description=PROVEN)


class RefusedGate(GateLimits):
    """Well-formed requests that the deployment refuses, such as a prompt that is too long for it."""

    ratio: float | None = Field(default=1.5, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.01, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.02, gt=0, le=0.5, description=PROVEN)


class AnswerGate(GateLimits):
    """A gate on the content of answers. Only the traffic driver reads answers, so the plan needs `traffic`."""
