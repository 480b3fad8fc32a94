"""Templates of OpenAI's evals: text with names in double braces, such as `{{item.question}}`. Pure.

A row of an eval becomes a line of a dataset, and its criteria become graders, which read what they name in a row from
the metadata of that line. The service and `tuneship evaluations import` share this.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field

from tuneship.contract.graders import ANSWER
from tuneship.contract.lines.example_problem import ExampleProblem

_ITEM = re.compile(r"item\.([A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9_-]{1,64}){0,7})\Z")
_SAMPLE = "sample.output_text"
# The last turn of a line whose criterion names no text of its row: no grader reads it, and a line needs one.
NO_REFERENCE = "-"
# The longest name in a line's metadata that a grader's template may have.
MAXIMUM_NAME = 64


def parts_of(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield each text of a template with the name behind it, None behind the last. Raises ValueError."""
    start, *rest = template.split("{{")
    for piece in rest:
        name, closing, text = piece.partition("}}")
        name = name.strip()
        if not closing:
            raise ValueError("opens {{ without closing it")
        if name != _SAMPLE and not _ITEM.match(name):
            raise ValueError("holds an unknown name; known are item.<field> and sample.output_text")
        yield start, name
        start = text
    yield start, None


def fields_of(template: str) -> list[str]:
    """The fields of a row that a criterion's template names, e.g. `question` or `patient.age`. Raises ValueError."""
    matches = (_ITEM.match(name) for _, name in parts_of(template) if name)
    found = [one[1] for one in matches if one]
    # Each becomes a name in the metadata of a line.
    if any(len(field) > MAXIMUM_NAME for field in found):
        raise ValueError(f"names a field of more than {MAXIMUM_NAME} characters")
    return found


def _of_rows_and_answers(template: str) -> str:
    fields_of(template)
    return template


def of_rows(template: str) -> str:
    """Check a template of a prompt, which is written before there is an answer. Raises ValueError."""
    if any(name == _SAMPLE for _, name in parts_of(template)):
        raise ValueError("names sample.output_text, and there is no answer yet")
    return template


def field_named(reference: str) -> str:
    """The field that a reference such as `item.messages` names. Raises ValueError."""
    found = _ITEM.match(reference)
    if found is None:
        raise ValueError("must be of the form item.<field>")
    return found[1]


CriterionTemplate = Annotated[
    str, Field(min_length=1, max_length=10_000), AfterValidator(_of_rows_and_answers)
]


def key_of(field: str) -> str:
    """The name that a field of a row has in the metadata of a line, whose names are flat."""
    return field.replace(".", "-")


def grader_template(template: str) -> str:
    """A criterion's template as a grader's. Raises ValueError."""
    made: list[str] = []
    for text, name in parts_of(template):
        made.append(text)
        if name == _SAMPLE:
            made.append(ANSWER)
        elif name is not None:
            made.append(f"{{{{item.metadata.{key_of(field_named(name))}}}}}")
    return "".join(made)


def value_at(item: Mapping[str, Any], field: str) -> Any:
    """The value of a field, None where a row lacks it."""
    value: Any = item
    for name in field.split("."):
        value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    return value


def filled(template: str, item: Mapping[str, Any]) -> str:
    """A prompt's template with the values of a row. Raises `ExampleProblem` for a field that the row lacks."""
    made: list[str] = []
    for text, name in parts_of(template):
        made.append(text)
        if name is not None:
            made.append(_written(_needed(item, field_named(name))))
    return "".join(made)


def _needed(item: Mapping[str, Any], field: str) -> Any:
    value = value_at(item, field)
    if value is None:
        # Its name is the caller's own word, which no message repeats.
        raise ExampleProblem("missing_field", "item", "lacks a field that input_messages names")
    return value


def _written(value: Any) -> str:
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    )


def line_of(
    item: Mapping[str, Any],
    messages: Sequence[Mapping[str, str]] | str,
    criteria: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """A line of a dataset: the prompt, the right answer, and what the criteria name. Raises `ExampleProblem`.

    `messages` are turns with templates, or name the field that has the turns; `criteria` are the templates of each
    criterion, its reference last.
    """
    turns: Any
    if isinstance(messages, str):
        turns = _needed(item, messages)
        if not isinstance(turns, list) or not turns:
            raise ExampleProblem("wrong_type", "item", "has no list of turns in item_reference")
    else:
        turns = [{**turn, "content": filled(turn["content"], item)} for turn in messages]
    last = cast("list[Any]", turns)[-1]
    if not isinstance(last, Mapping) or cast("Mapping[str, Any]", last).get("role") != "user":
        raise ExampleProblem("invalid_role", "item", "gives a prompt that does not end with a user")
    named = {field for templates in criteria for one in templates for field in fields_of(one)}
    return {
        "messages": [*turns, {"role": "assistant", "content": _reference(item, criteria[0][-1])}],
        "metadata": {key_of(field): value_at(item, field) for field in sorted(named)},
    }


def _reference(item: Mapping[str, Any], template: str) -> str:
    """The right answer by the first criterion, for the search for rows that a model was trained on."""
    if any(name == _SAMPLE for _, name in parts_of(template)):
        return NO_REFERENCE
    if any(value_at(item, field) is None for field in fields_of(template)):
        return NO_REFERENCE
    text = filled(template, item)
    return text if text.strip() else NO_REFERENCE
