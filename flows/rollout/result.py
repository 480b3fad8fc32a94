"""The result of a rollout, as the flow returns it and `--result` stores it: one outcome, one reason, every decision.

It is made from the record alone, so that a stopped run can still report what it did. Next: `flows/shift_traffic.py`.
"""

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from tuneship.gates.gate_types import Gate
from tuneship.gates.record import (
    Begun,
    Ended,
    Look,
    RolloutRecord,
    to_mapping,
)
from tuneship.gates.reports.split_history import Change, history_of
from tuneship.gates.reports.words import (
    WHY_OFF,
    driven,
    forecast_in_words,
    gates_in_words,
    look_in_words,
)

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
        description="Every look: verdict, counts, shares and e-values of the active gates, each limit beside its"
        " value. What has no value at a look is left out.",
    )
    forecast: dict[str, Any] | None = Field(
        default=None,
        description="What was expected before the first shift, in numbers and in sentences; null: no forecast.",
    )
    in_words: list[str] = Field(
        default_factory=list[str],
        description="What the gates saw when they last compared the two deployments.",
    )
    driver: dict[str, float] | None = Field(
        default=None, description="Requests of the plan's own traffic, by what became of them."
    )
    approval: dict[str, str] | None = Field(
        default=None, description="What a person decided: decision, approver, comment."
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
    begun, answer = record.begun, record.answer
    gates = [
        {"name": gate.name, "state": gate.state}
        | ({"why": WHY_OFF[gate.state]} if gate.state in WHY_OFF else {})
        for gate in begun.gates
    ]
    numbers: dict[str, Any] | None = None
    if begun.forecast is not None and begun.today is not None:
        numbers = dataclasses.asdict(begun.forecast) | {"today": dataclasses.asdict(begun.today)}
        numbers["in_words"] = forecast_in_words(begun)
    in_words: list[str] = []
    if record.looks:
        compared = record.last_comparison
        in_words += gates_in_words(compared.gates) if compared else []
        in_words += look_in_words(record.looks[-1])
    names = ("decision", "approver", "comment")
    return RolloutResult.model_validate(
        {
            "outcome": ended.outcome,
            "reason": ended.reason,
            "endpoint_id": begun.endpoint_id,
            "history": history_of(record),
            "gates": gates,
            "decisions": [_decision(look, begun.gates) for look in record.looks],
            "forecast": numbers,
            "in_words": in_words,
            "driver": driven(record) or None,
            "approval": {name: getattr(answer, name) for name in names} if answer else None,
            "approval_asked_at": record.asked.at if record.asked else None,
            "rollout_id": begun.rollout_id,
            "notes": [*_standing_notes(begun), *notes],
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


def _decision(look: Look, gates: Sequence[Gate]) -> dict[str, Any]:
    """A look without the gates that are off: these are listed once, in `gates` of the result."""
    fields = dict(to_mapping(look))
    off = {gate.name for gate in gates if gate.state != "active"}
    readings = {gate["name"]: gate for gate in fields.pop("gates") if gate["name"] not in off}
    first = {"look": fields.pop("number"), "step": fields.pop("weight")}
    return _without_nulls(first | fields | {"gates": readings})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        known = cast("dict[str, Any]", value).items()
        return {name: _without_nulls(one) for name, one in known if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in cast("list[Any]", value)]
    return value
