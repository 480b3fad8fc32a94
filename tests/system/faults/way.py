"""The client's side of the wire: tries are counted, some are led astray before they reach the proxy, pauses are noted.

All of it by the client's own seams: a transport, and the one method that waits.
"""

import re
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import httpx

from tuneship.client import Client
from tuneship.client.core import Pause
from tuneship.settings import ClientSettings

Detour = Callable[[httpx.Request], None]
PATIENCE_S = 1.0
"""For a connection, or an answer, that is known not to come."""
ACTS_WITHIN_S = 120.0


class Way(httpx.HTTPTransport):
    """One watched kind of request; all others pass and are not counted."""

    def __init__(self) -> None:
        """Watch nothing."""
        super().__init__()
        self.tries = 0
        self._method, self._path = "", re.compile("")
        self._detours: list[Detour] = []
        self._for_ever = False
        self._given_up: list[threading.Event | None] = []

    def watch(self, method: str, path: str) -> None:
        """Count from now on the requests of this method whose path matches as a whole."""
        self._method, self._path, self.tries = method, re.compile(path), 0
        self._detours, self._for_ever, self._given_up = [], False, []

    def lead_astray(self, detours: Sequence[Detour], for_ever: bool = False) -> None:
        """The next watched tries, in turn; the last one for ever where it is said so."""
        self._detours, self._for_ever = list(detours), for_ever

    def give_up_soon(self, acted: threading.Event | None = None) -> None:
        """The answer to the next watched try does not come: stop waiting for it, but not before the service acted."""
        self._given_up = [acted]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx calls it."""
        if request.method == self._method and self._path.fullmatch(request.url.path):
            self.tries += 1
            if self._detours:
                self._detours[0](request)
                del self._detours[: 0 if self._for_ever else 1]
            if self._given_up:
                return self._give_up(request, self._given_up.pop())
        return super().handle_request(request)

    def _give_up(self, request: httpx.Request, acted: threading.Event | None) -> httpx.Response:
        request.extensions["timeout"]["read"] = PATIENCE_S
        try:
            return super().handle_request(request)
        except httpx.ReadTimeout:
            assert acted is None or acted.wait(ACTS_WITHIN_S)
            raise


class Nowhere:
    """Addresses of this host at which nobody answers."""

    def __enter__(self) -> "Nowhere":
        """Bind them."""
        self._opened = ExitStack()
        closed = self._opened.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # without `listen`: refused
        self._closed = closed.getsockname()[1]
        full = self._opened.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        self._full = full.getsockname()[1]
        for _ in range(4):  # its queue is full: the next one's SYN is dropped
            waiting = self._opened.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(("127.0.0.1", self._full))
        return self

    def __exit__(self, *_: object) -> None:
        """Free them."""
        self._opened.close()

    def refused(self, request: httpx.Request) -> None:
        """Nobody listens."""
        request.url = request.url.copy_with(port=self._closed)

    def silent(self, request: httpx.Request) -> None:
        """The connection does not come about in time."""
        request.extensions["timeout"]["connect"] = PATIENCE_S
        request.url = request.url.copy_with(port=self._full)


def unknown_name(request: httpx.Request) -> None:
    """A name that DNS does not know (RFC 6761)."""
    request.url = request.url.copy_with(host="tuneship.invalid")


def without_tls(port: int) -> Detour:
    """TLS is asked of who does not speak it: the service itself."""

    def detour(request: httpx.Request) -> None:
        request.url = request.url.copy_with(scheme="https", port=port)

    return detour


def noting_client(settings: ClientSettings, way: Way, waited: list[float]) -> Client:
    """A client that writes its pauses down instead of waiting."""

    class NotingClient(Client):
        @staticmethod
        def _wait(pause: Pause) -> None:
            waited.append(pause.seconds)

    return NotingClient(settings, transport=way)
