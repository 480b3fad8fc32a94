"""Grades the answers to examples, and makes the rows that are stored: numbers, and the values of slices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuneship.contract.evaluations import EvaluationSettings
from tuneship.evaluation.graders import GivenAnswer, ReadyGrader, read_graders
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.slices import read_clusters, read_slices


@dataclass(frozen=True)
class HeldOutExample:
    """A selected example, with its line in the dataset, from 1."""

    line: int
    item: EvaluationItem
    slices: Mapping[str, str]
    cluster: int | None = None


def held_out_examples(
    picked: Sequence[tuple[int, EvaluationItem]], settings: EvaluationSettings
) -> list[HeldOutExample]:
    """The examples of these lines, with their slices and clusters. Raises `SliceRefused`."""
    metadata = [item.metadata for _, item in picked]
    slices = read_slices(metadata, settings.slice_by)
    clusters = read_clusters(metadata, settings.cluster_by) if settings.cluster_by else None
    return [
        HeldOutExample(line, item, slices[number], None if clusters is None else clusters[number])
        for number, (line, item) in enumerate(picked)
    ]


@dataclass(frozen=True)
class NoAnswer:
    """Why an example has no answer: the code of the error, and its status, 0 where nobody was asked."""

    code: str
    status: int


Answer = GivenAnswer | NoAnswer
# Scores of one example, as they are stored.
Stored = dict[str, Any]
# Statuses by which a deployment refuses a prompt, e.g. one that is too long for its context.
REFUSED_PROMPT = frozenset({400, 413, 422})
# Statuses after which a deployment answers nothing more of this caller.
GONE = frozenset({401, 403, 404, 409})


@dataclass(eq=False)
class DeploymentGone(Exception):
    """A deployment refuses all requests; the code of its error says why."""

    code: str


class Scoring:
    """The graders of an evaluation, ready to score answers."""

    def __init__(self, settings: EvaluationSettings) -> None:
        """Compile the graders. Raises `GraderRefused`."""
        self._graders: Sequence[ReadyGrader] = read_graders(settings.graders)
        self._deciding = settings.deciding

    def score(
        self,
        example: HeldOutExample,
        candidate: Answer,
        baseline: Answer | None,
        known_baseline: Mapping[str, float] | None = None,
    ) -> Stored:
        """Score the answers to one example. `known_baseline`: scores of an earlier evaluation. Raises `DeploymentGone`.

        A prompt that only one model refuses counts 0 for that model.
        """
        answers = [candidate] if baseline is None else [candidate, baseline]
        missing = [one for one in answers if isinstance(one, NoAnswer)]
        gone = next((one for one in missing if one.status in GONE), None)
        if gone is not None:
            raise DeploymentGone(gone.code)
        if any(one.status not in REFUSED_PROMPT for one in missing):
            return unscored(example, "failed")
        if missing and len(missing) == len(answers) and known_baseline is None:
            return unscored(example, "too_long")
        timed_out: set[str] = set()
        scores = [self._scores(example, one, timed_out) for one in answers]
        of_baseline = scores[1] if baseline is not None else known_baseline
        made = _about(example) | {"candidate": scores[0]}
        made["outcome"] = "scored"
        if of_baseline is not None:
            first = self._deciding[0]
            won = scores[0][first] - of_baseline[first]
            made["outcome"] = "win" if won > 0 else "loss" if won < 0 else "tie"
            made["baseline"] = of_baseline
        if timed_out:
            made["timed_out"] = sorted(timed_out)
        return made

    def _scores(
        self, example: HeldOutExample, answer: Answer, timed_out: set[str]
    ) -> dict[str, float]:
        if isinstance(answer, NoAnswer):
            return {one.name: 0.0 for one in self._graders}
        scores = {one.name: one.score(example.item, answer) for one in self._graders}
        timed_out.update(name for name, score in scores.items() if score.timed_out)
        return {name: score.value for name, score in scores.items()}


def unscored(example: HeldOutExample, why: Literal["failed", "leaked", "too_long"]) -> Stored:
    """The row of an example that has no scores."""
    return _about(example) | {"outcome": why}


def _about(example: HeldOutExample) -> Stored:
    made: Stored = {"line": example.line, "slices": dict(example.slices)}
    return made if example.cluster is None else made | {"cluster": example.cluster}
