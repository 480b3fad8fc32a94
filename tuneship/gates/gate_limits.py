"""The limits of a single gate as a plan sets them: which share is harm, and which is proof. Next: `plan.py`."""

from pydantic import Field

from tuneship.contract.common import StrictModel
from tuneship.gates.evidence import Limits

RATIO = "Bad share allowed, as a multiple of the baseline's."
HARM = "Bad share always allowed before a rollback."
PROVEN = "Bad share below which the gate may be proven."


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
        """The three numbers, or None when one of them is missing."""
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
    """Share of answers slower than the baseline's frozen p95."""

    ratio: float | None = Field(default=1.5, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.075, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.10, gt=0, le=0.5, description=PROVEN)


class VerySlowGate(GateLimits):
    """Share of answers slower than 1.5 x the baseline's frozen p99."""

    ratio: float | None = Field(default=2.0, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.02, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.04, gt=0, le=0.5, description=PROVEN)


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
    """Requests that the deployment refuses although they are well formed, such as a prompt too long for it."""

    ratio: float | None = Field(default=1.5, ge=1, le=100, description=RATIO)
    harm: float | None = Field(default=0.01, gt=0, le=0.5, description=HARM)
    ok: float | None = Field(default=0.02, gt=0, le=0.5, description=PROVEN)


class AnswerGate(GateLimits):
    """A gate on what answers say. Only the traffic driver reads them, so it needs `traffic`."""
