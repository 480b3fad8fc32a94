"""Pages of OpenAI's lists: the next page begins behind the id of the last entry."""

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field

from tuneship.contract.common import Reply

PageSize = Annotated[int, Field(ge=1, le=100, description="Entries in one page, 1 to 100.")]
AfterId = Annotated[
    str,
    Field(min_length=1, max_length=128, description="The page begins behind the entry of this id."),
]


class ListedObject(Reply):
    """An entry of a list."""

    id: str


Entry = TypeVar("Entry", bound=ListedObject)


class ObjectPage(Reply, Generic[Entry]):
    """A page of a list, with the ids of its first and its last entry."""

    object: Literal["list"] = "list"
    data: list[Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, entries: Sequence[Entry], *, has_more: bool) -> Self:
        """The page with these entries."""
        first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
        return cls(data=[*entries], first_id=first, last_id=last, has_more=has_more)
