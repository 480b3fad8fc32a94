"""The part of a rollout's result that follows from its record: every change of the split, every gate and look. Pure.

The same function makes a result and verifies one later, so what was changed in a result is found by comparing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from tuneship.gates.gate_types import Gate
from tuneship.gates.record import Look, RolloutRecord, to_mapping
from tuneship.gates.reports.split_history import history_of
from tuneship.gates.reports.words import (
    WHY_OFF,
    driven,
    forecast_in_words,
    gates_in_words,
    look_in_words,
)


def facts_of(record: RolloutRecord) -> dict[str, Any]:
    """The fields of a result that follow from the record alone. Raises ValueError for one that never began."""
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
    approval: dict[str, Any] | None = None
    if answer is not None:
        names = ("decision", "approver", "comment")
        approval = {name: getattr(answer, name) for name in names}
        # Results from before persons were recorded have no such field, and are verified by this function, too.
        if answer.person is not None:
            approval["person"] = answer.person.model_dump()
    return {
        "endpoint_id": begun.endpoint_id,
        "history": history_of(record),
        "gates": gates,
        "decisions": [_decision(look, begun.gates) for look in record.looks],
        "forecast": numbers,
        "in_words": in_words,
        "driver": driven(record) or None,
        "approval": approval,
        "approval_asked_at": record.asked.at if record.asked else None,
        "rollout_id": begun.rollout_id,
    }


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
