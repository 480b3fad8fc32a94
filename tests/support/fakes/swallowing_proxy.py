"""A proxy that can begin to swallow what either side sends, as a cut network does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from anyio.from_thread import start_blocking_portal

BLOCK = 1 << 16


class SwallowingProxy:
    """Passes bytes on until `cuts` is set; then it still reads, and closes nothing.

    When `cuts` is cleared, new connections pass again. Those of which something was swallowed never do.
    """

    def __init__(self, host: str, port: int) -> None:
        """Pass on to this address."""
        self._target = host, port
        self._writers: list[asyncio.StreamWriter] = []
        self.cuts = asyncio.Event()
        # Bytes that went to the target.
        self.passed = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[str, int]]:
        """Listen, and yield the address at which the proxy is reached."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield host, port
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            await server.wait_closed()

    @contextmanager
    def in_thread(self) -> Iterator[tuple[str, int]]:
        """Listen in a thread of its own, for a test that runs no event loop."""
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(self.listening()) as address,
        ):
            yield address

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection(*self._target)
        except ConnectionError:  # the target is gone
            back.close()
            return
        self._writers += [back, forth]
        swallowed = asyncio.Event()
        await asyncio.gather(
            self._pass_on(near, forth, swallowed, is_forth=True),
            self._pass_on(far, back, swallowed, is_forth=False),
        )

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        swallowed: asyncio.Event,
        *,
        is_forth: bool,
    ) -> None:
        try:
            while data := await reader.read(BLOCK):
                if self.cuts.is_set():
                    swallowed.set()
                if not swallowed.is_set():
                    writer.write(data)
                    await writer.drain()
                    self.passed += len(data) if is_forth else 0
        except ConnectionError:
            pass
        if not self.cuts.is_set():
            writer.close()
