"""One HTTP connection: uvicorn's protocol, plus a limit on the wait for a request's head and our own error body.

The HTTP server has no such limit and answers what it cannot read with plain text. Everything behind the head is the
border's (`service/http/`); how long a body may take is in `service/body.py`.
"""

import asyncio
import json
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tuneship.contract.errors import InvalidRequestError
from tuneship.store.identifiers import new_id

HEAD_S = 10.0
"""From the first byte of a head (or from connecting) to its end."""
TOGETHER_BYTES = 64 << 10
"""What is longer is written at once, so that the server feels when the caller does not keep up."""
LINGER_S = 2.0
"""How long a refused caller may go on sending before the connection is cut."""


class _Lingering:
    """A transport whose `close` lets the caller read the answer: closing over unread bytes would reset the connection.

    RFC 9112 section 9.6: close the writing side, read on for a while, then close. What is written in one turn of the
    event loop goes out at once: the server writes the head and the body of an answer one after the other, and each
    write costs the caller a wakening.
    """

    def __init__(self, connection: "Connection", transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._unsent = b""
        self.has_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.has_closed or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self.has_closed:
            return
        if data and not self._unsent:
            self._connection.loop.call_soon(self._flush)
        self._unsent += data
        if len(self._unsent) > TOGETHER_BYTES:
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent)

    def close(self) -> None:
        if self.is_closing():
            return
        self._flush()
        self.has_closed = True
        is_sending = self._connection.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not is_sending or not self._transport.can_write_eof():  # TLS has no half-close
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._connection.loop.call_later(LINGER_S, self._transport.close)


class Connection(H11Protocol):
    """Ends a connection whose head does not come: with 408 after a part of one, silently after nothing."""

    head_s = HEAD_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*arguments, **options)
        self._impatience: asyncio.TimerHandle | None = None
        self._has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock runs from connecting."""
        self._lingering = _Lingering(self, transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A head that begins on a kept connection starts the clock; a whole head stops it."""
        if self._lingering.has_closed:
            return
        self._has_begun = True
        if self._impatience is None and self._is_between_requests():
            self._wait_for_head()
        super().data_received(data)
        if not self._is_between_requests():
            self._stop_waiting()

    def _is_between_requests(self) -> bool:
        cycle: Any = self.cycle  # none before the first request, whatever its annotation says
        return cycle is None or cycle.response_complete

    def _wait_for_head(self) -> None:
        self._impatience = self.loop.call_later(self.head_s, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None
        self._has_begun = False

    def _head_is_late(self) -> None:
        self._impatience = None
        if self.transport.is_closing() or not self._is_between_requests():
            return
        if self._has_begun:
            self._refuse(InvalidRequestError("the headers did not come in time", status=408))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the parser's own words stay inside
        """What is no HTTP gets the one error body."""
        self._stop_waiting()
        self._refuse(InvalidRequestError("the request is not readable as HTTP/1.1"))

    def _refuse(self, error: InvalidRequestError) -> None:
        request_id = new_id("req")
        body = json.dumps(error.as_json(request_id)).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("X-Request-ID", request_id),
            ("X-Should-Retry", "true" if error.retryable else "false"),
            ("Connection", "close"),
        ]
        head = h11.Response(status_code=error.status, headers=headers)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
