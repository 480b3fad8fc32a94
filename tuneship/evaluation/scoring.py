"""Grades the answers to examples, and makes the rows that are stored: numbers, and the values of slices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuneship.contract.evaluations import EvaluationSettings
from tuneship.evaluation.graders import AnswerScore, AnswerToScore, ReadyGrader, read_graders
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.likelihoods import Likelihood, check_choices, choice_score, choices_of
from tuneship.evaluation.slices import read_clusters, read_slices
from tuneship.evaluation.templates import check_texts


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
    """The examples of these lines, with their slices and clusters. Raises `MetadataRefused`."""
    items = [item for _, item in picked]
    check_choices(items, settings.graders)
    check_texts(items, settings.graders)
    metadata = [item.metadata for item in items]
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


# What a model is asked: None, to write its answer; a text, how likely it finds that as its answer.
Asked = str | None
Answer = AnswerToScore | Likelihood | NoAnswer
Answers = Mapping[Asked, Answer]
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
        self._written: Sequence[ReadyGrader] = read_graders(settings.graders)
        self._choices = [one.name for one in settings.graders if one.type == "choice"]
        self._losses = [one.name for one in settings.graders if one.type == "loss"]
        self._deciding = settings.deciding

    def asked(self, example: HeldOutExample) -> Sequence[Asked]:
        """The questions to each model about an example; where no grader reads a written answer, none is written."""
        references = [example.item.reference] if self._losses else []
        return list(dict.fromkeys([*self._needed(example), *references]))

    def _needed(self, example: HeldOutExample) -> Sequence[Asked]:
        """Those of the graders that must score each example; a loss may be missing."""
        made: list[Asked] = [None] if self._written else []
        return made + choices_of(example.item) if self._choices else made

    def score(
        self,
        example: HeldOutExample,
        candidate: Answers,
        baseline: Answers | None,
        known_baseline: Mapping[str, float] | None = None,
    ) -> Stored:
        """Score the answers to one example. `known_baseline`: scores of an earlier evaluation. Raises `DeploymentGone`.

        A prompt that only one model refuses counts 0 for that model, and leaves it without a loss.
        """
        models = [candidate] if baseline is None else [candidate, baseline]
        missing = [
            one for answers in models for one in answers.values() if isinstance(one, NoAnswer)
        ]
        gone = next((one for one in missing if one.status in GONE), None)
        if gone is not None:
            raise DeploymentGone(gone.code)
        if any(one.status not in REFUSED_PROMPT for one in missing):
            return unscored(example, "failed")
        if known_baseline is None and any(
            all(isinstance(answers[asked], NoAnswer) for answers in models)
            for asked in self._needed(example)
        ):
            return unscored(example, "too_long")
        timed_out: set[str] = set()
        scores = [self._scores(example, answers, timed_out) for answers in models]
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
        self, example: HeldOutExample, answers: Answers, timed_out: set[str]
    ) -> dict[str, float]:
        item, written = example.item, answers.get(None)
        nothing = AnswerScore(0.0)
        scores = {
            one.name: one.score(item, written) if isinstance(written, AnswerToScore) else nothing
            for one in self._written
        }
        timed_out.update(name for name, score in scores.items() if score.timed_out)
        values = {name: score.value for name, score in scores.items()}
        values |= {name: choice_score(item, answers) for name in self._choices}
        reference = answers.get(item.reference)
        if isinstance(reference, Likelihood):
            values |= dict.fromkeys(self._losses, reference.loss)
        return values


def unscored(example: HeldOutExample, why: Literal["failed", "leaked", "too_long"]) -> Stored:
    """The row of an example that has no scores."""
    return _about(example) | {"outcome": why}


def _about(example: HeldOutExample) -> Stored:
    made: Stored = {"line": example.line, "slices": dict(example.slices)}
    return made if example.cluster is None else made | {"cluster": example.cluster}
