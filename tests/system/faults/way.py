"""Hooks on the client's side: they count tries, misdirect some requests before the proxy, and record pauses.

They use the two extension points of the client: its transport and the one method that waits.
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
# Seconds to wait for a connection or an answer that is known not to come.
PATIENCE_S = 1.0
ACTS_WITHIN_S = 120.0


class WatchedTransport(httpx.HTTPTransport):
    """A transport that counts and disturbs one kind of request; all others pass uncounted."""

    def __init__(self) -> None:
        """Watch no requests yet."""
        super().__init__()
        self.tries = 0
        self._method, self._path = "", re.compile("")
        self._detours: list[Detour] = []
        self._for_ever = False
        self._given_up: list[threading.Event | None] = []

    def watch(self, method: str, path: str) -> None:
        """Start counting the requests of this method whose whole path matches."""
        self._method, self._path, self.tries = method, re.compile(path), 0
        self._detours, self._for_ever, self._given_up = [], False, []

    def lead_astray(self, detours: Sequence[Detour], for_ever: bool = False) -> None:
        """Apply these detours to the next watched tries, one each; with `for_ever` the first one applies to all."""
        self._detours, self._for_ever = list(detours), for_ever

    def give_up_soon(self, acted: threading.Event | None = None) -> None:
        """Give up on the answer to the next watched try, but not before the service acted."""
        self._given_up = [acted]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Handle a request from httpx."""
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
    """Addresses on this host at which no server answers."""

    def __enter__(self) -> "Nowhere":
        """Bind the ports."""
        self._resources = ExitStack()
        closed = self._resources.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # without `listen`, connections are refused
        self._closed = closed.getsockname()[1]
        full = self._resources.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        self._full = full.getsockname()[1]
        for _ in range(4):  # fill the queue, so that the SYN of the next connection is dropped
            waiting = self._resources.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(("127.0.0.1", self._full))
        return self

    def __exit__(self, *_: object) -> None:
        """Free the ports."""
        self._resources.close()

    def refused(self, request: httpx.Request) -> None:
        """Send the request to a port that refuses connections."""
        request.url = request.url.copy_with(port=self._closed)

    def silent(self, request: httpx.Request) -> None:
        """Send the request to a port where the connection times out."""
        request.extensions["timeout"]["connect"] = PATIENCE_S
        request.url = request.url.copy_with(port=self._full)


def unknown_name(request: httpx.Request) -> None:
    """Send the request to a host name that DNS does not know (RFC 6761)."""
    request.url = request.url.copy_with(host="tuneship.invalid")


def without_tls(port: int) -> Detour:
    """Return a detour that speaks TLS to the service's own port, which has none."""

    def detour(request: httpx.Request) -> None:
        request.url = request.url.copy_with(scheme="https", port=port)

    return detour


def noting_client(
    settings: ClientSettings, transport: WatchedTransport, waited: list[float]
) -> Client:
    """Return a client that records its pauses in `waited` instead of waiting."""

    class NotingClient(Client):
        @staticmethod
        def _wait(pause: Pause) -> None:
            waited.append(pause.seconds)

    return NotingClient(settings, transport=transport)
