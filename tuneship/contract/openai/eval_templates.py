"""Templates of OpenAI's evals: text with names in double braces, such as `{{item.question}}`. Pure.

A row of an eval becomes a line of a dataset, and its criteria become graders, which read what they name in a row from
the metadata of that line. The service and `tuneship evaluations import` share this.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field

from tuneship.contract.graders import ANSWER
from tuneship.contract.lines.dataset_lines import LINE_LIMIT_BYTES
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.templates import Part, TextTooLong, filled, template_parts

_SAMPLE = "sample.output_text"
_NAME = re.compile(
    r"sample\.output_text|item\.(?P<field>[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9_-]{1,64}){0,7})"
)
# The last turn of a line whose criterion names no text of its row: no grader reads it, and a line needs one.
NO_REFERENCE = "-"
# The longest name in a line's metadata that a grader's template may have.
MAXIMUM_NAME = 64


def parts_of(template: str) -> list[Part]:
    """The parts of a template. Raises ValueError."""
    return template_parts(template, _NAME, "item.<field> and sample.output_text")


def fields_of(template: str) -> list[str]:
    """The fields of a row that a criterion's template names, e.g. `question` or `patient.age`. Raises ValueError."""
    names = (name for _, name in parts_of(template) if name)
    found = [field_named(name) for name in names if name != _SAMPLE]
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
    found = _NAME.fullmatch(reference)
    if found is None or found["field"] is None:
        raise ValueError("must be of the form item.<field>")
    return found["field"]


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


def _prompted(template: str, item: Mapping[str, Any], most: int) -> str:
    """A template with the values of a row, which may lack none. Raises `ExampleProblem`."""
    try:
        return filled(parts_of(template), lambda name: _needed(item, field_named(name)), most)
    except TextTooLong:
        text = f"makes a line of more than {LINE_LIMIT_BYTES >> 20} MiB"
        raise ExampleProblem("line_too_long", "item", text) from None


def _needed(item: Mapping[str, Any], field: str) -> Any:
    value = value_at(item, field)
    if value is None:
        # Its name is the caller's own word, which no message repeats.
        raise ExampleProblem("missing_field", "item", "lacks a field that input_messages names")
    return value


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
        turns, room = [], LINE_LIMIT_BYTES
        for turn in messages:
            content = _prompted(turn["content"], item, room)
            turns.append({**turn, "content": content})
            room -= len(content)
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
    text = _prompted(template, item, LINE_LIMIT_BYTES)
    return text if text.strip() else NO_REFERENCE
