"""Texts of a request that are given as text or as token ids, one or several."""

from typing import Annotated, Any, cast

from pydantic import Field
from pydantic_core import PydanticCustomError

# No vocabulary is larger.
MAXIMUM_TOKEN_ID = 1 << 31
TokenId = Annotated[int, Field(ge=0, lt=MAXIMUM_TOKEN_ID)]
# One text, or its token ids.
TextOrIds = str | list[int]

_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}


def texts_or_ids(value: object, param: str) -> list[TextOrIds]:
    """Read one text or several, each as text or token ids. Raises pydantic's error, which names `param`."""
    texts = cast(
        "list[object]", [value] if _is_text(value) or not isinstance(value, list) else value
    )
    if not texts or not all(map(_is_text, texts)):
        text = "must be a text, token ids, or a list of either, none of them empty"
        raise PydanticCustomError("prompt_type", text, {"param": param})
    return cast("list[TextOrIds]", texts)


def schema_of_texts(most: int, description: str) -> dict[str, Any]:
    """The JSON schema of what `texts_or_ids` reads, with up to `most` texts."""
    several = {"minItems": 1, "maxItems": most}
    return {
        "anyOf": [
            _TEXT,
            _TOKEN_IDS,
            {"type": "array", "items": _TEXT, **several},
            {"type": "array", "items": _TOKEN_IDS, **several},
        ],
        "description": description,
    }


def _is_text(value: object) -> bool:
    if isinstance(value, list):
        ids = cast("list[object]", value)
        return bool(ids) and all(type(one) is int and 0 <= one < MAXIMUM_TOKEN_ID for one in ids)
    return isinstance(value, str) and bool(value)
