"""The plan of a rollout: the parameter model of `shift_traffic`, and of its form in the UI.

Every limit counts looks, so that a compressed clock behaves like a slow one; only the approval time-out and the
lease are seconds. Next: `canary.py` decides by it.
"""

import hashlib
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import to_json

from tuneship.contract.common import StrictModel
from tuneship.gates.statistics.gate_limits import (
    AbandonedGate,
    AnswerGate,
    CrashRule,
    EmptyGate,
    ErrorGate,
    LongGate,
    RefusedGate,
    ShortGate,
    SlowGate,
    TypicalGate,
    VerySlowGate,
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def interval_seconds(interval: str) -> int:
    """Parse `30s`, `1m`, `2h` or `1d` into seconds. Raises ValueError for anything else."""
    number, unit = interval[:-1], interval[-1:]
    # `isdigit` alone takes digits of other scripts, and superscripts, which `int` refuses.
    if not (number.isascii() and number.isdigit()) or unit not in _SECONDS:
        raise ValueError(f"not an interval: {interval!r}")
    return int(number) * _SECONDS[unit]


class LatencyGates(StrictModel):
    """Latency as the share of slow answers; null switches a gate off."""

    slow: SlowGate | None = Field(
        default=SlowGate(), description="Slower than the baseline's p95; null: off."
    )
    very_slow: VerySlowGate | None = Field(
        default=VerySlowGate(), description="Slower than 1.48 x the baseline's p99; null: off."
    )
    typical: TypicalGate | None = Field(
        default=TypicalGate(), description="The median takes longer; null: off."
    )
    per_output_token: bool = Field(
        default=False,
        description="Compare the time per output token, for a candidate that is meant to write longer answers.",
    )


class QualityGates(StrictModel):
    """Faults of an answer that did arrive. The last three are counted by the traffic driver only."""

    empty: EmptyGate | None = Field(
        default=EmptyGate(), description="Blank completions; null: off."
    )
    short: ShortGate | None = Field(
        default=ShortGate(), description="Much shorter than nearly all answers; null: off."
    )
    long: LongGate | None = Field(
        default=LongGate(), description="Much longer than nearly all answers; null: off."
    )
    length: AnswerGate | None = Field(
        default=None, description="Cut off at the token limit; null: off."
    )
    repetition: AnswerGate | None = Field(
        default=None, description="A 4-gram more than 5 times; null: off."
    )
    invalid_json: AnswerGate | None = Field(
        default=None, description="Not JSON though asked for; null: off."
    )


class CallerGates(StrictModel):
    """Limits on requests that end without an answer and without an error. They need a service that counts these."""

    abandoned: AbandonedGate | None = Field(
        default=AbandonedGate(), description="The caller disconnected; null: off."
    )
    refused: RefusedGate | None = Field(
        default=RefusedGate(), description="Refused by the deployment itself; null: off."
    )


class OutputLength(StrictModel):
    """Output tokens per answer, candidate over baseline: outside these bounds the rollout is held."""

    shortest: float = Field(
        default=0.5, ge=0, lt=1, description="Hold below this share of the baseline's length."
    )
    longest: float = Field(
        default=2.0, gt=1, le=100, description="Hold above this multiple of the baseline's length."
    )
    min_requests: int = Field(
        default=200, ge=1, description="Candidate requests before lengths are compared."
    )


class Thresholds(StrictModel):
    """Plain limits on the candidate alone, in addition to the gates; each one that is set is active.

    They only add a reason to hold or to roll back, and promise no error rate: a shared incident, or noise, trips them.
    """

    error_rate_percentage: float | None = Field(
        default=None, ge=0, lt=100, description="Failed requests in percent, at most; null: off."
    )
    latency_p95_ms: float | None = Field(
        default=None,
        gt=0,
        le=3_600_000,
        description="p95 in ms of the answers, the median of the buckets, at most; null: off.",
    )
    empty_percentage: float | None = Field(
        default=None, ge=0, lt=100, description="Blank completions in percent, at most; null: off."
    )
    looks: int = Field(
        default=5, ge=1, le=1000, description="Newest finished buckets that are measured together."
    )
    min_requests: int = Field(
        default=100, ge=1, description="Candidate requests in them before anything is compared."
    )
    action: Literal["rollback", "hold"] = Field(
        default="rollback", description="What a value above its limit does."
    )

    @model_validator(mode="after")
    def _limits(self) -> Self:
        limits = (self.error_rate_percentage, self.latency_p95_ms, self.empty_percentage)
        # Who writes `thresholds` expects protection; one without a limit would give none.
        if all(limit is None for limit in limits):
            raise ValueError(
                "thresholds need at least one of error_rate_percentage, latency_p95_ms and empty_percentage"
            )
        return self


class DriverTraffic(StrictModel):
    """Prompts that the pipeline itself sends to the endpoint during the rollout."""

    prompts: str = Field(
        min_length=1, description="JSON lines file; `instruction` or `prompt` of each line is sent."
    )
    requests_per_second: float = Field(
        gt=0, le=10_000, description="Rate aimed at; a 429 slows it down."
    )
    max_in_flight: int = Field(default=16, ge=1, le=1024, description="Open requests at most.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Longest answer; null: the service's default."
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="How long the driver waits for an answer; then the request counts as abandoned.",
    )


Steps = Annotated[list[int], Field(min_length=2)]
USUAL_STEPS = (5, 25, 50, 75, 100)
# One request in five keeps the bake's comparison strong; a plan that compares at that weight already
# leaves one in twenty.
USUAL_BAKE_WEIGHT, HIGH_BAKE_WEIGHT = 80, 95
# A look counts in full from this many of the candidate's requests on.
FULL_LOOK_REQUESTS = 30


class CanaryRules(StrictModel):
    """How to shift and when to stop, for any pair of deployments."""

    steps: Steps | Literal["auto"] = Field(
        default=[*USUAL_STEPS],
        description="Candidate's traffic in percent, rising, last 100; all but the last are compared steps. auto: 5,"
        " 25, 50, 75, 100, beginning where today's traffic is enough for a step.",
    )
    interval: str = Field(
        default="1m",
        pattern=r"^[1-9][0-9]{0,5}[smhd]$",
        description="Metrics bucket asked of the service: 1m, 5m, 1h (1s where the service knows it).",
    )
    look_every_seconds: float = Field(
        default=60.0, gt=0, le=86400, description="Seconds between two checks (looks)."
    )
    min_looks_per_step: int = Field(
        default=5, ge=1, description="Checks with new data before a step may end."
    )
    max_looks_per_step: int = Field(
        default=90,
        ge=1,
        description="Checks at one step before it is inconclusive; those with few requests count in part.",
    )
    max_looks: int = Field(
        default=240, ge=1, description="Checks at all steps before the rollout is inconclusive."
    )
    wait_for_traffic: str = Field(
        default="12h",
        pattern=r"^(0|[1-9][0-9]{0,5})[smhd]$",
        description="How long a step waits for its requests, for example until the morning; at most 48h.",
    )
    min_requests_per_step: int = Field(
        default=30, ge=1, description="Candidate requests needed at each step."
    )
    stale_looks: int = Field(
        default=3, ge=1, description="Checks without newer data before the split is held."
    )
    missing_looks: int = Field(
        default=10, ge=1, description="Checks in a row without usable metrics before a rollback."
    )
    alpha: float = Field(
        default=0.05, gt=0, le=0.5, description="Chance of a false rollback per phase, all gates."
    )
    error_gate: ErrorGate | None = Field(
        default=ErrorGate(), description="Failed requests; null: off."
    )
    latency_gates: LatencyGates | None = Field(
        default=LatencyGates(), description="Slow answers; null: off."
    )
    quality_gates: QualityGates | None = Field(
        default=QualityGates(), description="Bad answers; null: off."
    )
    caller_gates: CallerGates | None = Field(
        default=CallerGates(), description="Abandoned and refused requests; null: off."
    )
    output_length: OutputLength | None = Field(
        default=OutputLength(),
        description="Hold when answers have another length; null: off, for a candidate that is meant to"
        " write more or less. `latency_gates.per_output_token` says the same.",
    )
    split_check: bool | None = Field(
        default=None,
        description="Hold when the candidate's counted requests fall short of its weight. Not for callers who keep a"
        " routing key; null: only where `traffic` is set, whose requests have a key each.",
    )
    crash: CrashRule | None = Field(
        default=CrashRule(), description="Roll back for one bucket that fails; null: off."
    )
    large_keys: Literal["spread", "keep"] = Field(
        default="spread",
        description="Draw the requests of a caller with more than 2 % of the traffic one by one, or keep the caller at"
        " one deployment. With few callers, nothing is proven then.",
    )
    warmup_looks: int = Field(
        default=12,
        ge=0,
        le=60,
        description="Checks with new data after an increase by a quarter or more before latency may roll back.",
    )
    thresholds: Thresholds | None = Field(
        default=None,
        description="Plain limits on the candidate, for those who want them; promotion still needs the gates' proof.",
    )
    on_inconclusive: Literal["rollback", "pause"] = Field(
        default="rollback", description="What to do when the checks are used up."
    )
    on_little_traffic: Literal["reject", "go_on"] = Field(
        default="reject",
        description="What to do when today's traffic is too little for a promotion within the plan's checks. go_on, or"
        " `on_inconclusive: pause`: begin all the same, with a warning.",
    )
    approval: Literal["never", "required"] = Field(
        default="never",
        description="Ask a person once, before the bake (the soak at a high share).",
    )
    approval_timeout_seconds: int = Field(
        default=86400, ge=1, le=604800, description="No answer within this time: rollback."
    )
    bake_looks: int = Field(
        default=30,
        ge=1,
        description="Checks at `bake_weight` before the candidate gets all traffic; without it, checks at 100 %.",
    )
    bake_weight: int | None = Field(
        default=USUAL_BAKE_WEIGHT,
        ge=2,
        le=99,
        description="Candidate's traffic in percent during the bake. What is left keeps the old deployment in the"
        " comparison: an incident that hits both rolls nobody back. It costs that share of the traffic for the bake,"
        " and a candidate that turns bad in it is found later. null: bake at 100 %, against fixed limits.",
    )
    settle_looks: int = Field(
        default=3,
        ge=1,
        description="Checks at 100 % after a bake at `bake_weight`, before the old deployment may be retired. Only the"
        " circuit breaker, the deployment's state and missing metrics are watched then.",
    )
    retire_baseline: bool = Field(
        default=True, description="Delete the old deployment after the bake."
    )
    lease_seconds: int = Field(
        default=600,
        ge=1,
        le=604800,
        description="The service itself restores the baseline when the pipeline is silent for this long.",
    )
    traffic: DriverTraffic | None = Field(
        default=None, description="Let the pipeline send the requests."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        steps = self.known_steps
        if steps[0] < 1 or steps[-1] != 100 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError("steps must rise strictly from at least 1 to exactly 100")
        if interval_seconds(self.interval) > 86400:
            raise ValueError("interval must be at most 1d")
        if self.max_looks_per_step < self.min_looks_per_step:
            raise ValueError("max_looks_per_step must not be below min_looks_per_step")
        # Data must be able to hold a rollout before their absence ends it.
        if self.missing_looks < self.stale_looks:
            raise ValueError("missing_looks must not be below stale_looks")
        if interval_seconds(self.wait_for_traffic) > 2 * 86400:
            raise ValueError("wait_for_traffic must be at most 48h")
        if self.bake_weight is not None and self.bake_weight <= steps[-2]:
            if "bake_weight" in self.model_fields_set:
                raise ValueError("bake_weight must be above the last step before 100")
            # Nobody asked for it: the default gives way to the steps.
            self.bake_weight = HIGH_BAKE_WEIGHT if steps[-2] < HIGH_BAKE_WEIGHT else None
        # A gate that nobody counts would be proven by silence.
        uncounted = [
            name for name, gate in self.quality_gates or () if isinstance(gate, AnswerGate)
        ]
        if uncounted and self.traffic is None:
            names = ", ".join(f"quality_gates.{name}" for name in uncounted)
            raise ValueError(
                f"nothing counts for {names}: set `traffic`, whose driver reads the answers, or leave it out"
            )
        return self

    @property
    def known_steps(self) -> list[int]:
        """The steps; with `steps: auto`, the steps among which the traffic decides."""
        return [*USUAL_STEPS] if self.steps == "auto" else self.steps

    @property
    def compared_steps(self) -> list[int]:
        """Candidate weights at which the two deployments are compared."""
        return self.known_steps[:-1]

    @property
    def data_every_seconds(self) -> float:
        """Seconds between two looks that can bring new data."""
        # Looks may come more often than buckets end, and then learn nothing in between.
        return max(self.look_every_seconds, float(self.bucket_seconds))

    @property
    def shortest_step_seconds(self) -> float:
        """The shortest possible duration of a step."""
        return self.min_looks_per_step * self.data_every_seconds

    @property
    def longest_step_seconds(self) -> float:
        """The longest possible duration of a step, for any traffic."""
        return max(
            float(interval_seconds(self.wait_for_traffic)),
            self.max_looks_per_step * self.data_every_seconds,
        )

    @property
    def has_split_check(self) -> bool:
        """Whether requests are drawn one by one, so that their counts must follow the weights."""
        return self.traffic is not None if self.split_check is None else self.split_check

    @property
    def bucket_seconds(self) -> int:
        """Length of a metrics bucket."""
        return interval_seconds(self.interval)


# A base of its own because a form lists the fields of the last base first.
class _Rollout(StrictModel):
    """The deployments and the endpoint, which come first in the form."""

    baseline_deployment_id: str = Field(
        min_length=1, description="Deployment that serves now and is returned to."
    )
    candidate_deployment_id: str = Field(min_length=1, description="Deployment to be rolled out.")
    endpoint_id: str | None = Field(
        default=None,
        description="Canary endpoint (`cep_...`) to use; null: create `endpoint_name`.",
    )
    endpoint_name: str | None = Field(
        default=None, min_length=1, description="Name of the canary endpoint to create."
    )


class CanaryPlan(CanaryRules, _Rollout):
    """The plan of one rollout: its deployments, its endpoint and its rules."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.endpoint_id is None and self.endpoint_name is None:
            raise ValueError("one of endpoint_id and endpoint_name is needed")
        if self.baseline_deployment_id == self.candidate_deployment_id:
            raise ValueError("baseline and candidate must be two deployments")
        return self

    def digest(self) -> str:
        """SHA-256 of the plan: the same plan resumes an open rollout, another one does not.

        Without defaults, so that a release of this package with one more field goes on with what an older one began.
        """
        return hashlib.sha256(to_json(self.model_dump(exclude_defaults=True))).hexdigest()

    def is_resumed_by(self, plan: "CanaryPlan", recorded_digest: str) -> bool:
        """Whether `plan` is the plan with which this rollout began, so that the rollout may go on.

        Steps that were left to the traffic stand in the record as chosen.
        """
        return plan.digest() in (self.digest(), recorded_digest)
