"""Connects to a receiver: resolves its name once, checks every answer, and connects to a checked literal address.

"Resolve, check, then connect by name" would fall to a name that answers differently the second time (DNS rebinding).
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpcore

from tuneship.events.addresses import AddressRules, ReceiverAddress

T = TypeVar("T")
# Host and port to IP addresses; empty when the name does not exist. Blocks.
Resolver = Callable[[str, int], Sequence[str]]
# Names that are looked up for callers at the same time: sick ones must not take the threads of
# all requests.
LOOKUPS = 4


class TooManyLookups(Exception):
    """Other callers' names are being looked up."""


def resolve(host: str, port: int) -> Sequence[str]:
    """What the system's resolver says, in its order of preference."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a label of 64 characters is a UnicodeError
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True)
class Receivers:
    """Rules and resolver: the one answer to whether a receiver may be called."""

    rules: AddressRules
    resolve: Resolver = resolve
    _room: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(LOOKUPS)
    )

    def check(self, url: str) -> None:
        """At registration. Blocks while the name is resolved. Raises `TargetRefused`, `TooManyLookups`."""
        target = self.rules.target(url)
        if not self._room.acquire(blocking=False):
            raise TooManyLookups
        try:
            self.addresses(target)
        finally:
            self._room.release()

    def addresses(self, target: ReceiverAddress) -> Sequence[str]:
        """The checked addresses of a receiver. Blocks. Raises `TargetRefused`."""
        found = self.resolve(target.host, target.port)
        self.rules.check(target, found)
        return found


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only to checked addresses of one target; the URL's name stays in `Host` and in TLS."""

    def __init__(
        self, receivers: Receivers, target: ReceiverAddress, network: httpcore.AsyncNetworkBackend
    ) -> None:
        """`network` makes the connections."""
        self._receivers = receivers
        self._target = target
        self._network = network

    async def connect_tcp(
        self,
        host: str,  # noqa: ARG002 - a name; the checked addresses are used in its place
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first checked address that answers. Raises `TargetRefused`, httpcore's `ConnectError`."""
        look_up = partial(self._receivers.addresses, self._target)
        failure: Exception = httpcore.ConnectError("no address")
        for address in await in_thread_of_its_own(look_up):
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


async def in_thread_of_its_own(work: Callable[[], T]) -> T:
    """Look-ups of sick names last half a minute: they must neither fill the service's threads nor delay its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True, name="webhook-resolver").start()
    return await done
