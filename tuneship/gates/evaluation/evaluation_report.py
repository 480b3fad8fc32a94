"""The report of an evaluation as it is shown: scores, intervals, verdicts, and one sentence. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from tuneship.contract.evaluations import GraderReport
from tuneship.gates.evaluation.evaluation_tally import EvaluationTally
from tuneship.gates.evaluation.evaluation_words import sentence
from tuneship.gates.evaluation.paired import Estimate, PairedCounts, mean_interval
from tuneship.gates.evaluation.verdict import EvaluationResult, GraderResult, SliceResult
from tuneship.gates.gate_result import GateResult

EVALUATION_GATE = "T12 evaluation"
# Tails of the intervals: 95 % for a score, 90 % for a difference.
OF_SCORES, OF_DIFFERENCES = 0.025, 0.05


def report_of(
    tally: EvaluationTally, found: EvaluationResult, *, has_ended: bool
) -> dict[str, Any]:
    """The report as JSON. While the evaluation runs, it has counts and scores and no verdict."""
    examples = tally.counts
    decided = decided_report(found)
    graders, slices, words = decided["graders"], decided["slices"], decided["sentence"]
    for name, scores in tally.graded.items():
        graders.append((_loss if name in tally.losses else _graded)(name, *scores))
    if not has_ended:
        for one in graders:
            one["verdict"] = None
        slices, words = [], None
    return {
        "examples": {
            "leaked": examples.leaked,
            "too_long": examples.too_long,
            "failed": examples.failed,
            "scored": examples.scored,
        },
        "graders": graders,
        "passed": {"all": tally.all_passed, "graders": dict(tally.passed)},
        "slices": slices,
        "sentence": words,
    }


def evaluation_gate(
    verdict: str | None, graders: Sequence[GraderReport], margin: float, words: str
) -> GateResult:
    """The gate: the difference of the first grader that decides, beside the margin."""
    deciding = next((one for one in graders if one.verdict is not None), None)
    difference = None if deciding is None else deciding.difference
    state = "pass" if verdict == "pass" else "reject" if verdict == "reject" else "hold"
    return GateResult(EVALUATION_GATE, state, difference, -margin, words)


def decided_report(found: EvaluationResult) -> dict[str, Any]:
    """The part of the report that follows from the result, which a record decides again: all but graded scores."""
    return {
        "graders": [_grader(one) for one in found.graders],
        "slices": [_slice(one) for one in found.slices],
        "sentence": sentence(found) if found.verdict is not None else None,
    }


def _grader(one: GraderResult) -> dict[str, Any]:
    return {
        "name": one.grader,
        "candidate": _score(one.candidate),
        "baseline": None if one.baseline is None else _score(one.baseline),
        **_paired(one.counts if one.baseline is not None else None, one.difference, one.p_worse),
        "examples_needed": one.examples_needed,
        "verdict": one.verdict,
    }


def _graded(name: str, candidate: list[float], baseline: list[float]) -> dict[str, Any]:
    """The report of a grader of shares, which decides nothing: means with the interval of Student's t."""
    made: dict[str, Any] = {"name": name, "verdict": None}
    made["candidate"] = _score(mean_interval(candidate, OF_SCORES, 0.0, 1.0))
    if not baseline:
        return made | {"baseline": None}
    differences = [one - other for one, other in zip(candidate, baseline, strict=True)]
    difference = mean_interval(differences, OF_DIFFERENCES, -1.0, 1.0)
    wins, losses = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    counts = PairedCounts(len(differences), wins, losses)
    made["baseline"] = _score(mean_interval(baseline, OF_SCORES, 0.0, 1.0))
    return made | _paired(counts, difference, None)


def _loss(name: str, candidate: list[float], baseline: list[float]) -> dict[str, Any]:
    """The report of a grader of losses, which decides nothing; a win is a lower loss. Of one example there is none."""
    made: dict[str, Any] = {"name": name, "measure": "loss", "verdict": None}
    made |= {"candidate": None, "baseline": None}
    if len(candidate) < 2:
        return made
    made["candidate"] = _score(mean_interval(candidate, OF_SCORES, 0.0, math.inf))
    if not baseline:
        return made
    differences = [one - other for one, other in zip(candidate, baseline, strict=True)]
    difference = mean_interval(differences, OF_DIFFERENCES, -math.inf, math.inf)
    wins, losses = sum(one < 0 for one in differences), sum(one > 0 for one in differences)
    made["baseline"] = _score(mean_interval(baseline, OF_SCORES, 0.0, math.inf))
    return made | _paired(PairedCounts(len(differences), wins, losses), difference, None)


def _slice(one: SliceResult) -> dict[str, Any]:
    return {
        "field": one.field,
        "value": one.value,
        "grader": one.grader,
        "examples": one.counts.examples,
        **_paired(one.counts, one.difference, one.p_worse),
        "verdict": one.verdict,
    }


def _score(one: Estimate) -> dict[str, float]:
    return {"score": one.value, "low": one.low, "high": one.high}


def _paired(
    counts: PairedCounts | None, difference: Estimate | None, p_worse: float | None
) -> dict[str, Any]:
    if counts is None:
        return {}
    made: dict[str, Any] = {"wins": counts.wins, "losses": counts.losses, "ties": counts.ties}
    if difference is not None:
        made |= {
            "difference": difference.value,
            "low": difference.low,
            "high": difference.high,
            "p_worse": p_worse,
        }
    return made
