"""Sends a `Download`: reads blocks in a thread, as fast as the caller receives them."""

import asyncio
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tuneship.service.answers.downloads import Download
from tuneship.service.context.context import Context
from tuneship.service.context.operation_calls import KeyEnd
from tuneship.service.http.disconnect import send_while_connected


class DownloadResponse(Response):
    """The answer to one request for an archive or a file."""

    def __init__(
        self,
        context: Context,
        download: Download,
        slot: AbstractContextManager[object],
        key_end: KeyEnd,
    ) -> None:
        """Close the download after the last byte, when its reader disconnects, or at `key_end`.

        `slot` is held until then.
        """
        self._download = download
        self._slot = slot
        self._key_end = key_end
        headers = {
            "Content-Disposition": f'attachment; filename="{download.file_name}"',
            "Cache-Control": "no-store",
        }
        super().__init__(headers={**context.headers, **headers}, media_type=download.media)
        self.headers["content-length"] = str(download.length)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send it until it ends, its reader disconnects or the key ends: then the connection breaks."""
        try:
            with self._slot:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await send_while_connected(self._send(send), receive, self._key_end())
        finally:
            self._download.close()

    async def _send(self, send: Send) -> None:
        blocks = self._download.blocks()
        while block := await asyncio.to_thread(next, blocks, b""):
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
