"""Values of a line as tables export them: lists and objects as JSON text, and nulls for other rows' keys. Pure."""

from collections.abc import Mapping
from typing import Any, cast

from tuneship.contract.lines import strict_json
from tuneship.contract.lines.example_problem import ExampleProblem

# Members of a JSON Schema that hold values or names, where any key may stand.
NO_SCHEMAS = frozenset({"properties", "default", "const", "enum", "examples"})


def structured(value: Any, field: str, kind: type[list[Any] | dict[str, Any]]) -> Any:
    """A list or an object, which may be written as JSON text; None where there is none. Raises `ExampleProblem`.

    CSV has no other way to hold one, and in Parquet the text keeps apart what differs from row to row.
    """
    if isinstance(value, str):
        value = from_text(value) if value.strip() else None
    if value is None or isinstance(value, kind):
        return cast("Any", value)
    name = "a list" if kind is list else "an object"
    raise ExampleProblem("wrong_type", field, f"must be {name}, or one as JSON text")


def from_text(text: str) -> object:
    """The value that a text holds as JSON; the text itself where it is no JSON."""
    try:
        return strict_json.parse(
            text.encode("utf-8", "surrogatepass"), strict_json.MAXIMUM_VALUES_OF_LINE
        )
    except strict_json.JsonRefused:
        return text


def without_nulls(value: Any) -> Any:
    """The value without the null members of its objects; nulls in lists are kept.

    All objects of one column of Arrow (Parquet, Hugging Face) have the same keys: a key that an object lacks in the
    file that they came from is null.
    """
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        return {key: without_nulls(one) for key, one in members.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(one) for one in cast("list[Any]", value)]
    return value


def has_null_property(schema: object) -> bool:
    """Whether a JSON Schema lists a property as null, which none is: it is a key of another row's schema."""
    # Not a recursion: parsed JSON has few levels, and rows from Python any number.
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left.extend(cast("list[Any]", one))
        if not isinstance(one, dict):
            continue
        fields = cast("dict[str, Any]", one)
        left.extend(value for name, value in fields.items() if name not in NO_SCHEMAS)
        if isinstance(fields.get("properties"), dict):
            properties = cast("dict[str, Any]", fields["properties"])
            if None in properties.values():
                return True
            left.extend(properties.values())
    return False
