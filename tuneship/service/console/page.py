"""Declares a page, and finds the pages.

    @page("/console/jobs/{job_id}")
    async def job(client: PageClient, job_id: JobId) -> JobView: ...

The address has the path parameters (`{model_id:path}` takes the rest of it). Every other parameter is in the query, and
is checked like one of an operation. What the function returns is `view` in the template of the module's name.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import ResourceNotFound
from tuneship.service.console import pages
from tuneship.service.context.arguments import validated

# Groups of the navigation, in their order; the first has no title.
GROUPS = ("", "Ship", "Train", "Operate")

Show = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class ConsolePage:
    """A page: its address, its place in the navigation, and the function that makes what it shows."""

    path: str
    # The group of the navigation that has it, and its number there; None for a page that others lead to.
    at: tuple[str, int] | None
    # Its name in the navigation.
    name: str
    template: str
    show: Show
    pattern: re.Pattern[str]
    query: type[BaseModel]
    # Where the entry of the navigation stands that this page belongs to.
    root: str
    # The operation without whose scope the navigation leaves it out.
    needs: Operation[..., Any] | None
    # Whether an open page follows what changes.
    is_live: bool

    async def view(self, client: Any, path: Mapping[str, str], query: Mapping[str, str]) -> Any:
        """Return the content of the page. Raises `ApiError`, also for a query that is none of this page."""
        fields = validated(self.query, dict(query))
        named = {name: getattr(fields, name) for name in self.query.model_fields}
        return await self.show(client, **path, **named)


_PAGES: list[ConsolePage] = []


def page(
    path: str,
    at: tuple[str, int] | None = None,
    name: str = "",
    *,
    needs: Operation[..., Any] | None = None,
    is_live: bool = True,
    template: str | None = None,
) -> Callable[[Show], Show]:
    """Declare the decorated function as the page at an address; `at` and `name` put it into the navigation.

    `template`: of several pages, where it is not that of the module's name.
    """

    def declare(show: Show) -> Show:
        in_path = re.findall(r"{(\w+)(?::path)?}", path)
        hints = get_type_hints(show, include_extras=True)
        defaults = inspect.signature(show).parameters
        fields = {
            one: (hint, defaults[one].default)
            for one, hint in hints.items()
            if one not in {"client", "return", *in_path}
        }
        query = create_model(
            f"{show.__name__}_query", __config__=ConfigDict(extra="forbid"), **cast("Any", fields)
        )
        # A model's id holds slashes, so its parameter takes the rest of the address.
        matched = re.sub(r"{(\w+):path}", r"(?P<\1>.+)", path)
        pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", matched))
        shown_by = template or show.__module__.rpartition(".")[2] + ".html"
        root = "/".join(path.split("/")[:3])
        _PAGES.append(
            ConsolePage(path, at, name, shown_by, show, pattern, query, root, needs, is_live)
        )
        return show

    return declare


@cache
def all_pages() -> list[ConsolePage]:
    """Every page, those without parameters first."""
    for found in iter_modules(pages.__path__):
        import_module(f"{pages.__name__}.{found.name}")
    return sorted(_PAGES, key=lambda one: one.path.count("{"))


def page_at(path: str) -> tuple[ConsolePage, dict[str, str]]:
    """The page at an address, and the parameters in it. Raises `ResourceNotFound`."""
    for one in all_pages():
        if (found := one.pattern.fullmatch(path)) is not None:
            return one, found.groupdict()
    raise ResourceNotFound("there is no such page")
