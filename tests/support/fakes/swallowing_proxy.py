"""A proxy in front of an agent, which can begin to swallow what either side sends, as a cut network does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tuneship.runtime.agent_protocol import AgentAddress

BLOCK = 1 << 16


class SwallowingProxy:
    """Passes bytes on until `cuts` is set; then it still reads, and closes nothing."""

    def __init__(self, target: AgentAddress) -> None:
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self.cuts = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[AgentAddress]:
        """Listen, and yield the address by which the agent is reached through the proxy."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield replace(self._target, host=host, port=port)
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            await server.wait_closed()

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += [back, forth]
        await asyncio.gather(self._pass_on(near, forth), self._pass_on(far, back))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(BLOCK):
                if not self.cuts.is_set():
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            pass
        if not self.cuts.is_set():
            writer.close()
