"""A browser of the console without a screen: it keeps cookies and sends what browsers send with a form."""

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.support.service.in_process import Service
from tests.support.waiting import PATIENCE_S
from tuneship.contract.declaring.scopes import PRESETS


class Browser:
    """One person's browser. `site` is where its next request comes from, as browsers say."""

    def __init__(self, service: Service, site: str | None = "same-origin") -> None:
        self.service = service
        self.site = site
        self.cookies = httpx.Cookies()

    def open(self, path: str, **options: Any) -> httpx.Response:
        return self.send("GET", path, **options)

    def post(self, path: str, fields: dict[str, str], **options: Any) -> httpx.Response:
        return self.send("POST", path, data=fields, **options)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Sec-Fetch-Site": self.site} if self.site else {}
        headers |= options.pop("headers", {})
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = self.service.call(method, path, None, headers=headers, **options)
        for text in answer.headers.get_list("set-cookie"):
            name, _, value = text.partition(";")[0].partition("=")
            if "max-age=0" in text.lower():
                self.cookies = httpx.Cookies({k: v for k, v in self.cookies.items() if k != name})
            else:
                self.cookies.set(name, value)
        return answer

    def form_token(self) -> str:
        """The token that forms of this session carry."""
        found = re.search(r'name="form_token" value="([0-9a-f]{64})"', self.open("/console").text)
        assert found is not None
        return found[1]


def link_of(service: Service, client: str = "alice") -> str:
    """A new link that signs in, as the client makes it."""
    answer = service.call("POST", "/v1/sign-in-links", client)
    assert answer.status_code == 200, answer.text
    return answer.json()["url"]


def signed_in(
    service: Service, preset: str = "admin", client: str = "alice", **more: str
) -> Browser:
    """A browser that has signed in by a new key with the scopes of a preset."""
    headers = service.key_headers(client, PRESETS[preset])
    browser = Browser(service)
    key = headers["Authorization"].removeprefix("Bearer ")
    answer = browser.post("/console/sign-in", {"client_id": client, "key": key, **more})
    assert answer.status_code == 303, answer.text
    return browser


class Follower:
    """Reads the events of one open page."""

    def __init__(self, browser: Browser, page: str) -> None:
        self._browser, self._page = browser, page

    async def __aenter__(self) -> "Follower":
        service = self._browser.service
        cookies = "; ".join(f"{name}={value}" for name, value in self._browser.cookies.items())
        self._http = httpx.AsyncClient(base_url=service.url, timeout=PATIENCE_S, trust_env=False)
        request = self._http.build_request(
            "GET", f"/console/live?page={self._page}", headers={"Cookie": cookies}
        )
        self.answer = await self._http.send(request, stream=True)
        self._lines = self.answer.aiter_lines()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.answer.aclose()
        await self._http.aclose()

    async def next(self) -> tuple[str, str]:
        """The kind and the text of the next event."""
        kind, texts = "", []
        async for line in self._lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                texts.append(line.removeprefix("data: "))
            elif line == "" and kind:
                return kind, "\n".join(texts)
        return "closed", ""


class Markup(HTMLParser):
    """The parts of a page: its tags with their attributes, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def links(self) -> list[str]:
        """The addresses of links and forms within the console."""
        found = [one.get("href") or one.get("action") for _, one in self.tags]
        return [urlsplit(one).path for one in found if one and one.startswith("/console")]


class Form(HTMLParser):
    """The fields that a browser would send with the form of an action."""

    def __init__(self, page: str, action: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self._action, self._is_inside, self._select = action, False, ""
        self._is_chosen = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name, value = given.get("name") or "", given.get("value") or ""
        if tag == "form":
            self._is_inside = given.get("action") == self._action
        elif tag == "select":
            self._select = name
        elif tag == "option":
            self._is_chosen = self._is_inside and "selected" in given and "value" not in given
            # Without a choice a browser sends the first one.
            if self._is_inside and ("selected" in given or self._select not in self.fields):
                self.fields[self._select] = value
        elif (
            tag == "input"
            and self._is_inside
            and (given.get("type") != "checkbox" or "checked" in given)
        ):
            self.fields[name] = value

    def handle_data(self, data: str) -> None:
        if self._is_chosen:
            self.fields[self._select], self._is_chosen = data, False
