"""The result of a rollout, as the flow returns it and `--result` stores it: one outcome, one reason, every decision.

It is made from the record alone, so that a stopped run can still report what it did. Next: `flows/shift_traffic.py`.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from tuneship.gates.record import Begun, Ended, Phase, RolloutRecord
from tuneship.gates.reports.rollout_facts import facts_of
from tuneship.gates.reports.split_history import Change

Outcome = Literal["promoted", "rolled_back", "rejected", "paused", "aborted", "rollback_incomplete"]


class RolloutResult(BaseModel):
    """The result of `shift_traffic`."""

    outcome: Outcome
    reason: str
    endpoint_id: str | None = None
    history: list[Change] = Field(default_factory=list[Change])
    gates: list[dict[str, str]] = Field(
        default_factory=list[dict[str, str]],
        description="Every gate as it was when the rollout began: name, state, and why one that is off is off.",
    )
    decisions: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        description="Every check: verdict, counts, shares and e-values of the active gates, each limit beside its"
        " value. What has no value at a check is left out.",
    )
    forecast: dict[str, Any] | None = Field(
        default=None,
        description="What was expected before the first shift, in numbers and in sentences; null: no forecast.",
    )
    in_words: list[str] = Field(
        default_factory=list[str],
        description="What the gates saw when they last compared the two deployments.",
    )
    driver: dict[str, int | float] | None = Field(
        default=None, description="Requests of the plan's own traffic, by what became of them."
    )
    approval: dict[str, Any] | None = Field(
        default=None,
        description="What a person decided: decision, approver, comment, and `person` (issuer, subject, name) where"
        " the approver signed in to the service by OpenID Connect.",
    )
    approval_asked_at: datetime | None = Field(
        default=None, description="When that person was asked, by the service's clock."
    )
    rollout_id: str | None = None
    notes: list[str] = Field(
        default_factory=list[str],
        description="What a reader must know beside the outcome: gates that are off, a server without leases, ...",
    )

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        """The looks at both deployments; those after a bake see traffic of the candidate only."""
        return [look for look in self.decisions if look["phase"] != Phase.SETTLE]

    @property
    def headline(self) -> str:
        """Outcome and reason in one line."""
        return self.outcome + ("" if self.reason == "none" else f" ({self.reason})")


class RollbackIncomplete(Exception):
    """The return of the traffic failed or is not confirmed: the one outcome that fails the flow run."""

    def __init__(self, result: BaseModel, message: str) -> None:
        """Carry the result; the record stays open."""
        super().__init__(message)
        self.result = result


def rejected(reason: str, note: str, endpoint_id: str | None = None) -> RolloutResult:
    """The result of a rollout that is refused before any traffic moved."""
    return RolloutResult(
        outcome="rejected", reason=reason, endpoint_id=endpoint_id, notes=[note] if note else []
    )


def result_of(record: RolloutRecord, notes: list[str]) -> RolloutResult:
    """Make the result from a record that has ended."""
    ended = [fact for fact in record.facts if isinstance(fact, Ended)][-1]
    return RolloutResult.model_validate(
        {
            "outcome": ended.outcome,
            "reason": ended.reason,
            **facts_of(record),
            "notes": [*_standing_notes(record.begun), *notes],
        }
    )


def _standing_notes(begun: Begun) -> list[str]:
    notes = [*begun.warnings]
    for state in ("disabled", "not_available", "not_evaluated"):
        names = ", ".join(gate.name for gate in begun.gates if gate.state == state)
        if names:
            notes.append(f"gates that are {state}: {names}")
    if begun.server:
        lacking = ", ".join(begun.server)
        notes.append(f"the server lacks {lacking}: nothing returns the traffic if this run dies")
    return notes
