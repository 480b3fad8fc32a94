"""Walking over the pages of a list without I/O: which page is next, and which of its entries are new.

`client.jobs.iterate(status="failed")` uses it; both clients drive the same `Walk`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import BadResponse

R = TypeVar("R")
T = TypeVar("T")
Arguments = Mapping[str, Any]
# From a page and the arguments that returned it: the arguments to change for the next page, None
# at the end.
NextPage = Callable[[Any, Arguments], "dict[str, Any] | None"]


def by_offset(page: Any, sent: Arguments) -> dict[str, Any] | None:
    """The next page's arguments for a list of §8; None on the last page, or where the answer has no `pagination`."""
    offset = page.pagination.next_offset if page.pagination else None
    if offset is None:
        return None
    # A server whose pages do not advance would keep the caller's loop going for ever.
    if offset <= sent.get("offset", 0):
        raise BadResponse("the list does not continue: its next offset is not behind this page")
    return {"offset": offset}


def by_next_token(page: Any, sent: Arguments) -> dict[str, Any] | None:
    """Continue a deployment's log; a null token ends it."""
    token = page.pagination.next_token
    if token is not None and token == sent.get("next_token"):
        raise BadResponse("the list does not continue: its next token is that of this page")
    return None if token is None else {"next_token": token}


def by_after(page: Any, sent: Arguments) -> dict[str, Any] | None:
    """Continue a job's log or the events, which have no end: an unchanged token means that there is nothing new yet."""
    token = page.pagination.after
    return None if token in (None, sent.get("after")) else {"after": token}


@dataclass(frozen=True)
class Paged(Generic[R, T]):
    """How to walk a list operation: which field holds the entries, and how the next page is requested."""

    operation: Operation[..., R]
    entries: Callable[[R], Sequence[T]]
    next_page: NextPage = by_offset


class Walk(Generic[R, T]):
    """A walk over pages: calls the operation with `arguments`, then `take` on the page, until `ended`.

    New entries push older ones onto the next page while one walks; an entry of the last page is not returned again.
    """

    def __init__(self, paged: Paged[R, T], given: Arguments) -> None:
        """Start with the caller's arguments; their `limit` is the size of a page."""
        self._paged = paged
        self.arguments: dict[str, Any] = dict(given)
        self.ended = False
        self._known_ids: set[Any] = set()

    def take(self, page: R) -> list[T]:
        """The page's new entries, in order. Raises `BadResponse` when a server would make the walk endless."""
        entries = self._paged.entries(page)
        new = [entry for entry in entries if _id(entry) not in self._known_ids]
        # The last page is enough: entries move by what was added since, and memory stays the same.
        self._known_ids = {_id(entry) for entry in entries} - {None}
        changes = self._paged.next_page(page, self.arguments)
        if changes is None:
            self.ended = True
        else:
            self.arguments |= changes
        return new


def _id(entry: Any) -> Any:
    """An entry's id. Log lines have none, but their tokens cannot overlap."""
    return getattr(entry, "id", None) or getattr(entry, "event_id", None)
