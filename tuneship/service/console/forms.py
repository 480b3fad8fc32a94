"""Forms of an operation: which fields they have, with their values, choices and limits. Pure.

A name is that in the operation's body: `a.b` is in `a`, `a[]` is a text with commas, `a[0].b` is in a list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tuneship.contract.models import HyperparameterLimits

# A limit that only says how numbers are stored.
UNBOUNDED = 2**53
Choices = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class FormField:
    """A field: a box for a truth value, a list where there are `choices`, else a line of text."""

    name: str
    label: str
    value: Any = None
    hint: str = ""
    choices: Choices = ()


@dataclass(frozen=True)
class FormView:
    """A page that is one form."""

    title: str
    # The sentence of the page.
    says: str
    # The pages above it, by name and address.
    places: Sequence[tuple[str, str]]
    # The action that takes the form, by its name, and what is said when it is refused.
    action: str
    refused: str
    # To the page of what is made, or of what was changed.
    then: str
    sections: Sequence[tuple[str, Sequence[FormField]]]
    hidden: Mapping[str, str] = field(default_factory=dict[str, str])
    # A choice on which the others depend: it opens the page again.
    first: FormField | None = None
    # Why there is no form.
    blocked: str = ""
    # Another form for a similar thing, by name and address.
    other: tuple[str, str] | None = None


def fields_of(
    model: type[BaseModel],
    prefix: str,
    values: Mapping[str, Any],
    hints: Mapping[str, str] | None = None,
    choices: Mapping[str, Choices] | None = None,
) -> list[FormField]:
    """The fields that a model declares, with the limits that it declares."""
    declared: Mapping[str, Any] = model.model_json_schema()["properties"]
    made: list[FormField] = []
    for name, one in declared.items():
        known = (choices or {}).get(name) or [(text, text) for text in one.get("enum", ())]
        hint = (hints or {}).get(name) or _declared_limits(one)
        made.append(FormField(prefix + name, name, values.get(name), hint, known))
    return made


def limits_in_words(limit: HyperparameterLimits) -> str:
    """The values that a hyperparameter may have."""
    if limit.min is None or limit.max is None:
        return ""
    low = ("above " if limit.exclusive_min else "") + f"{limit.min:.10g}"
    high = ("below " if limit.exclusive_max else "") + f"{limit.max:.10g}"
    return f"{low} to {high}" + (", or auto" if limit.auto else "")


def _declared_limits(schema: Mapping[str, Any]) -> str:
    for one in (schema, *schema.get("anyOf", ())):
        if one.get("maximum", 0) >= UNBOUNDED:
            return f"{one['minimum']:.10g} or more"
        if "minimum" in one and "maximum" in one:
            return f"{one['minimum']:.10g} to {one['maximum']:.10g}"
    return ""
