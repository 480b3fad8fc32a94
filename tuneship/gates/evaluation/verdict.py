"""The verdict of an evaluation: counts of two models on the same examples in, pass, reject or hold out. Pure.

A candidate that is not worse is rejected with at most 5 %, however often one looks: .01 early, .02 at the end over all
examples, .02 over all slices; each is divided among the gating graders. `docs/evaluation.md` has formulas and table.
The statistics are in `paired.py`. Next: `evaluation_words.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from pydantic import TypeAdapter

from tuneship.gates.evaluation.paired import (
    ClusterSums,
    Estimate,
    PairedCounts,
    PairedTest,
    compare,
    holm,
    log_e_worse,
    wilson,
)

# It grows when the same counts may give another verdict or number.
RULE_VERSION: Final = "1"
# Examples between two looks.
LOOK_EXAMPLES = 25
MAX_GATING = 4
# The shares of the 5 % with which a candidate that is not worse is rejected.
EARLY, WORSE, WORSE_IN_SLICE = 0.01, 0.02, 0.02
# Fewer decide about nothing.
MIN_EXAMPLES, MIN_CLUSTERS, MIN_CLUSTERS_OF_SLICE = 100, 50, 30
# The largest shares at which the rest still stands for all.
MAX_FAILED, MAX_LEAKED, MAX_TIMED_OUT = 0.02, 0.05, 0.02

EvaluationVerdict = Literal["pass", "reject", "hold"]
EvaluationReason = Literal[
    "worse",
    "worse_in_slice",
    "below_min_score",
    "grader_failed",
    "too_few_examples",
    "failed_answers",
    "leaked_examples",
    "no_right_answer",
    "too_few_clusters",
    "inconclusive",
]
SliceVerdict = Literal["no_harm_shown", "reject", "not_tested"]


@dataclass(frozen=True)
class EvaluationRules:
    """The limits of an evaluation, and the names of the graders that decide."""

    gating: tuple[str, ...]
    margin: float = 0.03
    min_score: float | None = None
    slice_margin: float = 0.1
    min_slice: int = 30
    stop_early: bool = True
    # Without a baseline there are scores, and `min_score` alone decides.
    has_baseline: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that no evaluation may have."""
        if not 1 <= len(self.gating) <= MAX_GATING or len(set(self.gating)) < len(self.gating):
            raise ValueError(f"gating must have 1 to {MAX_GATING} different names")
        if not 0.0 < self.margin <= 0.1:
            raise ValueError("margin must be above 0 and at most 0.1")
        if not self.margin <= self.slice_margin <= 0.5:
            raise ValueError("slice_margin must be from margin to 0.5")
        if self.min_score is not None and not 0.0 <= self.min_score <= 1.0:
            raise ValueError("min_score must be from 0 to 1")
        if self.min_slice < 1:
            raise ValueError("min_slice must be at least 1")


@dataclass(frozen=True)
class GraderCounts:
    """The counts of a grader over all examples; without a baseline, `both_right` are the candidate's right answers."""

    grader: str
    counts: PairedCounts
    # Examples that scored 0 because the grader ran out of time.
    timed_out: int = 0
    clusters: ClusterSums | None = None


@dataclass(frozen=True)
class SliceCounts:
    """The counts of a gating grader over the examples of one slice."""

    field: str
    value: str
    grader: str
    counts: PairedCounts
    clusters: ClusterSums | None = None


@dataclass(frozen=True)
class EvaluationCounts:
    """Everything that a verdict depends on, beside the rules. Graders that do not decide may be among them."""

    graders: tuple[GraderCounts, ...]
    slices: tuple[SliceCounts, ...] = ()
    failed: int = 0
    leaked: int = 0
    too_long: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for counts that contradict each other."""
        if not self.graders or len({one.counts.examples for one in self.graders}) > 1:
            raise ValueError("all graders must have scored the same examples")
        if any(one.counts.examples > self.scored for one in self.slices):
            raise ValueError("a slice has more examples than the whole")
        if min(self.failed, self.leaked, self.too_long) < 0:
            raise ValueError("counts must not be below 0")

    @property
    def scored(self) -> int:
        """The examples that every grader scored."""
        return self.graders[0].counts.examples

    @property
    def selected(self) -> int:
        """All examples that were to be scored."""
        return self.scored + self.failed + self.leaked + self.too_long


@dataclass(frozen=True)
class GraderResult:
    """The scores of a grader with 95 % intervals, and the comparison; `verdict` is null unless it decides."""

    grader: str
    counts: PairedCounts
    candidate: Estimate
    baseline: Estimate | None = None
    # With its 90 % interval.
    difference: Estimate | None = None
    p_worse: float | None = None
    # The natural logarithm of E; without clusters.
    log_e: float | None = None
    # While it holds: so many would decide about an equal candidate.
    examples_needed: int | None = None
    verdict: EvaluationVerdict | None = None


@dataclass(frozen=True)
class SliceResult:
    """The comparison on one slice."""

    field: str
    value: str
    grader: str
    counts: PairedCounts
    difference: Estimate | None
    p_worse: float | None
    verdict: SliceVerdict


@dataclass(frozen=True)
class EvaluationResult:
    """The verdict with all that it was made from; null where there was nothing to decide."""

    verdict: EvaluationVerdict | None
    reason: EvaluationReason | None
    # The grader that the reason is about.
    grader: str | None
    graders: tuple[GraderResult, ...]
    slices: tuple[SliceResult, ...]
    examples: EvaluationCounts
    rules: EvaluationRules
    stopped_early: bool = False


@dataclass(frozen=True)
class EvaluationRecord:
    """The part of a result that is stored: `replay` makes the rest again."""

    rules: EvaluationRules
    examples: EvaluationCounts
    stopped_early: bool
    rule_version: str = RULE_VERSION


_RECORD: TypeAdapter[EvaluationRecord] = TypeAdapter(EvaluationRecord)


def record_of(result: EvaluationResult) -> str:
    """The record of a result as one line of JSON."""
    record = EvaluationRecord(result.rules, result.examples, result.stopped_early)
    return _RECORD.dump_json(record).decode()


def replay(record: str) -> EvaluationResult:
    """Decide a stored record again. Raises ValueError for one of a rule that this release does not know."""
    read = _RECORD.validate_json(record)
    if read.rule_version != RULE_VERSION:
        raise ValueError(f"this release cannot judge by rule version {read.rule_version!r}")
    found = (look if read.stopped_early else judge)(read.examples, read.rules)
    if found is None:
        raise ValueError("the record says that a look decided, and none does")
    return found


def look(examples: EvaluationCounts, rules: EvaluationRules) -> EvaluationResult | None:
    """Decide before the end, after every `LOOK_EXAMPLES` examples: reject what is surely worse; None goes on."""
    gating = _gating(examples, rules)
    worse = _surely_worse(gating, rules)
    if worse is None or _first(gating, _has_timed_out):
        return None
    graders = _results(examples, rules)
    # Slices are tested once, at the end.
    slices = tuple(_not_tested(one) for one in examples.slices)
    return EvaluationResult(
        "reject", "worse", worse, graders, slices, examples, rules, stopped_early=True
    )


def judge(examples: EvaluationCounts, rules: EvaluationRules) -> EvaluationResult:
    """Decide at the end."""
    graders = _results(examples, rules)
    slices = _slices(examples, rules)
    found = EvaluationResult(None, None, None, graders, slices, examples, rules)
    if not rules.has_baseline and rules.min_score is None:
        return found
    for reason, verdict, names in _CHECKS:
        grader = names(found)
        if grader is not None:
            return replace(found, verdict=verdict, reason=reason, grader=grader or None)
    return replace(found, verdict="pass")


def _gating(examples: EvaluationCounts, rules: EvaluationRules) -> list[GraderCounts]:
    """The counts of the graders that decide. Raises ValueError for one that has none."""
    counts = {one.grader: one for one in examples.graders}
    missing = [name for name in rules.gating if name not in counts]
    if missing or len(counts) < len(examples.graders):
        raise ValueError("each gating grader must have counts, and each name one grader")
    return [counts[name] for name in rules.gating]


def _first(graders: Sequence[GraderCounts], holds: Callable[[GraderCounts], bool]) -> str | None:
    return next((one.grader for one in graders if holds(one)), None)


def _has_timed_out(one: GraderCounts) -> bool:
    return one.timed_out > MAX_TIMED_OUT * one.counts.examples


def _surely_worse(gating: Sequence[GraderCounts], rules: EvaluationRules) -> str | None:
    """The first gating grader proven worse at any look; clustered ones are skipped: the test needs independence."""
    if not (rules.stop_early and rules.has_baseline):
        return None
    limit = math.log(len(gating) / EARLY)
    independent = [one for one in gating if one.clusters is None]
    return _first(independent, lambda one: log_e_worse(one.counts, rules.margin) >= limit)


def _results(examples: EvaluationCounts, rules: EvaluationRules) -> tuple[GraderResult, ...]:
    worse = _surely_worse(_gating(examples, rules), rules)
    results = (_result(one, rules) for one in examples.graders)
    return tuple(
        replace(one, verdict="reject", examples_needed=None) if one.grader == worse else one
        for one in results
    )


def _result(one: GraderCounts, rules: EvaluationRules) -> GraderResult:
    counts, n = one.counts, one.counts.examples
    candidate = wilson(counts.wins + counts.both_right, n)
    if not rules.has_baseline:
        return GraderResult(one.grader, counts, candidate)
    baseline = wilson(counts.losses + counts.both_right, n)
    found = GraderResult(one.grader, counts, candidate, baseline)
    if one.clusters is None:
        found = replace(found, log_e=log_e_worse(counts, rules.margin))
    elif one.clusters.clusters < MIN_CLUSTERS:
        return replace(found, verdict="hold" if one.grader in rules.gating else None)
    test = compare(counts, rules.margin, one.clusters)
    found = replace(found, difference=test.difference, p_worse=test.p_worse)
    if one.grader not in rules.gating:
        return found
    verdict = _verdict(test, counts, rules)
    # More would decide about an equal candidate, not about one that is surely worse.
    undecided = verdict == "hold" and not _is_significant(test, rules) and test.needed > n
    return replace(found, verdict=verdict, examples_needed=test.needed if undecided else None)


def _verdict(test: PairedTest, counts: PairedCounts, rules: EvaluationRules) -> EvaluationVerdict:
    # By significance alone, a large set would reject what the margin allows.
    if _is_significant(test, rules) and -counts.difference > rules.margin:
        return "reject"
    return "pass" if test.is_within_margin else "hold"


def _is_significant(test: PairedTest, rules: EvaluationRules) -> bool:
    return test.p_worse <= WORSE / len(rules.gating)


def _slices(examples: EvaluationCounts, rules: EvaluationRules) -> tuple[SliceResult, ...]:
    """The results of all slices in their order; Holm's procedure runs over the tested ones of each grader."""
    found = [_not_tested(one) for one in examples.slices]
    for grader in rules.gating if rules.has_baseline else ():
        numbers = [
            number
            for number, one in enumerate(examples.slices)
            if one.grader == grader and _can_be_tested(one, rules)
        ]
        tests = [
            compare(one.counts, rules.slice_margin, one.clusters)
            for one in (examples.slices[number] for number in numbers)
        ]
        level = WORSE_IN_SLICE / len(rules.gating)
        significant = holm([test.p_worse for test in tests], level)
        for number, test, is_significant in zip(numbers, tests, significant, strict=True):
            loss = -examples.slices[number].counts.difference
            verdict: SliceVerdict = (
                "reject" if is_significant and loss > rules.slice_margin else "no_harm_shown"
            )
            found[number] = replace(
                found[number], difference=test.difference, p_worse=test.p_worse, verdict=verdict
            )
    return tuple(found)


def _can_be_tested(one: SliceCounts, rules: EvaluationRules) -> bool:
    # It looks at sizes alone, so nothing is picked by its outcome.
    enough = one.clusters is None or one.clusters.clusters >= MIN_CLUSTERS_OF_SLICE
    return enough and one.counts.examples >= rules.min_slice


def _not_tested(one: SliceCounts) -> SliceResult:
    return SliceResult(one.field, one.value, one.grader, one.counts, None, None, "not_tested")


# The checks return the grader that they are about, "" where they are about none, None where all is well.


def _grader_failed(found: EvaluationResult) -> str | None:
    return _first(_gating(found.examples, found.rules), _has_timed_out)


def _worse(found: EvaluationResult) -> str | None:
    return next((one.grader for one in _deciding(found) if one.verdict == "reject"), None)


def _worse_in_slice(found: EvaluationResult) -> str | None:
    worse = {one.grader for one in found.slices if one.verdict == "reject"}
    return next((name for name in found.rules.gating if name in worse), None)


def _below_min_score(found: EvaluationResult) -> str | None:
    least = found.rules.min_score
    if least is None or not found.examples.scored:
        return None
    low = (one.grader for one in _deciding(found) if one.candidate.value < least)
    return next(low, None)


def _too_few_examples(found: EvaluationResult) -> str | None:
    return "" if found.examples.scored < MIN_EXAMPLES else None


def _failed_answers(found: EvaluationResult) -> str | None:
    failed = found.examples.failed
    return "" if failed > MAX_FAILED * (found.examples.scored + failed) else None


def _leaked_examples(found: EvaluationResult) -> str | None:
    examples = found.examples
    return "" if examples.leaked > MAX_LEAKED * examples.selected else None


def _no_right_answer(found: EvaluationResult) -> str | None:
    """Such a grader would pass any candidate: the two models never differ."""
    scores = ((one.grader, one.candidate, one.baseline) for one in _deciding(found))
    none_right = (
        grader
        for grader, candidate, baseline in scores
        if candidate.value == 0.0 and (baseline is None or baseline.value == 0.0)
    )
    return next(none_right, None)


def _too_few_clusters(found: EvaluationResult) -> str | None:
    def has_too_few(one: GraderCounts) -> bool:
        return one.clusters is not None and one.clusters.clusters < MIN_CLUSTERS

    return _first(_gating(found.examples, found.rules), has_too_few)


def _inconclusive(found: EvaluationResult) -> str | None:
    return next((one.grader for one in _deciding(found) if one.verdict == "hold"), None)


def _deciding(found: EvaluationResult) -> list[GraderResult]:
    by_name = {one.grader: one for one in found.graders}
    return [by_name[name] for name in found.rules.gating]


# In this order: a grader that times out makes all scores doubtful; apart from that, harm that is shown beats every
# reason to hold.
_CHECKS: Sequence[
    tuple[EvaluationReason, EvaluationVerdict, Callable[[EvaluationResult], str | None]]
] = (
    ("grader_failed", "hold", _grader_failed),
    ("worse", "reject", _worse),
    ("worse_in_slice", "reject", _worse_in_slice),
    ("below_min_score", "reject", _below_min_score),
    ("too_few_examples", "hold", _too_few_examples),
    ("failed_answers", "hold", _failed_answers),
    ("leaked_examples", "hold", _leaked_examples),
    ("no_right_answer", "hold", _no_right_answer),
    ("too_few_clusters", "hold", _too_few_clusters),
    ("inconclusive", "hold", _inconclusive),
)
