"""Connects to a receiver: resolves its name once, checks every address, and connects to one of the checked addresses.

Resolving, checking and then connecting by name would be open to DNS rebinding: the name could resolve to another
address the second time.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpcore

from tuneship.events.addresses import AddressRules, ReceiverAddress

T = TypeVar("T")
# Resolves host and port to IP addresses, none if the name does not exist. Blocks.
Resolver = Callable[[str, int], Sequence[str]]
# How many names are resolved for requests at the same time: slow ones must not occupy the threads of all requests.
LOOKUPS = 4


class TooManyLookups(Exception):
    """The names of too many other requests are being resolved."""


def resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a name with the system's resolver, in its order of preference."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a label of 64 characters is a UnicodeError
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


@dataclass(frozen=True)
class Receivers:
    """Rules and resolver, which together decide whether a receiver may be called."""

    rules: AddressRules
    resolve: Resolver = resolve
    _room: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(LOOKUPS)
    )

    def check(self, url: str) -> None:
        """Check a URL that a client registers; blocks while its name is resolved.

        Raises `TargetRefused`, `TooManyLookups`.
        """
        target = self.rules.target(url)
        if not self._room.acquire(blocking=False):
            raise TooManyLookups
        try:
            self.addresses(target)
        finally:
            self._room.release()

    def addresses(self, target: ReceiverAddress) -> Sequence[str]:
        """Resolve and check the addresses of a receiver; blocks. Raises `TargetRefused`."""
        addresses = self.resolve(target.host, target.port)
        self.rules.check(target, addresses)
        return addresses


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only to checked addresses of one target; `Host` and TLS still use the name in the URL."""

    def __init__(
        self, receivers: Receivers, target: ReceiverAddress, network: httpcore.AsyncNetworkBackend
    ) -> None:
        """Connect through `network`."""
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
        failure: Exception = httpcore.ConnectError("no address")
        addresses = await run_in_own_thread(lambda: self._receivers.addresses(self._target))
        for address in addresses:
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


async def run_in_own_thread(work: Callable[[], T]) -> T:
    """Run a blocking function in a new daemon thread; return its result or raise its error.

    Resolving some names takes half a minute, which must neither occupy the service's thread pools nor delay its end.
    """
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
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failure = error
        with suppress(RuntimeError):  # the event loop may be closed by now
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True, name="webhook-resolver").start()
    return await done
