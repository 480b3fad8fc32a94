"""One HTTP connection: uvicorn's protocol with timeouts for every wait, and with the API's own error body.

uvicorn waits forever for a request head, for the rest of a body that was answered early and for a reader who reads
nothing, and it answers unreadable requests with plain text. Here every connection ends, whatever it sends and whatever
state the parser is in: `end_if_overdue` is called once a second and decides by events and times only. The timeout of a
body that is being read is in `body_timeout.py`, the number of connections in `open_connections.py`.
"""

import asyncio
import json
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tuneship.contract.errors import InvalidRequestError
from tuneship.service.http.forwarding import IS_DECLARED, PEER
from tuneship.service.http.sockets.open_connections import OpenConnections
from tuneship.store.database.identifiers import new_id

# The key of a request's state under which its `Connection` is found.
CONNECTION = "connection"
# The parser reads more of a head than the boundary accepts, so that the refusal can name the cause.
MAX_HEAD_BYTES = 32 << 10
# Longer output is not collected, so that the server notices when the caller does not keep up.
WRITE_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True)
class ConnectionTimeouts:
    """The seconds that each phase of a connection may take."""

    # From connecting, or from the first byte after an answer, to the end of a request's head. Also for the rest of a
    # body that was answered before it had come, and for the handshake of TLS.
    head_s: float = 10.0
    # Between two requests. Clients keep an idle connection for less (httpx: 5 s): so they close first, and no request
    # meets a connection that was just closed.
    keep_alive_s: float = 15.0
    # For all requests together of a connection whose last one had no valid key.
    keyless_s: float = 60.0
    # For an answer of which the caller reads nothing. A stream that is read may take any time.
    unread_s: float = 30.0
    # For a refused caller to go on sending before the connection is cut.
    linger_s: float = 2.0


class _LingeringTransport:
    """A transport whose `close` lets the caller read the answer: closing over unread bytes would reset the connection.

    RFC 9112 section 9.6: close the writing side, read on for a while, then close. The head and the body of an answer,
    which the server writes one after the other, are sent together at the end of the event loop's iteration: each
    packet would wake the caller.
    """

    def __init__(self, connection: "Connection", transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._unsent = b""
        self._written = 0
        self.has_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def unread_bytes(self) -> int:
        """Bytes that still wait for the caller to read them."""
        return self._transport.get_write_buffer_size()

    @property
    def read_bytes(self) -> int:
        """Bytes that the caller's side has accepted since the connection began."""
        return self._written - self.unread_bytes

    def is_closing(self) -> bool:
        return self.has_closed or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self.has_closed:
            return
        if data and not self._unsent:
            self._connection.loop.call_soon(self._flush)
        self._unsent += data
        if len(self._unsent) > WRITE_BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._written += len(unsent)
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
        self._connection.loop.call_later(self._connection.timeouts.linger_s, self._transport.close)


class Connection(H11Protocol):
    """One connection of a caller, from its acceptance on; with TLS it has no transport until the handshake is done."""

    def __init__(
        self,
        open_connections: OpenConnections,
        *,
        is_declared: bool,
        timeouts: ConnectionTimeouts,
        **options: Any,
    ) -> None:
        """`is_declared`: the other end is a declared proxy. `options`: the arguments of uvicorn's protocol."""
        super().__init__(**options)
        self.timeouts = timeouts
        # Makes the transport; set by the server that accepted the connection.
        self.opening: asyncio.Task[Any] | None = None
        self._open_connections = open_connections
        self._is_declared = is_declared
        # Whether the last request had a valid key; one of a declared proxy's connections counts as if it had.
        self._has_key = is_declared
        now = self.loop.time()
        self._accepted_at = self._answered_at = self._read_at = now
        # When the wait for the present head, or for the rest of a body, began; None while nothing is awaited.
        self._head_began_at: float | None = now
        self._closing_at: float | None = None
        self._read_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Put the facts that the boundary needs into the state of the connection's requests."""
        # With TLS the default is 512 KiB for each connection.
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._lingering = _LingeringTransport(self, transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        own = {CONNECTION: self, PEER: self.client, IS_DECLARED: self._is_declared}
        self.app_state = {**self.app_state, **own}
        self._head_began_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._open_connections.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data. The first byte after an answer starts the timeout of the next head; a complete head stops it."""
        if self._lingering.has_closed:
            return
        if self._head_began_at is None and self._is_between_requests:
            self._head_began_at = self.loop.time()
        super().data_received(data)
        if not self._is_between_requests and self._has_key:
            # Finding the caller may take a thread: until then the key of the request before counts.
            self._open_connections.protect(self)
        if not self._is_between_requests or self._is_input_complete:
            self._head_began_at = None

    def on_response_complete(self) -> None:
        """Start the timeout for the rest of a body that was answered early, or for the next request."""
        self._answered_at = self.loop.time()
        super().on_response_complete()  # it may begin the next request, which has come already
        if self._is_between_requests:
            self._head_began_at = None if self._is_input_complete else self._answered_at
            self._open_connections.release(self, has_key=self._has_key)

    def show_key(self, *, is_valid: bool) -> None:
        """Note whether the request in flight has a valid key. Called by the boundary."""
        self._has_key = is_valid or self._is_declared
        if self._has_key:
            self._open_connections.protect(self)
        else:
            self._open_connections.release(self, has_key=False)

    @property
    def _is_between_requests(self) -> bool:
        cycle: Any = self.cycle  # none before the first request, whatever its annotation says
        return cycle is None or cycle.response_complete

    @property
    def _is_input_complete(self) -> bool:
        """Whether the caller has sent every byte of what it began."""
        return self.conn.their_state is not h11.SEND_BODY and not self.conn.trailing_data[0]

    def end_if_overdue(self) -> None:
        """End the connection when a timeout has passed. Called once a second."""
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison] - TLS has a time limit of its own
            return
        now, timeouts = self.loop.time(), self.timeouts
        if self._is_stuck(now):
            self.cut()
        elif self._lingering.is_closing():
            return
        elif self._is_between_requests:
            began = self._head_began_at
            is_trusted = self._has_key or now - self._accepted_at <= timeouts.keyless_s
            is_idle = began is None and now - self._answered_at > timeouts.keep_alive_s
            if began is not None and now - began > timeouts.head_s:
                # A part of a head gets an answer, silence gets none.
                if self.conn.trailing_data[0]:
                    text = "the headers did not come in time"
                    self._refuse(InvalidRequestError(text, status=408))
                else:
                    self.transport.close()
            elif not is_trusted or is_idle:
                self.transport.close()

    def _is_stuck(self, now: float) -> bool:
        """Whether the caller has read nothing for too long, or does not complete the close."""
        lingering, timeouts = self._lingering, self.timeouts
        if lingering.is_closing() and self._closing_at is None:
            self._closing_at = now
        if not lingering.unread_bytes or lingering.read_bytes != self._read_bytes:
            self._read_bytes, self._read_at = lingering.read_bytes, now
        is_unread = now - self._read_at > timeouts.unread_s
        is_half_closed = (
            self._closing_at is not None
            and not lingering.unread_bytes
            and now - self._closing_at > timeouts.unread_s
        )
        keyless_s = timeouts.keyless_s + timeouts.unread_s
        is_old = not self._has_key and now - self._accepted_at > keyless_s
        return is_unread or is_old or is_half_closed

    def cut(self) -> None:
        """End the connection now: nothing more is sent or read."""
        if self.transport is not None:  # pyright: ignore[reportUnnecessaryComparison] - none before the handshake
            # Otherwise the kernel keeps the unread bytes and tries to deliver them for minutes.
            reset_now = struct.pack("ii", 1, 0)
            with suppress(OSError):
                self.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, reset_now
                )
            self._lingering.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def shutdown(self) -> None:
        """Close at the end of the service; uvicorn's own method fails where the parser is in a state of error."""
        if self._is_between_requests:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: uvicorn's timer stops after a single byte, so `end_if_overdue` does its work."""

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: uvicorn would log two lines for each request for another protocol."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the parser's text is not sent
        """Answer a request that is not HTTP with the API's error body."""
        if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            self._refuse(InvalidRequestError("the headers are larger than 16 KiB", status=431))
        else:
            self._refuse(InvalidRequestError("the request is not readable as HTTP/1.1"))

    def _refuse(self, error: InvalidRequestError) -> None:
        """Answer if no answer has begun, and close in any case."""
        request_id = new_id("req")
        body = json.dumps(error.as_json(request_id)).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("X-Request-ID", request_id),
            ("X-Should-Retry", "true" if error.retryable else "false"),
            ("Connection", "close"),
        ]
        try:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                head = h11.Response(status_code=error.status, headers=headers)
                for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
        finally:
            if not self._is_between_requests:
                # The handler of the request sees a disconnect and stops its work.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()
