"""The meaning of `tool_choice`, and texts in parts, in both forms of OpenAI's API. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic_core import PydanticCustomError

from tuneship.contract.generation import ToolMode


class TextPart(Protocol):
    """One part of a text."""

    @property
    def text(self) -> str:
        """Its text."""
        ...


def text_of_parts(content: str | Sequence[TextPart] | None) -> str:
    """A content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


@dataclass(frozen=True)
class ChosenTools:
    """The functions that may or must be called."""

    mode: ToolMode | None
    names: list[str] | None
    """The functions that may be called; None for all."""
    is_named: bool = False
    """Whether it asks for one call of one function."""

    def check(self, known: Sequence[str]) -> None:
        """Raise pydantic's error for a choice that needs functions and has none, or names an unknown one."""
        place = {"param": "tool_choice"}
        if self.mode == "required" and not known:
            raise PydanticCustomError("conflict", "needs tools", place)
        if not set(self.names or ()) <= {*known}:
            raise PydanticCustomError("value_error", "names a function that tools lack", place)
