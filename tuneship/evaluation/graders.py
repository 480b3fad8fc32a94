"""Graders of written answers, read from their form on the wire: each gives an answer a score from 0 to 1.

`choice` and `loss` read no written answer; they are in `likelihoods.py`.
A blank answer scores 0, and so does a text that cannot be graded (too long, no number in it, no JSON): it is no error.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tuneship.contract.graders import (
    ChoiceGrader,
    Grader,
    JsonGrader,
    LossGrader,
    NumberGrader,
    RegexGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    ToolCallsGrader,
)
from tuneship.contract.schemas.tools import arguments_of
from tuneship.contract.templates import TextTooLong
from tuneship.evaluation import similarity
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.json_values import (
    SchemaUnusable,
    TimedSchema,
    canonical,
    is_json,
    parsed,
)
from tuneship.evaluation.numbers_in_text import are_close, last_number
from tuneship.evaluation.patterns import SECONDS, PatternUnusable, compiled
from tuneship.evaluation.templates import TextTemplate
from tuneship.evaluation.texts import said, spaced

_NORMALISED: Mapping[str, Callable[[str], str]] = {"none": str, "space": spaced, "text": said}
_OfTextGrader = StringCheckGrader | TextSimilarityGrader | RegexGrader | NumberGrader | JsonGrader
# Takes the text to grade and the right one.
_OfTexts = Callable[[str, str], float]


@dataclass(eq=False)
class GraderRefused(Exception):
    """A grader cannot be used: its place, such as `graders[1].pattern`, and a message that quotes nothing."""

    place: str
    message: str


@dataclass(frozen=True)
class AnswerToScore:
    """The text of a model's answer and its calls, as OpenAI has them; arguments are text or objects."""

    text: str
    calls: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class AnswerScore:
    """A score from 0 to 1. It is 0 where the grader ran out of time."""

    value: float
    timed_out: bool = False


@dataclass(frozen=True)
class ReadyGrader:
    """A grader that was checked and compiled."""

    name: str
    # The fields of metadata that its templates name: an example without them scores 0.
    fields: frozenset[str]
    _score: Callable[[EvaluationItem, AnswerToScore], float]

    def score(self, item: EvaluationItem, answer: AnswerToScore) -> AnswerScore:
        """The score of one answer."""
        if not answer.calls and not answer.text.strip():
            return AnswerScore(0.0)
        try:
            return AnswerScore(self._score(item, answer))
        except TimeoutError:
            return AnswerScore(0.0, timed_out=True)


def read_graders(graders: Sequence[Grader]) -> list[ReadyGrader]:
    """Compile the graders of written answers. Raises `GraderRefused`."""
    return [
        _ready(grader, f"graders[{number}]")
        for number, grader in enumerate(graders)
        if not isinstance(grader, ChoiceGrader | LossGrader)
    ]


def _ready(grader: _OfTextGrader | ToolCallsGrader, place: str) -> ReadyGrader:
    if isinstance(grader, ToolCallsGrader):
        return ReadyGrader(grader.name, frozenset(), _calls_are_equal)
    score, taken, wanted = (
        _score(grader, place),
        TextTemplate(grader.input),
        TextTemplate(grader.reference),
    )

    def of_texts(item: EvaluationItem, answer: AnswerToScore) -> float:
        try:
            text, reference = taken.fill(answer.text, item), wanted.fill(answer.text, item)
        except (KeyError, TextTooLong):
            return 0.0
        return score(text, reference)

    return ReadyGrader(grader.name, taken.fields | wanted.fields, of_texts)


def _score(grader: _OfTextGrader, place: str) -> _OfTexts:
    match grader:
        case StringCheckGrader():
            return _string_check(grader)
        case TextSimilarityGrader():
            return _text_similarity(grader, place)
        case RegexGrader():
            return _regex(grader, place)
        case NumberGrader():
            return _number(grader)
        case JsonGrader():
            return _json(grader, place)


def _string_check(grader: StringCheckGrader) -> _OfTexts:
    normalised, operation = _NORMALISED[grader.normalize], grader.operation

    def score(text: str, reference: str) -> float:
        text, reference = normalised(text), normalised(reference)
        match operation:
            case "eq":
                return float(text == reference)
            case "ne":
                return float(text != reference)
            case "like":
                # Every text contains an empty one.
                return float(bool(reference) and reference in text)
            case "ilike":
                return float(bool(reference) and reference.casefold() in text.casefold())

    return score


def _text_similarity(grader: TextSimilarityGrader, place: str) -> _OfTexts:
    if grader.evaluation_metric == "chrf":
        try:
            measure = similarity.chrf_measure()
        except ImportError:
            text = "chrf needs what the extra evaluation installs"
            raise GraderRefused(f"{place}.evaluation_metric", text) from None
    else:
        measure = similarity.MEASURES[grader.evaluation_metric]
    return _from_threshold(measure, grader.pass_threshold)


def _from_threshold(score: _OfTexts, threshold: float | None) -> _OfTexts:
    if threshold is None:
        return score
    return lambda text, reference: float(score(text, reference) >= threshold)


def _regex(grader: RegexGrader, place: str) -> _OfTexts:
    try:
        pattern = compiled(grader.pattern)
    except PatternUnusable as error:
        raise GraderRefused(f"{place}.pattern", str(error)) from None

    def score(text: str, reference: str) -> float:
        found = pattern.search(text, timeout=SECONDS)
        if found is None or not pattern.groups:
            return float(found is not None)
        return float(spaced(found[1] or "") == spaced(reference))

    return score


def _number(grader: NumberGrader) -> _OfTexts:
    def score(text: str, reference: str) -> float:
        number, wanted = last_number(text), last_number(reference)
        if number is None or wanted is None:
            return 0.0
        return float(are_close(number, wanted, grader.tolerance, grader.relative))

    return score


def _json(grader: JsonGrader, place: str) -> _OfTexts:
    try:
        schema = None if grader.json_schema is None else TimedSchema(grader.json_schema)
    except SchemaUnusable as error:
        raise GraderRefused(f"{place}.schema", str(error)) from None
    fields = grader.fields

    def score(text: str, reference: str) -> float:
        value = parsed(text)
        if not is_json(value) or (schema is not None and not schema.fits(value)):
            return 0.0
        return 1.0 if fields is None else _share_of_fields(value, parsed(reference), fields)

    return _from_threshold(score, grader.pass_threshold)


def _share_of_fields(value: Any, wanted: Any, fields: Sequence[str]) -> float:
    """The share of the fields that both objects have with equal values, or neither has."""
    if not isinstance(value, dict) or not isinstance(wanted, dict):
        return 0.0
    one, other = cast("dict[str, Any]", value), cast("dict[str, Any]", wanted)
    equal = sum(
        (name in one) == (name in other) and canonical(one.get(name)) == canonical(other.get(name))
        for name in fields
    )
    return equal / len(fields)


def _calls_are_equal(item: EvaluationItem, answer: AnswerToScore) -> float:
    return float(_counted(item.calls) == _counted(answer.calls))


def _counted(calls: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            read = arguments_of(arguments)
            # Arguments that are no object equal only the same text.
            arguments = arguments if read is None else read
        made.append((function["name"], canonical(arguments)))
    return Counter(made)
