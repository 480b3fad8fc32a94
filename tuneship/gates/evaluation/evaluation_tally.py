"""Adds up the scores of examples to the counts that an evaluation is decided by. Pure.

A service and a pipeline that asks the deployments itself count by the same code. Next: `verdict.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tuneship.contract.evaluations import EvaluationSettings
from tuneship.gates.evaluation.paired import ClusterSums, PairedCounts
from tuneship.gates.evaluation.verdict import (
    EvaluationCounts,
    EvaluationRules,
    GraderCounts,
    SliceCounts,
)

Unscored = Literal["failed", "leaked", "too_long"]
UNSCORED: tuple[Unscored, ...] = get_args(Unscored)


@dataclass(frozen=True)
class ScoredExample:
    """The scores of one example by grader, or why it has none. A loss is missing where a model refused the prompt."""

    candidate: Mapping[str, float] = field(default_factory=dict[str, float])
    # Null where there is no baseline.
    baseline: Mapping[str, float] | None = None
    slices: Mapping[str, str] = field(default_factory=dict[str, str])
    cluster: int | None = None
    # Graders that ran out of time.
    timed_out: Sequence[str] = ()
    unscored: Unscored | None = None


class _Outcomes:
    """The outcomes of one grader over some examples, by cluster where there are clusters."""

    def __init__(self) -> None:
        self.examples = self.wins = self.losses = self.both_right = self.timed_out = 0
        # Sizes, and wins minus losses.
        self._clusters: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, grader: str, example: ScoredExample) -> None:
        candidate = example.candidate[grader] == 1.0
        # Alone, a candidate is counted as if the baseline had the same answers right.
        baseline = candidate if example.baseline is None else example.baseline[grader] == 1.0
        self.examples += 1
        self.wins += candidate and not baseline
        self.losses += baseline and not candidate
        self.both_right += candidate and baseline
        self.timed_out += grader in example.timed_out
        if example.cluster is not None:
            sums = self._clusters[example.cluster]
            sums[0] += 1
            sums[1] += candidate - baseline

    @property
    def counts(self) -> PairedCounts:
        return PairedCounts(self.examples, self.wins, self.losses, self.both_right)

    @property
    def clusters(self) -> ClusterSums | None:
        if not self._clusters:
            return None
        return ClusterSums.of((size, difference) for size, difference in self._clusters.values())


class EvaluationTally:
    """The counts of the examples that were added so far."""

    def __init__(
        self,
        binary: Sequence[str],
        gating: Sequence[str],
        graded: Sequence[str],
        losses: Sequence[str] = (),
    ) -> None:
        """`binary`, `graded` and `losses` name the graders by their scores: 0 or 1, from 0 to 1, and losses in nats."""
        self._graders = {name: _Outcomes() for name in binary}
        self._gating = gating
        self._slices: dict[tuple[str, str, str], _Outcomes] = {}
        self._unscored = Counter[str]()
        # Scores of each model, and their differences, of graders that do not decide.
        self.graded = {name: (list[float](), list[float]()) for name in (*graded, *losses)}
        self.losses = frozenset(losses)
        self.scored = 0
        # Examples in which a grader gives the candidate 1, and those in which all of them do.
        self.passed = Counter[str]()
        self.all_passed = 0

    def add(self, example: ScoredExample) -> None:
        """Count one more example."""
        if example.unscored is not None:
            self._unscored[example.unscored] += 1
            return
        self.scored += 1
        passed = [name for name, score in example.candidate.items() if score == 1.0]
        self.passed.update(passed)
        self.all_passed += len(passed) == len(example.candidate)
        for name, outcomes in self._graders.items():
            outcomes.add(name, example)
        for name, (candidate, baseline) in self.graded.items():
            beside = example.candidate if example.baseline is None else example.baseline
            # Means of different examples would compare nothing.
            if name not in example.candidate or name not in beside:
                continue
            candidate.append(example.candidate[name])
            if example.baseline is not None:
                baseline.append(example.baseline[name])
        for slice_field, value in example.slices.items():
            for name in self._gating:
                key = (slice_field, value, name)
                self._slices.setdefault(key, _Outcomes()).add(name, example)

    @property
    def counts(self) -> EvaluationCounts:
        """The counts, with the slices in the order of their fields and values."""
        order = {name: number for number, name in enumerate(self._gating)}
        keys = sorted(self._slices, key=lambda key: (key[0], key[1], order[key[2]]))
        return EvaluationCounts(
            tuple(
                GraderCounts(name, one.counts, one.timed_out, one.clusters)
                for name, one in self._graders.items()
            ),
            tuple(
                SliceCounts(*key, self._slices[key].counts, self._slices[key].clusters)
                for key in keys
            ),
            failed=self._unscored["failed"],
            leaked=self._unscored["leaked"],
            too_long=self._unscored["too_long"],
        )


def rules_of(settings: EvaluationSettings, *, has_baseline: bool) -> EvaluationRules:
    """The part of the settings that the verdict depends on."""
    return EvaluationRules(
        settings.deciding,
        settings.margin,
        settings.min_score,
        settings.slice_margin,
        settings.min_slice,
        settings.stop_early,
        has_baseline,
    )


def tally_of(settings: EvaluationSettings, stored: Iterable[Mapping[str, Any]]) -> EvaluationTally:
    """A tally of the examples that are stored already."""
    losses = [one.name for one in settings.graders if one.type == "loss"]
    graded = [one.name for one in settings.graders if one.is_graded and one.type != "loss"]
    binary = [one.name for one in settings.graders if not one.is_graded]
    made = EvaluationTally(binary, settings.deciding, graded, losses)
    for one in stored:
        made.add(example_of(one))
    return made


def example_of(stored: Mapping[str, Any]) -> ScoredExample:
    """A stored example as it is counted."""
    outcome = stored["outcome"]
    if outcome in UNSCORED:
        return ScoredExample(unscored=outcome)
    return ScoredExample(
        stored["candidate"],
        stored.get("baseline"),
        stored["slices"],
        stored.get("cluster"),
        stored.get("timed_out", ()),
    )
