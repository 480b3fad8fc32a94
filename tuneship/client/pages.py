"""Walking over the pages of a list without I/O: which page is next, and what of it is new.

`client.jobs.iterate(status="failed")` is the walk's use; `verbs.py` drives it for both clients.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tuneship.contract.errors import BadResponse
from tuneship.contract.operation import Operation

R = TypeVar("R")
T = TypeVar("T")
Arguments = Mapping[str, Any]
# From a page and the arguments that brought it: what to change for the next page; None at the
# end.
Following = Callable[[Any, Arguments], "dict[str, Any] | None"]


def by_offset(page: Any, sent: Arguments) -> dict[str, Any] | None:
    """The lists of §8. A page without pagination (short reference) is the only one."""
    following = page.pagination.next_offset if page.pagination else None
    if following is None:
        return None
    if following <= sent.get("offset", 0):
        raise BadResponse("the list does not go on: its next offset is not behind this page")
    return {"offset": following}


def by_next_token(page: Any, sent: Arguments) -> dict[str, Any] | None:
    """Deployment logs: null ends."""
    following = page.pagination.next_token
    if following is not None and following == sent.get("next_token"):
        raise BadResponse("the list does not go on: its next token is that of this page")
    return None if following is None else {"next_token": following}


def by_after(page: Any, sent: Arguments) -> dict[str, Any] | None:
    """Job logs and events, which never say that they end: the token comes back unchanged when there is nothing new."""
    following = page.pagination.after
    return None if following in (None, sent.get("after")) else {"after": following}


@dataclass(frozen=True)
class Paged(Generic[R, T]):
    """How a list operation is walked: where its entries stand, and how its next page is asked for."""

    operation: Operation[..., R]
    entries: Callable[[R], Sequence[T]]
    following: Following = by_offset


class Walk(Generic[R, T]):
    """One walk: call the operation with `arguments`, `take` the page, until `ended`.

    Entries that were on the page before come once: while one walks, new entries push older ones onto the next page.
    """

    def __init__(self, paged: Paged[R, T], given: Arguments) -> None:
        """Start with what the caller gave; its `limit` is the size of a page."""
        self._paged = paged
        self.arguments: dict[str, Any] = dict(given)
        self.ended = False
        self._known: set[Any] = set()

    def take(self, page: R) -> list[T]:
        """The page's new entries, in order. Raises `BadResponse` when a server would make the walk endless."""
        entries = self._paged.entries(page)
        fresh = [entry for entry in entries if _name(entry) not in self._known]
        self._known = {_name(entry) for entry in entries} - {None}
        following = self._paged.following(page, self.arguments)
        if following is None:
            self.ended = True
        else:
            self.arguments |= following
        return fresh


def _name(entry: Any) -> Any:
    """What tells an entry from others; log lines have nothing, and their tokens cannot overlap."""
    return getattr(entry, "id", None) or getattr(entry, "event_id", None)


def named(operation: Operation[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Arguments by their names. Raises `TypeError` like any call that does not fit."""
    return inspect.signature(operation.declaration).bind(*args, **kwargs).arguments
