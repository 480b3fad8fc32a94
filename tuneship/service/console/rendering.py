"""Makes HTML of views. Everything is escaped; no template may say that a text is safe."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from tuneship.contract.errors import ApiError
from tuneship.service.access.console_sessions import Session
from tuneship.service.console import release_words, words
from tuneship.service.console.actions import ACTIONS
from tuneship.service.console.page import GROUPS, ConsolePage, all_pages
from tuneship.service.context.bindings import SERVED


@dataclass(frozen=True)
class PageFrame:
    """The surroundings of a page's content."""

    # The folder of scripts and styles, with their digest in it.
    static: str
    now: datetime
    # None on the pages for those who are not signed in.
    session: Session | None = None
    page: ConsolePage | None = None
    # The address of the page with its query, to which forms and a later sign-in lead back.
    address: str = ""
    # What a form was sent with, and why that was refused.
    given: Mapping[str, str] = field(default_factory=dict[str, str])
    problem: ApiError | None = None
    # The answer to a form that is shown on its own page.
    reply: Any = None
    # Makes one request of the clicks on a form.
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def live(self) -> str:
        """The address from which the page is kept live; empty where it does not follow changes."""
        return self.address if self.page is not None and self.page.is_live else ""


def place(path: str, **query: object) -> str:
    """The address of a page of the console; the only way in which a template makes a link from data."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    return quote(f"/console{path}") + (f"?{urlencode(given)}" if given else "")


def link(address: str) -> str:
    """The address of a page elsewhere, which opens only as a page of the web, of the host that it shows first."""
    try:
        found = urlsplit(address)
    except ValueError:
        return ""
    is_plain = found.scheme in ("http", "https") and found.hostname and "@" not in found.netloc
    return address if is_plain else ""


def scope_of(action: str) -> str:
    """The scope of an action's operation."""
    declared = ACTIONS.get(action)
    return SERVED[(declared.operation if declared else "") or action].operation.scope


def may(frame: PageFrame, action: str) -> bool:
    """Whether the session has the scope of an action's operation."""
    return frame.session is not None and scope_of(action) in frame.session.principal.scopes


# Characters that show as nothing, or turn the order of a line around, so that a name reads as something else.
_HIDDEN = dict.fromkeys(
    (
        *range(9),
        11,
        12,
        *range(14, 32),
        *range(127, 160),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    ),
    "\ufffd",
)


def _visible(value: Any) -> Any:
    # Not what is markup or data of a chart already, which is a type of its own.
    return value.translate(_HIDDEN) if type(value) is str else value


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("tuneship.service.console"),
        autoescape=True,
        undefined=StrictUndefined,
        # Templates change with the version alone.
        auto_reload=False,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = cast("dict[str, Any]", made.globals)  # pyright: ignore[reportUnknownMemberType]
    shared |= {one.__name__: one for one in (place, link, may, scope_of)}
    shared |= {"states": words.STATES, "actions": ACTIONS}
    filters = cast("dict[str, Any]", made.filters)  # pyright: ignore[reportUnknownMemberType]
    filters |= {one.__name__: one for one in (*words.FILTERS, *release_words.FILTERS)}
    return made


def whole_page(page: ConsolePage, view: Any, frame: PageFrame) -> str:
    """A page with everything around it."""
    return _environment().get_template(page.template).render(_values(view, frame))


def live_part(page: ConsolePage, view: Any, frame: PageFrame) -> str:
    """The part of a page that changes: what is between `<main>` and `</main>`."""
    return _main_of(page.template, _values(view, frame))


def _main_of(name: str, values: dict[str, Any]) -> str:
    template = _environment().get_template(name)
    return "".join(template.blocks["main"](template.new_context(values)))


def gone_page(error: ApiError, page: ConsolePage, frame: PageFrame, *, is_live: bool) -> str:
    """A page whose subject is gone or may not be seen any more, and where to go; the part that changes if `is_live`."""
    listed = next(one for one in all_pages() if one.path == page.root)
    values = _values(None, frame, error=error, one=listed)
    if is_live:
        return _main_of("gone.html", values)
    return _environment().get_template("gone.html").render(values)


def own_page(name: str, frame: PageFrame, **values: Any) -> str:
    """A page that belongs to no module of `pages/`: the sign-in, an error, a question before an action."""
    return _environment().get_template(name).render(_values(None, frame, **values))


def error_page(error: ApiError, request_id: str, frame: PageFrame) -> str:
    """An error, in the words of the API."""
    return own_page("error.html", frame, error=error, request_id=request_id)


def _values(view: Any, frame: PageFrame, **values: Any) -> dict[str, Any]:
    held = frame.session.principal.scopes if frame.session else frozenset[str]()
    nav = [
        (group, [one for one in pages if one.needs is None or one.needs.scope in held])
        for group, pages in _navigation()
    ]
    return {"view": view, "frame": frame, "nav": nav, **values}


@cache
def _navigation() -> list[tuple[str, list[ConsolePage]]]:
    listed = [(one.at, one) for one in all_pages() if one.at is not None]
    listed.sort(key=lambda found: (GROUPS.index(found[0][0]), found[0][1]))
    return [
        (group, [one for _, one in found])
        for group, found in groupby(listed, lambda found: found[0][0])
    ]
