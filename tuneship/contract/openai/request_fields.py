"""How requests of OpenAI's clients are read: each field is used, neutral at some values, or refused by name.

No field is taken and then ignored. A test compares the three lists with the types of the `openai` package, so that a
new field of its next version fails there.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import Request

# Neutral at every value: without stored answers, tools or priorities the field has nothing to act on.
ANY_VALUE: tuple[Any, ...] = ()
# Fields without an effect, with the values that they may have.
NeutralFields = Mapping[str, tuple[Any, ...]]


def _with_neutral_fields(schema: dict[str, Any], model: "type[OpenAIRequest]") -> None:
    """Show the neutral fields in the document, with the values that they may have."""
    for name, values in model.neutral.items():
        text = "Has no effect here." if values is ANY_VALUE else "Only this value is supported."
        enumeration: dict[str, Any] = {} if values is ANY_VALUE else {"enum": list(values)}
        schema.setdefault("properties", {})[name] = {"description": text, **enumeration}


class OpenAIRequest(Request):
    """Base of the bodies that OpenAI's clients send; a field that is null counts as not sent."""

    model_config = ConfigDict(json_schema_extra=cast("Any", _with_neutral_fields))

    neutral: ClassVar[NeutralFields] = {}
    # Fields of OpenAI's API that are refused by name.
    unsupported: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _sorted_out(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        sent = {name: one for name, one in cast("dict[str, Any]", value).items() if one is not None}
        for name in cls.unsupported & sent.keys():
            raise PydanticCustomError(
                "unsupported_parameter", "is not supported here", {"below": f".{name}"}
            )
        for name in cls.neutral.keys() & sent.keys():
            values, given = cls.neutral[name], sent.pop(name)
            if isinstance(given, dict):
                fields = cast("dict[str, Any]", given)
                given = {key: one for key, one in fields.items() if one is not None}
            # A flag is no number, and yet `True == 1` in Python.
            is_neutral = values is ANY_VALUE or any(
                given == one and isinstance(given, bool) == isinstance(one, bool) for one in values
            )
            if not is_neutral:
                known = " or ".join(json.dumps(one) for one in values)
                text = f"is supported only as {known}"
                place = {"below": f".{name}"}
                raise PydanticCustomError("unsupported_value", cast("Any", text), place)
        return sent
