"""Templates of graders, as they are filled for each answer."""

from collections.abc import Sequence
from typing import Any

from tuneship.contract.graders import (
    ChoiceGrader,
    Grader,
    LossGrader,
    ToolCallsGrader,
    grader_parts,
    metadata_field,
)
from tuneship.contract.templates import TextTooLong, filled
from tuneship.evaluation.items import EvaluationItem, MetadataRefused

# Similar texts are found in a time that grows with the square of their lengths.
MAXIMUM_CHARACTERS = 1 << 20


class TextTemplate:
    """A template that was read once and is filled for each answer."""

    def __init__(self, template: str) -> None:
        """Raise ValueError for an unknown name."""
        self._parts = grader_parts(template)
        names = (metadata_field(name) for _, name in self._parts if name)
        # The fields of metadata that it names.
        self.fields = frozenset(name for name in names if name)

    def fill(self, answer: str, item: EvaluationItem) -> str:
        """The text. Raises KeyError where the metadata lack a field, and `TextTooLong`."""

        def value_of(name: str) -> Any:
            field = metadata_field(name)
            if field is None:
                return answer if name == "sample.output_text" else item.reference
            value = item.metadata.get(field)
            if value is None:
                raise KeyError(field)
            return value

        return filled(self._parts, value_of, MAXIMUM_CHARACTERS)


def check_texts(items: Sequence[EvaluationItem], graders: Sequence[Grader]) -> None:
    """Check that no template makes a text that is too long, whatever the answer. Raises `MetadataRefused`."""
    for number, grader in enumerate(graders):
        if isinstance(grader, ChoiceGrader | LossGrader | ToolCallsGrader):
            continue
        for part in ("input", "reference"):
            template = TextTemplate(getattr(grader, part))
            for example, item in enumerate(items):
                try:
                    template.fill("", item)
                except KeyError:
                    continue  # it scores 0
                except TextTooLong:
                    place = f"graders[{number}].{part}"
                    text = f"makes a text of more than {MAXIMUM_CHARACTERS >> 20} Mi characters"
                    raise MetadataRefused("out_of_range", place, text, example) from None
