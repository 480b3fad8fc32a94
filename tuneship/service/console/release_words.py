"""Releases in words: the sentence of a page, stages, gates, looks and the timeline. Pure.

The words of gates and reasons are those of the reports: `tuneship/gates/reports/words.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import Any, cast

from tuneship.contract.releases import Release
from tuneship.gates.record import Verdict
from tuneship.gates.reports.words import BAD, OUTCOMES, in_words
from tuneship.service.console.words import MISSING, count, percent
from tuneship.service.releases.release_state import reason_of

# Evidence beyond these is shown as less, or as more.
LEAST, TEN, MOST = log(0.1), log(10), log(1000)
STAGES: Mapping[str, str] = {
    "data": "Data",
    "training": "Training",
    "training_gates": "Training gates",
    "deployment": "Deployment",
    "smoke_test": "Smoke test",
    "evaluation": "Evaluation",
    "canary": "Canary",
    "approval": "Approval",
    "bake": "Bake",
    "ended": "Ended",
}
# What a release does at a stage at which no look has been made.
AT_WORK: Mapping[str, str] = {
    "data": "The data is being checked.",
    "training": "The new model is being trained.",
    "training_gates": "The training gates are deciding.",
    "deployment": "The new model is being deployed.",
    "smoke_test": "The new model answers its first prompts.",
    "evaluation": "Both models answer held-out examples.",
    "canary": "The shift of traffic begins.",
    "approval": "A person is asked.",
    "bake": "The new model is watched before it gets all traffic.",
}
GATES: Mapping[str, str] = {
    "error": "Failed requests",
    "typical": "Typical time",
    "slow": "Slow answers",
    "very_slow": "Very slow answers",
    "empty": "Empty answers",
    "short": "Short answers",
    "long": "Long answers",
    "length": "Answers cut off",
    "repetition": "Repetition",
    "invalid_json": "Answers that are not JSON",
    "abandoned": "Abandoned requests",
    "refused": "Refused requests",
}
VERDICTS: Mapping[str, str] = {
    Verdict.HOLD: "holding",
    Verdict.ADVANCE: "next step",
    Verdict.ASK: "asks a person",
    Verdict.PROMOTE: "promotes",
    Verdict.BAKED: "bake (soak) is over",
    Verdict.ROLLBACK: "rolls back",
    Verdict.PAUSE: "pauses",
    Verdict.ABORT: "stops",
}
# Reasons of a release that ended before any look, or without one.
_ENDS: Mapping[str, str] = {
    "training_gate": "a training gate refused it",
    "evaluation": "the answers to held-out examples are worse",
    "rolled_back_recently": "the same release was rolled back a short time ago",
    "stopped": "the run was stopped",
    "cancelled": "the run was cancelled",
    "failed": "the run failed",
    "abandoned": "the run died and was closed by the guard",
}


def gate_name(name: str) -> str:
    """A gate's name for people."""
    return GATES.get(name, name)


def gate_says(name: str) -> str:
    """The requests that a gate counts as bad."""
    return f"requests that {BAD[name]}" if name in BAD else ""


def stage_name(stage: str) -> str:
    """A stage's name for people."""
    return STAGES.get(stage, stage)


def evidence(log_e: float | None) -> str:
    """A strength of evidence, how many times more likely, from its natural logarithm."""
    if log_e is None:
        return MISSING
    if log_e < LEAST:
        return "< 0.1"
    return (
        "> 1,000" if log_e > MOST else f"{exp(log_e):.2g}" if log_e < TEN else f"{exp(log_e):,.0f}"
    )


def limits_in_words(gate: Mapping[str, Any]) -> str:
    """A gate's limits: what is allowed, and what proves it."""
    ratio, harm, proven = gate["ratio_limit"], gate["harm_limit"], gate["ok_limit"]
    allowed = [f"{ratio:g} x the baseline's"] if ratio is not None else []
    allowed += [percent(harm)] if harm is not None else []
    texts = [f"allowed: {' or '.join(allowed)}"] if allowed else []
    return "; ".join([*texts, *([f"proven below {percent(proven)}"] if proven is not None else [])])


def reason_in_words(reason: str | None) -> str:
    """Why a look holds or a release ended; empty for none."""
    if reason in (None, "", "none"):
        return ""
    kind, _, gate = reason.partition(":")
    named = f"{kind}:{gate_name(gate)}" if gate in GATES else reason
    return _ENDS.get(reason) or in_words(named).replace("`", "“", 1).replace("`", "”")


def sentence(release: Release, look: Mapping[str, Any] | None) -> tuple[str, str]:
    """The two parts of a release's sentence: the state of things, and its meaning."""
    if release.status == "waiting" and release.question is not None:
        return _asked(release)
    if release.outcome is not None and release.status in ("paused", "ended"):
        reason = reason_in_words(release.reason)
        text = OUTCOMES.get(release.outcome, "It has ended.")
        return text, f"Why: {reason}." if reason else ""
    if look is None or release.stage not in ("canary", "approval", "bake"):
        return AT_WORK.get(release.stage, "It is running."), ""
    verdict = VERDICTS.get(look["verdict"], look["verdict"])
    reason = reason_in_words(reason_of(look))
    says = f"{verdict.capitalize()} at {look['weight']} %"
    return f"{says}: {reason}." if reason else f"{says}.", _proven(look)


def _asked(release: Release) -> tuple[str, str]:
    question = release.question
    if question is None:
        return "", ""
    if question.answer is not None:
        return (
            f"{question.answer.name} has answered: {question.answer.decision}.",
            "The pipeline uses the answer at its next check; the outcome will be shown here.",
        )
    if question.asks == ["promotion"]:
        return (
            "All gates are proven, and a person has to decide.",
            "Checks continue: harm rolls it back, whatever the answer is.",
        )
    gates = ", ".join(map(gate_name, question.asks))
    return f"A person has to decide, because of {gates}.", "No traffic has moved yet."


def tests(gate: Mapping[str, Any]) -> bool:
    """Whether a gate is switched on and has what it needs."""
    return gate["state"] not in ("disabled", "not_available")


def _proven(look: Mapping[str, Any]) -> str:
    gates = [gate for gate in look["gates"] if tests(gate)]
    if not gates:
        return ""
    proven = [gate for gate in gates if gate["state"] == "proven"]
    text = (
        f"{len(proven)} of {count(len(gates), 'gate')} {'is' if len(gates) == 1 else 'are'} proven."
    )
    needed = [gate for gate in gates if gate["requests_to_proof"]]
    if needed:
        most = max(needed, key=lambda gate: gate["requests_to_proof"])
        name, more = gate_name(most["name"]), most["requests_to_proof"]
        text += f" “{name}” needs about {more:,} more requests."
    return text


def line_in_words(line: Mapping[str, Any]) -> str:
    """A stored line in words; empty for one that says nothing to people."""
    says = _LINES.get(line["kind"], "")
    return says if isinstance(says, str) else says(line)


def steps_of(plan: Mapping[str, Any]) -> list[int]:
    """The steps of a recorded plan; none where the traffic decides."""
    steps = plan.get("steps")
    if not isinstance(steps, list):
        return []
    return [one for one in cast("list[Any]", steps) if isinstance(one, int)]


def _begun(line: Mapping[str, Any]) -> str:
    if "plan" not in line:
        return "The run begins"
    steps = steps_of(line["plan"])
    return "The rollout begins" + (f": {', '.join(map(str, steps))} %" if steps else "")


def _ended(line: Mapping[str, Any]) -> str:
    reason = reason_in_words(line.get("reason"))
    outcome = str(line.get("outcome", "")).replace("_", " ")
    return f"Ended: {outcome}" + (f", {reason}" if reason else "")


def _answer(line: Mapping[str, Any]) -> str:
    if line.get("decision") == "timeout":
        return "Nobody answered in time"
    comment = f" ({line['comment']})" if line.get("comment") else ""
    person = line.get("person")
    by = f", signed in at {person['issuer']} as {person['subject']}," if person else ""
    approver = line.get("approver") or "Somebody"
    return f"{approver}{by} decided: {line.get('decision', 'no data')}{comment}"


def gates_note(line: Mapping[str, Any]) -> str:
    """How many gates of a stage passed, or what was decided."""
    gates: Sequence[Mapping[str, Any]] = line.get("gates", [])
    decided = str(line.get("decision") or line.get("verdict") or "")
    if not gates:
        return decided or "done"
    passed = sum(gate["state"] not in ("reject", "hold") for gate in gates)
    return f"{passed} of {len(gates)} pass"


# What a line of a record says; other lines are not shown.
_LINES: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "begun": _begun,
    "data": lambda line: f"The data is ready: {count(line.get('training_examples', 0), 'example')}",
    "job": "The training begins",
    "trained": "The training is done",
    "training_gates": lambda line: f"Training gates: {gates_note(line)}",
    "question": lambda line: f"A person is asked about {', '.join(line.get('asks', []))}",
    "held_gates": _answer,
    "baseline": "The baseline is being deployed",
    "candidate": "The candidate is being deployed",
    "smoke_test": lambda line: f"Smoke test: {gates_note(line)}",
    "evaluation": lambda line: f"Evaluation: {gates_note(line)}",
    "rollout": "The shift of traffic is planned",
    "split_confirmed": lambda line: (
        f"The candidate gets {line['candidate_weight']} % of the traffic"
    ),
    "approval_asked": "A person is asked: promote or roll back",
    "approval_answered": _answer,
    "resumed": lambda line: (
        f"Resumed by {line['by']}" if line.get("by") else "The rollout continues"
    ),
    "ended": _ended,
    "model_card": "The model card is written",
}
# What templates write as `{{ gate.name | gate_name }}`.
FILTERS = (evidence, gate_name, gate_says, limits_in_words, stage_name)
