"""How likely a model finds given answers, which it does not write: the graders `choice` and `loss`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tuneship.contract.graders import Grader
from tuneship.evaluation.items import EvaluationItem, MetadataRefused

# The field of metadata that has the choices of a line.
CHOICES = "choices"
FEWEST_CHOICES, MOST_CHOICES = 2, 32


@dataclass(frozen=True)
class Likelihood:
    """The natural logarithm of the probability of an answer's tokens and its end, and how many tokens they are."""

    log_probability: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token, as training has it for a row."""
        return max(-self.log_probability, 0.0) / self.tokens


def choices_of(item: EvaluationItem) -> list[str]:
    """The choices of an example that was checked."""
    return item.metadata[CHOICES]


def check_choices(items: Sequence[EvaluationItem], graders: Sequence[Grader]) -> None:
    """Check that each example has choices, if a grader needs them. Raises `MetadataRefused`."""
    number = next((n for n, one in enumerate(graders) if one.type == "choice"), None)
    if number is None:
        return
    place = f"graders[{number}]"
    for example, item in enumerate(items):
        found = item.metadata.get(CHOICES)
        if found is None:
            text = "needs metadata.choices, which a line lacks"
            raise MetadataRefused("missing_field", place, text, example)
        if why := _fault(found, item):
            text = f"cannot use metadata.choices: {why}"
            raise MetadataRefused("invalid_choices", place, text, example)


def _fault(found: Any, item: EvaluationItem) -> str | None:
    wanted = (
        f"must be a list of {FEWEST_CHOICES} to {MOST_CHOICES} different texts, none of them blank"
    )
    if not isinstance(found, list):
        return wanted
    texts = cast("list[object]", found)
    if not FEWEST_CHOICES <= len(texts) <= MOST_CHOICES:
        return wanted
    if not all(isinstance(one, str) and one.strip() for one in texts):
        return wanted
    if len(set(texts)) < len(texts):
        return wanted
    if item.calls:
        return "the reference must be a text without calls of functions"
    return None if item.reference in texts else "the reference must be one of them"


def choice_score(item: EvaluationItem, found: Mapping[str | None, object]) -> float:
    """1 if the reference is likelier than each other choice, else 0, also where a choice could not be scored."""
    likelihoods = {text: found.get(text) for text in choices_of(item)}
    of_reference = likelihoods.pop(item.reference)
    return float(
        isinstance(of_reference, Likelihood)
        and all(
            isinstance(one, Likelihood) and of_reference.log_probability > one.log_probability
            for one in likelihoods.values()
        )
    )
