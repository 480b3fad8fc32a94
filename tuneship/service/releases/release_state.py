"""Folds the lines of a release's records into its row: what it is at, and which question is open. Pure.

The release's own record says which stages are done and how it ended; those of its rollouts say the split and the
answers. Lines of two records come in any order, so a release that has ended is changed by none but its split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, cast

from tuneship.contract.releases import ReleaseStatus
from tuneship.gates.record import Phase
from tuneship.service.releases.kept_lines import is_of_rollout

STAGES = (
    "data",
    "training",
    "training_gates",
    "deployment",
    "smoke_test",
    "evaluation",
    "canary",
    "approval",
    "bake",
    "ended",
)
# The stage that is at work once a line of this kind was written.
_STAGE_AFTER = {
    "data": "training",
    "job": "training",
    "trained": "training_gates",
    "training_gates": "deployment",
    "baseline": "deployment",
    "candidate": "deployment",
    "smoke_test": "evaluation",
    "evaluation": "canary",
    "rollout": "canary",
}
_STAGE_OF_PHASE = {
    Phase.BEFORE: "canary",
    Phase.COMPARE: "canary",
    Phase.WAIT: "approval",
    Phase.BAKE: "bake",
    Phase.SETTLE: "bake",
}
# Ends after which the same run may go on.
_OPEN_ENDS = ("paused", "rollback_incomplete")
# Where the id of a line of this kind belongs.
_ID_OF = {
    "job": "job_id",
    "trained": "job_id",
    "baseline": "baseline_deployment_id",
    "candidate": "candidate_deployment_id",
    "evaluation": "evaluation_id",
}


@dataclass(frozen=True)
class ReleaseState:
    """The columns of a release's row that its lines decide."""

    kind: str
    status: str
    stage: str
    endpoint_id: str | None
    job_id: str | None
    baseline_deployment_id: str | None
    candidate_deployment_id: str | None
    evaluation_id: str | None
    candidate_percentage: int | None
    outcome: str | None
    reason: str | None
    question: Mapping[str, Any] | None
    ended_at: datetime | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "ReleaseState":
        """The state that a row holds."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    @property
    def has_ended(self) -> bool:
        """Whether nothing but the split may change any more."""
        return self.status == ReleaseStatus.ENDED


def folded(state: ReleaseState, record: str, line: Mapping[str, Any], at: datetime) -> ReleaseState:
    """The state after one more kept line, which was stored `at` this time."""
    # A record is written by others, so that even a number of its plan may be anything.
    if line["kind"] == "split_confirmed" and 0 <= line["candidate_weight"] <= 100:
        state = replace(state, candidate_percentage=line["candidate_weight"])
    if state.has_ended:
        return state
    if is_of_rollout(record):
        return _after_rollout_line(state, line, at)
    return _after_own_line(state, line, at)


def _after_own_line(state: ReleaseState, line: Mapping[str, Any], at: datetime) -> ReleaseState:
    kind = line["kind"]
    if kind in _ID_OF and line.get("id"):
        state = replace(state, **{_ID_OF[kind]: line["id"]})
    if kind == "begun":
        # A run that was killed begins again, where it was.
        going = _going_on(state)
        state = replace(going, endpoint_id=line.get("endpoint_id") or state.endpoint_id)
    elif kind in _STAGE_AFTER:
        # A gate that holds waits for a person in its own stage.
        holds = "hold" in (line.get("decision"), line.get("verdict"))
        state = replace(state, stage=kind if holds else _STAGE_AFTER[kind])
    elif kind == "question":
        state = _asked(state, line, line.get("asks", []))
    elif kind == "held_gates":
        is_passed = line.get("decision") == "promote" and state.stage in _STAGE_AFTER
        state = _answered(state, _STAGE_AFTER[state.stage] if is_passed else state.stage)
    elif kind == "ended":
        state = _ended(state, line, at)
    return state


def _after_rollout_line(state: ReleaseState, line: Mapping[str, Any], at: datetime) -> ReleaseState:
    kind = line["kind"]
    if kind == "begun":
        plan: Mapping[str, Any] = line["plan"]
        state = replace(
            _going_on(state),
            stage="canary",
            endpoint_id=line["endpoint_id"] or state.endpoint_id,
            baseline_deployment_id=_text(plan.get("baseline_deployment_id")),
            candidate_deployment_id=_text(plan.get("candidate_deployment_id")),
        )
    elif kind == "resumed":
        state = _going_on(state)
    elif kind == "look":
        stage = _STAGE_OF_PHASE[Phase(line["phase"])]
        state = replace(state, stage=stage, reason=line["reason"])
    elif kind == "approval_asked":
        state = replace(_asked(state, line, ["promotion"]), stage="approval")
    elif kind == "approval_answered":
        state = _answered(state, "bake" if line["decision"] == "promote" else state.stage)
    elif kind == "ended":
        # The end of a whole release is the line of its own record, which follows.
        is_whole = state.kind == "release"
        state = _answered(state, state.stage) if is_whole else _ended(state, line, at)
    return state


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _going_on(state: ReleaseState) -> ReleaseState:
    if state.status != ReleaseStatus.PAUSED:
        return state
    return replace(state, status=ReleaseStatus.RUNNING, outcome=None, reason=None, ended_at=None)


def _asked(state: ReleaseState, line: Mapping[str, Any], asks: list[str]) -> ReleaseState:
    name, known = line.get("question") or "promotion", state.question or {}
    question = {
        "id": name,
        "asks": asks,
        "until": line.get("until"),
        # Asked again by the next run, it keeps its answer.
        "answer": known.get("answer") if known.get("id") == name else None,
    }
    return replace(state, status=ReleaseStatus.WAITING, question=question)


def _answered(state: ReleaseState, stage: str) -> ReleaseState:
    is_waiting = state.status == ReleaseStatus.WAITING
    status = ReleaseStatus.RUNNING if is_waiting else state.status
    return replace(state, status=status, stage=stage, question=None)


def _ended(state: ReleaseState, line: Mapping[str, Any], at: datetime) -> ReleaseState:
    outcome, is_open = line.get("outcome"), line.get("outcome") in _OPEN_ENDS
    return replace(
        state,
        status=ReleaseStatus.PAUSED if is_open else ReleaseStatus.ENDED,
        stage=state.stage if is_open else "ended",
        outcome=outcome,
        reason=line.get("reason"),
        question=None,
        ended_at=at,
    )


def reason_of(look: Mapping[str, Any]) -> str:
    """Why a look decided as it did; of one that holds, the first of the reasons that it names."""
    reasons = look.get("reasons")
    holds = look["verdict"] == "hold" and look["reason"] == "none"
    if holds and isinstance(reasons, list) and reasons:
        return str(cast("list[Any]", reasons)[0])
    return look["reason"]


def point_of(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """A look in short, for charts; None for any other line."""
    if line["kind"] != "look":
        return None
    return {
        **{name: line[name] for name in ("number", "at", "weight", "phase", "verdict")},
        "reason": reason_of(line),
        "gates": {
            gate["name"]: [
                _of_limit(gate["log_e_ok"], gate["log_e_ok_limit"]),
                _of_limit(gate["log_e_harm"], gate["log_e_harm_limit"]),
            ]
            for gate in line["gates"]
            if gate["log_e_ok"] is not None or gate["log_e_harm"] is not None
        },
    }


def _of_limit(value: float | None, limit: float | None) -> float | None:
    return None if value is None or not limit else round(value / limit, 4)
