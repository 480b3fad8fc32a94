"""Folds the lines of a release's records, and the progress of its tasks, into what a picture of it shows. Pure.

It reads what `flows/shared/release_lines.py` lets out: ids, numbers and words of tuneship, never a text of a person.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from tuneship.gates.reports.words import in_words
from tuneship.prefect.progress import TaskProgress

STAGES = ("validate", "upload", "combine", "tune", "deploy", "evaluate", "shift", "promote")
StageState = Literal["waiting", "running", "done", "skipped", "stopped"]
# Gates that do not test are not shown.
TESTING = ("proven", "open", "hold", "harm")
STAGE_OF_WORK = {
    "validate": "validate",
    "upload": "upload",
    "combine": "combine",
    "training": "tune",
    "smoke-test": "evaluate",
    "exact-match": "evaluate",
    "evaluation": "evaluate",
}
# The stage that is at work once a line of this kind was written, of a release and of a rollout.
_STAGE_AFTER = {
    "data": "tune",
    "job": "tune",
    "training_gates": "deploy",
    "baseline": "deploy",
    "candidate": "deploy",
    "smoke_test": "evaluate",
    "evaluation": "evaluate",
    "rollout": "shift",
}
_STAGE_OF_PHASE = {"bake": "promote", "settle": "promote"}
_REFUSING = ("reject", "hold")


@dataclass(frozen=True)
class RolloutGate:
    """A gate of a rollout at its last look. `evidence`: how far it is on the way to its state, from 0 to 1."""

    name: str
    state: str
    evidence: float


@dataclass
class PictureState:
    """The state of a release as far as it is known."""

    stages: Sequence[str] = STAGES
    states: dict[str, StageState] = field(default_factory=dict[str, StageState])
    examples: tuple[int, int] | None = None
    # By the number of steps that are done.
    losses: dict[float, float] = field(default_factory=dict[float, float])
    validation_loss: float | None = None
    # Of the training, the smoke test and the evaluation: the state of each by its name.
    checks: dict[str, str] = field(default_factory=dict[str, str])
    weight: int | None = None
    gates: list[RolloutGate] = field(default_factory=list[RolloutGate])
    look: str = ""
    # Minutes that the rollout was forecast to last, up to the bake.
    forecast_minutes: float | None = None
    asked_until: str | None = None
    outcome: str | None = None

    def __post_init__(self) -> None:
        """Begin with every stage waiting."""
        self.states = dict.fromkeys(self.stages, "waiting")

    @property
    def running(self) -> str | None:
        """The stage that is at work."""
        return next((name for name, state in self.states.items() if state == "running"), None)

    def progress(self, now: TaskProgress) -> None:
        """Take the progress of a task."""
        if (stage := STAGE_OF_WORK.get(now.work)) is not None:
            self._reach(stage)
        loss = now.measures.get("training")
        if loss is not None and math.isfinite(loss):
            self.losses[now.done] = loss
        self.validation_loss = now.measures.get("validation", self.validation_loss)

    def line(self, fact: Mapping[str, Any], is_release: bool) -> None:
        """Take a line of a release's own record, or of a rollout's."""
        kind = str(fact.get("kind"))
        if is_release:
            self._line_of_release(kind, fact)
        else:
            self._line_of_rollout(kind, fact)

    def _line_of_release(self, kind: str, fact: Mapping[str, Any]) -> None:
        if kind == "begun":  # a run that goes on after a crash looks at its data again
            self.states = dict.fromkeys(self.stages, "waiting")
            self.asked_until = None
        elif kind == "data":
            self.examples = (fact["training_examples"], fact["validation_examples"])
        elif kind == "release" and self.examples is None:
            # A model that exists is released: nothing is trained.
            for name in ("validate", "upload", "combine", "tune"):
                self._set(name, "skipped")
        elif kind == "question":
            self.asked_until = fact["until"]
        elif kind == "held_gates":
            self.asked_until = None
        elif kind == "ended":
            self._end(fact["outcome"])
        gates: Sequence[Mapping[str, Any]] = fact.get("gates") or ()
        # A plan repeats the gates before it.
        if kind in ("training_gates", "smoke_test", "evaluation"):
            self.checks |= {str(gate["name"]): str(gate["state"]) for gate in gates}
        refused = kind == "training_gates" and fact.get("decision") != "pass"
        if (stage := _STAGE_AFTER.get(kind)) is not None and not refused:
            self._reach(stage)

    def _line_of_rollout(self, kind: str, fact: Mapping[str, Any]) -> None:
        if kind == "begun":
            self._reach("shift")
            names = [gate["name"] for gate in fact["gates"] if gate["state"] == "active"]
            self.gates = [RolloutGate(name, "open", 0.0) for name in names]
            forecast: Mapping[str, Any] = fact.get("forecast") or {}
            self.forecast_minutes = forecast.get("promote_minutes")
        elif kind == "split_confirmed":
            self.weight = fact["candidate_weight"]
        elif kind == "look":
            self._reach(_STAGE_OF_PHASE.get(fact["phase"], "shift"))
            self._look(fact)
        elif kind == "approval_asked":
            self.asked_until = fact.get("until")
        elif kind == "approval_answered":
            self.asked_until = None
        elif kind == "ended":
            self._end(fact["outcome"])

    def _look(self, fact: Mapping[str, Any]) -> None:
        reasons = (
            [fact["reason"], *fact["reasons"]] if fact["reason"] != "none" else fact["reasons"]
        )
        why = "; ".join(in_words(one).replace("`", "") for one in dict.fromkeys(reasons))
        self.look = f"check {fact['number']}: {fact['verdict']}" + (f", {why}" if why else "")
        # After a bake the candidate has all traffic, and nothing is compared.
        if fact["phase"] != "settle":
            self.gates = [
                RolloutGate(gate["name"], gate["state"], _evidence(gate))
                for gate in fact["gates"]
                if gate["state"] in TESTING
            ]

    def _end(self, outcome: str) -> None:
        self.outcome, self.asked_until = outcome, None
        if outcome == "promoted":
            for name in self.stages:
                if self.states[name] != "skipped":
                    self._set(name, "done")
        elif self.running is not None:
            self._set(self.running, "stopped")

    def _reach(self, stage: str) -> None:
        """Let a stage be at work, and those before it be done. A later one that is reached already stays."""
        if stage not in self.states or self.states[stage] != "waiting":
            return
        for name in self.stages[: self.stages.index(stage)]:
            if self.states[name] in ("waiting", "running"):
                self._set(name, "done")
        self._set(stage, "running")

    def _set(self, stage: str, state: StageState) -> None:
        if stage in self.states:
            self.states[stage] = state

    @property
    def refusing(self) -> str | None:
        """The gate before any traffic that refuses, or that nobody has overruled."""
        return next((name for name, state in self.checks.items() if state in _REFUSING), None)


def _evidence(gate: Mapping[str, Any]) -> float:
    """How far a gate is on the way to the proof, or from the first doubt to harm."""
    kind = "harm" if gate["state"] in ("harm", "hold") else "ok"
    now, limit = gate.get(f"log_e_{kind}"), gate.get(f"log_e_{kind}_limit")
    if gate["state"] in ("proven", "harm"):
        return 1.0
    return min(1.0, max(0.0, now / limit)) if now is not None and limit else 0.0


def time_of(moment: str) -> str:
    """A moment of a record as the clock of this machine shows it."""
    return f"{datetime.fromisoformat(moment).astimezone():%H:%M}"
