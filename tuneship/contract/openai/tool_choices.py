"""The meaning of `tool_choice` in both forms of OpenAI's API. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic_core import PydanticCustomError

from tuneship.contract.generation import ToolMode


class TypedChoice(Protocol):
    """A choice with a type that says which other fields it has."""

    @property
    def type(self) -> str:
        """Its type."""
        ...


def check_fields(choice: TypedChoice, names: Mapping[str, Sequence[str]]) -> None:
    """Raise pydantic's error unless a choice has all fields that `names` gives its type, and none of another type."""
    for kind, fields in names.items():
        for name in fields:
            if (getattr(choice, name) is not None) != (choice.type == kind):
                text = "is required by the type, and stands beside no other one"
                raise PydanticCustomError("conflict", text, {"below": f".{name}"})


@dataclass(frozen=True)
class ChosenTools:
    """The functions that may or must be called."""

    mode: ToolMode | None
    # The functions that may be called; None for all.
    names: list[str] | None
    # Whether it asks for one call of one function.
    is_named: bool = False

    def check(self, known: Sequence[str]) -> None:
        """Raise pydantic's error for a choice that needs functions and has none, or names an unknown one."""
        place = {"param": "tool_choice"}
        if self.mode == "required" and not known:
            raise PydanticCustomError("conflict", "needs tools", place)
        if not set(self.names or ()) <= {*known}:
            raise PydanticCustomError("value_error", "names a function that tools lack", place)
