"""Run the same calls on the blocking and on the asynchronous client, over a transport that the test plays."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
from pydantic import SecretStr

from tuneship.client import AsyncClient, Client
from tuneship.settings import ClientSettings

SETTINGS = ClientSettings(
    url="http://service.test/v1/", api_key=SecretStr("k"), client_id="c", tries=3
)
Handler = Callable[[httpx.Request], httpx.Response]


def both(handler: Handler, use: Callable[[Any], Any]) -> list[Any]:
    """Return the result of one call from each client."""
    with Client(SETTINGS, httpx.MockTransport(handler)) as client:
        first = use(client)

    async def run() -> Any:
        async with AsyncClient(SETTINGS, httpx.MockTransport(handler)) as client:
            return await use(client)

    return [first, asyncio.run(run())]


def both_lists(handler: Handler, use: Callable[[Any], Any]) -> list[list[Any]]:
    """Return, for each client, the list of everything that one iterator yields."""

    async def gathered(client: Any) -> list[Any]:
        return [one async for one in use(client)]

    return both(
        handler,
        lambda client: list(use(client)) if isinstance(client, Client) else gathered(client),
    )


class StreamedAnswer(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A streamed answer: it sends its blocks, then ends or breaks off."""

    def __init__(self, *blocks: bytes, breaks: bool = False) -> None:
        self._blocks = blocks
        self._breaks = breaks
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from self._blocks
        if self._breaks:
            raise httpx.ReadError("cut")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for block in self:
            yield block

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1
