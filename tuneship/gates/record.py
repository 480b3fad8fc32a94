"""The record of a rollout as pure data: facts in the order in which they were learned, to and from JSON lines.

With the metric series and the plan it is all that a decision depends on; who writes the lines, and where, is the flow's
matter. Times are the service's. Next: `canary.py` reads it and makes the next `Look`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from tuneship.contract.common import SignedInPerson
from tuneship.gates.formula import FORMULA_VERSION
from tuneship.gates.gate_types import (
    Gate,
    GateReading,
    LatencyLimits,
    ThresholdReading,
    UsualHour,
)
from tuneship.gates.metrics.kept_buckets import KeptBuckets, unpack
from tuneship.gates.metrics.series import Arm
from tuneship.gates.outlook import Forecast, Today


class ChangedLine(ValueError):
    """A line of a record does not have the hash that it was written with."""


class Verdict(StrEnum):
    """The decision of one look."""

    HOLD = "hold"
    ADVANCE = "advance"
    # All is proven, and the plan requires a person's approval.
    ASK = "ask"
    PROMOTE = "promote"
    # The bake is over: the baseline may be retired.
    BAKED = "baked"
    ROLLBACK = "rollback"
    PAUSE = "pause"
    ABORT = "abort"


class Phase(StrEnum):
    """The phase of a rollout; each has an allowance of false rollbacks of its own."""

    BEFORE = "before"
    COMPARE = "compare"
    WAIT = "wait"
    BAKE = "bake"
    # The candidate has all traffic after a bake that left some to the baseline; only plain failures count.
    SETTLE = "settle"


NO_USUAL = UsualHour()


# The reason of a look that holds because a person has paused the rollout at the service.
PAUSED = "paused"


@dataclass(frozen=True)
class Begun:
    """The rollout exists. `server`: extensions that the server was found to lack."""

    rollout_id: str
    endpoint_id: str
    plan: dict[str, Any]
    plan_digest: str
    gates: tuple[Gate, ...]
    # The baseline before the start.
    usual: UsualHour = NO_USUAL
    server: tuple[str, ...] = ()
    # The formula that judges this rollout to its end.
    formula_version: str = FORMULA_VERSION
    # The traffic that the forecast is made for; None: nobody knows it.
    today: Today | None = None
    forecast: Forecast | None = None
    # Warnings that were shown before the first shift.
    warnings: tuple[str, ...] = ()
    endpoint_name: str | None = None
    kind: Literal["begun"] = "begun"

    @cached_property
    def plan_hash(self) -> str:
        """SHA-256 of the plan as it is recorded; every look names the one that it was decided by."""
        return hashlib.sha256(to_json(self.plan)).hexdigest()


@dataclass(frozen=True)
class SplitIntended:
    """Written before each PATCH."""

    candidate_weight: int
    why: str
    kind: Literal["split_intended"] = "split_intended"


@dataclass(frozen=True)
class SplitConfirmed:
    """Written after the split was read back. `at`: the newest service time known then, never our clock.

    That is the time of the change where the service names it, else that of the last look.

    A bucket belongs to the weight confirmed last before the bucket's end; `at` None: to this weight from the beginning.
    """

    candidate_weight: int
    at: datetime | None = None
    version: int | None = None
    kind: Literal["split_confirmed"] = "split_confirmed"


@dataclass(frozen=True)
class Probed:
    """Answers that the pipeline's driver saw since the last look; recorded before the look uses them.

    `bad[gate]`: how many of the answered requests (`requests - failed`) were bad in the sense of that quality gate.
    `abandoned`: answers that began and did not end; `unanswered`: requests that ended before anybody said whose they
    were. Both are none of `requests`.
    """

    candidate_requests: int
    baseline_requests: int
    candidate_failed: int = 0
    baseline_failed: int = 0
    candidate_bad: dict[str, int] = field(default_factory=dict[str, int])
    baseline_bad: dict[str, int] = field(default_factory=dict[str, int])
    candidate_abandoned: int = 0
    baseline_abandoned: int = 0
    unanswered: int = 0
    kind: Literal["probed"] = "probed"


@dataclass(frozen=True)
class Look:
    """One look with its decision. The first fields are inputs of later looks, the others explain the decision."""

    number: int
    phase: Phase
    weight: int
    verdict: Verdict
    at: datetime | None
    horizon: datetime | None
    # Why the metrics were unusable, or None.
    missing: str | None
    # Whether the answer was sound but data that should have come did not.
    standing: bool
    step_buckets: int
    brought_data: bool
    newest_baseline: datetime | None
    newest_candidate: datetime | None
    # Latency limits of the next bucket.
    limits: LatencyLimits | None
    baseline_status: str | None
    candidate_status: str | None
    candidate_replicas: int | None

    # Requests that had been open for too long at this look, by the bucket of their arrival, the newest
    # first. They are inputs of a replay, because no bucket shows them.
    hanging_baseline: tuple[int, ...] = ()
    hanging_candidate: tuple[int, ...] = ()

    reason: str = "none"
    reasons: tuple[str, ...] = ()
    next_weight: int | None = None
    step_requests: int = 0
    # The candidate's requests at this step, or those that it should have had by the baseline's, where these are more.
    # None: a look of 26.12.0, which counted by `step_requests`.
    step_traffic: int | None = None
    needed: str = ""
    gates: tuple[GateReading, ...] = ()
    thresholds: tuple[ThresholdReading, ...] = ()
    warnings: tuple[str, ...] = ()
    plan_digest: str = ""
    formula_version: str = FORMULA_VERSION
    # Buckets of this step in which latency was not compared, because the candidate's replicas carried more.
    unequal_load: int = 0
    # The buckets that it counted and no look before it had, packed (`kept_buckets.py`).
    kept: str = ""
    kind: Literal["look"] = "look"

    @property
    def newest(self) -> Mapping[Arm, datetime | None]:
        """For each arm the end of its newest bucket with a throughput value, as of this look."""
        return {"baseline": self.newest_baseline, "candidate": self.newest_candidate}

    @property
    def hanging(self) -> Mapping[Arm, tuple[int, ...]]:
        """Per arm the requests that had been open for too long, by the bucket of their arrival, the newest first."""
        return {"baseline": self.hanging_baseline, "candidate": self.hanging_candidate}

    @property
    def is_missing(self) -> bool:
        """Whether the look counts towards `missing_looks`."""
        return self.missing is not None or self.standing

    @property
    def is_paused(self) -> bool:
        """Whether it held because a person has paused the rollout at the service."""
        return PAUSED in self.reasons


@dataclass(frozen=True)
class ApprovalAsked:
    """Approval was requested and the wait begins. `at` as in `SplitConfirmed`.

    `question`: the id under which the answer is found. `until`: its last moment by the clock of the run that requested
    it; no decision reads it.
    """

    at: datetime | None
    question: str = ""
    until: datetime | None = None
    kind: Literal["approval_asked"] = "approval_asked"


@dataclass(frozen=True)
class ApprovalAnswered:
    """The answer, or that none came in time. `person`: the approver, where the service knows who signed in."""

    decision: Literal["promote", "roll back", "timeout"]
    approver: str = ""
    comment: str = ""
    person: SignedInPerson | None = None
    kind: Literal["approval_answered"] = "approval_answered"


@dataclass(frozen=True)
class Resumed:
    """A rollout goes on that had ended `paused`, or that a person had paused; the maxima of looks count from here."""

    by: str = ""
    kind: Literal["resumed"] = "resumed"


@dataclass(frozen=True)
class Ended:
    """The outcome. A `paused` record stays open."""

    outcome: str
    reason: str
    kind: Literal["ended"] = "ended"


Fact = (
    Begun
    | SplitIntended
    | SplitConfirmed
    | Probed
    | Look
    | ApprovalAsked
    | ApprovalAnswered
    | Resumed
    | Ended
)
# What stands before the hash at the end of a line.
_LINK = ',"link":"'
_FACT: TypeAdapter[Fact] = TypeAdapter(Annotated[Fact, Field(discriminator="kind")])


@dataclass(frozen=True)
class Mark:
    """A moment between two looks: the service's time, and the number of looks before it."""

    at: datetime | None
    looks: int


@dataclass(frozen=True)
class RolloutRecord:
    """Facts in order. Everything else is derived, once: the facts never change."""

    facts: tuple[Fact, ...] = ()

    def plus(self, *facts: Fact) -> "RolloutRecord":
        """The record with these facts at its end."""
        return replace(self, facts=self.facts + facts)

    @property
    def begun(self) -> Begun:
        """The first fact. Raises ValueError for a record that never began."""
        for fact in self.facts:
            if isinstance(fact, Begun):
                return fact
        raise ValueError("the record does not say how the rollout began")

    @cached_property
    def kept(self) -> KeptBuckets:
        """The counted buckets of all looks. Raises ValueError if they cannot be unpacked."""
        pieces = [unpack(look.kept) for look in self.looks if look.kept]
        buckets = tuple(bucket for piece in pieces for bucket in piece.buckets)
        return KeptBuckets(buckets, pieces[-1].edges_ms) if pieces else KeptBuckets()

    @cached_property
    def looks(self) -> list[Look]:
        """All recorded looks of the rollout, oldest first."""
        return [fact for fact in self.facts if isinstance(fact, Look)]

    @property
    def last_comparison(self) -> Look | None:
        """The last look at both deployments; the looks after a bake see traffic of the candidate only."""
        compared = (look for look in reversed(self.looks) if look.phase is not Phase.SETTLE)
        return next(compared, None)

    @property
    def answer(self) -> ApprovalAnswered | None:
        """The last answer to the last request for approval."""
        for fact in reversed(self.facts):
            if isinstance(fact, ApprovalAnswered):
                return fact
            if isinstance(fact, ApprovalAsked):
                return None
        return None

    @property
    def asked(self) -> ApprovalAsked | None:
        """The open request for approval since the rollout began or was resumed."""
        for fact in reversed(self.facts):
            if isinstance(fact, ApprovalAsked):
                return fact
            if isinstance(fact, Resumed):
                return None
        return None

    @cached_property
    def weight(self) -> int:
        """The candidate's confirmed traffic in percent."""
        splits = [fact for fact in self.facts if isinstance(fact, SplitConfirmed)]
        return splits[-1].candidate_weight if splits else 0

    @cached_property
    def phase(self) -> Phase:
        """The phase, from the confirmed split and whether approval was requested."""
        weight = self.weight
        if weight == 0:
            return Phase.BEFORE
        # The promotion led to 100 %, or to the weight of a bake that leaves some traffic to the baseline.
        promotions = (look for look in self.looks if look.verdict is Verdict.PROMOTE)
        promoted = next((look.next_weight for look in promotions), None)
        if weight == 100:
            return Phase.SETTLE if promoted not in (None, 100) else Phase.BAKE
        if weight == promoted:
            return Phase.BAKE
        asked = any(isinstance(fact, ApprovalAsked) for fact in self.facts)
        return Phase.WAIT if asked else Phase.COMPARE

    def marked(self) -> Iterator[tuple[Fact, Mark]]:
        """Yield every fact but looks with the moment it became known; splits and requests for approval have a time."""
        yield from self._marked

    @cached_property
    def _marked(self) -> list[tuple[Fact, Mark]]:
        looks = 0
        found: list[tuple[Fact, Mark]] = []
        for fact in self.facts:
            if isinstance(fact, Look):
                looks += 1
                continue
            at = fact.at if isinstance(fact, SplitConfirmed | ApprovalAsked) else None
            found.append((fact, Mark(at, looks)))
        return found

    def step_marks(self) -> dict[int, Mark]:
        """The first moment at which each weight above 0 was confirmed, in rising order."""
        return self._step_marks

    @cached_property
    def _step_marks(self) -> dict[int, Mark]:
        marks: dict[int, Mark] = {}
        for fact, mark in self.marked():
            # A resumed run confirms its weight again; the step began when the weight was first reached.
            if isinstance(fact, SplitConfirmed) and fact.candidate_weight > 0:
                marks.setdefault(fact.candidate_weight, mark)
        return marks

    def resumed_after(self) -> int:
        """Number of looks before a person last resumed the rollout; the maxima count from there."""
        resumed = [mark.looks for fact, mark in self.marked() if isinstance(fact, Resumed)]
        return resumed[-1] if resumed else 0

    def missing_in_a_row(self) -> int:
        """Number of consecutive missing looks at the end of the record."""
        row = 0
        for look in reversed(self.looks):
            if not look.is_missing:
                break
            row += 1
        return row


def to_line(fact: Fact) -> str:
    """One JSON line, without the line break; floats survive bit by bit."""
    return _FACT.dump_json(fact).decode()


def linked(last: str, line: str) -> str:
    """The line with the SHA-256 of its facts and of the line before, so that a later change is found and named."""
    before = last.rpartition(_LINK)[2]
    digest = hashlib.sha256(f"{before}{line}".encode()).hexdigest()
    return f'{line[:-1]}{_LINK}{digest}"}}'


def to_mapping(fact: Fact) -> Mapping[str, Any]:
    """The fact as plain JSON values, for results and artifacts."""
    return _FACT.dump_python(fact, mode="json")


def from_lines(lines: Iterable[str]) -> RolloutRecord:
    """The record from its lines. A torn last line (killed while writing) is left out.

    Raises ValueError for any other damaged line, and `ChangedLine` for one that is not as it was written.
    """
    texts = [line.strip() for line in lines if line.strip()]
    facts: list[Fact] = []
    for number, (last, text) in enumerate(pairwise(["", *texts]), start=1):
        try:
            facts.append(_FACT.validate_json(text))
        except ValidationError as error:
            # The writer was killed within the last line, so nothing has been built on it.
            if number < len(texts):
                raise ValueError(f"line {number} of the record is damaged") from error
        else:
            if text != linked(last, text.rpartition(_LINK)[0] + "}"):
                raise ChangedLine(f"line {number}, or the one before it, was changed afterwards")
    record = RolloutRecord(tuple(facts))
    # Hashes can be written again by who changes a line, so the looks name their plan, too.
    begun = next((fact for fact in facts if isinstance(fact, Begun)), None)
    for look in record.looks if begun else ():
        if begun and look.plan_digest != begun.plan_hash:
            raise ChangedLine(
                f"the plan was changed: look {look.number} was decided by another one"
            )
    return record


def readable_facts(lines: Iterable[str]) -> list[Fact]:
    """The readable facts of a damaged record. Facts are missing, so they must not decide anything."""
    facts: list[Fact] = []
    for line in lines:
        with suppress(ValidationError):
            facts.append(_FACT.validate_json(line))
    return facts
