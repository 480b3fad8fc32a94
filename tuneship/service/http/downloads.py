"""Sends a `TarStream`: block by block from a thread, as fast as its reader takes them."""

import asyncio
from contextlib import AbstractContextManager, nullcontext

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tuneship.service.common.tar_stream import TarStream
from tuneship.service.context.context import Context
from tuneship.service.http.disconnect import send_while_connected

MEDIA = "application/x-tar"


class DownloadResponse(Response):
    """The answer to one request for an archive."""

    def __init__(self, context: Context, archive: TarStream) -> None:
        """The archive is closed with the last byte, or when its reader has gone."""
        self._archive = archive
        self.slot: AbstractContextManager[object] = nullcontext()
        """Held until the archive is closed."""
        headers = {
            "Content-Disposition": f'attachment; filename="{archive.name}.tar"',
            "Cache-Control": "no-store",
        }
        super().__init__(headers={**context.headers, **headers}, media_type=MEDIA)
        self.headers["content-length"] = str(archive.length)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the archive until it ends or its reader disconnects."""
        try:
            with self.slot:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await send_while_connected(self._send(send), receive)
        finally:
            self._archive.close()

    async def _send(self, send: Send) -> None:
        blocks = self._archive.blocks()
        while block := await asyncio.to_thread(next, blocks, b""):
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
