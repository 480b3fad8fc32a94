"""One HTTP connection: uvicorn's protocol, plus an end to every wait, and our own error body.

The HTTP server waits for ever for a head, for the rest of a body that was answered early and for a reader who takes
nothing, and it answers what it cannot read with plain text. Here every connection ends, whatever it sends and
whatever state the parser is in: `end_if_overdue` is called once a second and looks at nothing but what has happened
and when. How long a body may take that is being read is in `service/body.py`; how many connections there may be is in
`service/open_connections.py`.
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
from tuneship.service.http.open_connections import KeepPriority, OpenConnections
from tuneship.store.identifiers import new_id

# In a request's state: its `Connection`.
CONNECTION = "connection"
# What is read of a head that comes in pieces: more than the boundary takes, so that it can say what
# is wrong.
HEAD_LIMIT = 32 << 10
# What is longer is written at once, so that the server feels when the caller does not keep up.
TOGETHER_BYTES = 64 << 10


@dataclass(frozen=True)
class Waits:
    """How many seconds each thing may take."""

    head_s: float = 10.0
    """From connecting, or from the first byte after an answer, to the end of a request's head. Also for the rest of a
    body that was answered before it had come, and for the handshake of TLS."""
    keep_alive_s: float = 15.0
    """Between two requests. Clients keep an idle connection for less (httpx: 5 s): so they close first, and no request
    meets a connection that was just closed."""
    keyless_s: float = 60.0
    """All requests together of a connection whose last one has shown no valid key."""
    unread_s: float = 30.0
    """For an answer of which the caller takes nothing. A stream that is read may take any time."""
    grace_s: float = 1.0
    """From connecting, or from an answer, until the connection may be ended to make room: long enough to send a
    request. Newcomers wait so long, and a caller that connects again and again gets no further."""
    linger_s: float = 2.0
    """For a refused caller to go on sending before the connection is cut."""


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
        self._written = 0
        self.has_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def untaken(self) -> int:
        """Bytes that still wait for the caller to take them."""
        return self._transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        """Bytes that the caller's side has taken since the connection began."""
        return self._written - self.untaken

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
        self._connection.loop.call_later(self._connection.waits.linger_s, self._transport.close)


class Connection(H11Protocol):
    """One connection of a caller, from its acceptance on; with TLS it has no transport until the handshake is done."""

    waits = Waits()

    def __init__(self, open_connections: OpenConnections, *, is_declared: bool, **options: Any):
        """`is_declared`: the other end is a declared proxy. `options`: as uvicorn makes its protocol."""
        super().__init__(**options)
        self.opening: asyncio.Task[Any] | None = None
        """Makes the transport; set by who accepted the connection."""
        self._open_connections = open_connections
        self._is_declared = is_declared
        self._has_key = is_declared
        now = self.loop.time()
        self._accepted = self._answered = self._taken_at = now
        self._begun: float | None = now
        """When the wait for the present head, or for the rest of a body, began; None while nothing is to come."""
        self._closing: float | None = None
        self._taken = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note what the boundary has to know of the connection."""
        transport.set_write_buffer_limits(high=TOGETHER_BYTES)  # TLS: 512 KiB of each connection
        self._lingering = _Lingering(self, transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        own = {CONNECTION: self, PEER: self.client, IS_DECLARED: self._is_declared}
        self.app_state = {**self.app_state, **own}
        self._begun = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """It counts no more."""
        self._open_connections.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The first byte after an answer starts the clock for the next head; a whole head stops it."""
        if self._lingering.has_closed:
            return
        if self._begun is None and self._is_between_requests:
            self._begun = self.loop.time()
        super().data_received(data)
        if not self._is_between_requests:
            self._begun = None
            if self._has_key:
                self._open_connections.claim(self, KeepPriority.BUSY)
        elif self._nothing_is_to_come:
            self._begun = None

    def on_response_complete(self) -> None:
        """The rest of a body that was answered early has to come soon, the next head in a while."""
        self._answered = self.loop.time()
        super().on_response_complete()  # it may begin the next request, which waits already
        if self._is_between_requests:
            self._begun = None if self._nothing_is_to_come else self._answered
            claim = KeepPriority.IDLE if self._has_key else KeepPriority.STRANGER
            self._open_connections.claim(self, claim)

    def show_key(self, *, is_valid: bool) -> None:
        """Called by the boundary when it has looked at the key of the request that is under way."""
        if not self._is_declared:
            self._has_key = is_valid
            claim = KeepPriority.BUSY if is_valid else KeepPriority.STRANGER
            self._open_connections.claim(self, claim)

    @property
    def _is_between_requests(self) -> bool:
        cycle: Any = self.cycle  # none before the first request, whatever its annotation says
        return cycle is None or cycle.response_complete

    @property
    def _nothing_is_to_come(self) -> bool:
        """Whether the caller has sent all of what it began, and may take its time before it sends more."""
        return self.conn.their_state is not h11.SEND_BODY and not self.conn.trailing_data[0]

    def end_if_overdue(self) -> None:
        """Called once a second."""
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison] - TLS has a time limit of its own
            return
        now, waits = self.loop.time(), self.waits
        if self._is_stuck(now):
            self.cut()
        elif self._lingering.is_closing():
            return
        elif self._is_between_requests:
            begun = self._begun
            is_known = self._has_key or now - self._accepted <= waits.keyless_s
            if begun is not None and now - begun > waits.head_s:
                self._head_is_late()
            elif not is_known or (begun is None and now - self._answered > waits.keep_alive_s):
                self.transport.close()

    def _is_stuck(self, now: float) -> bool:
        """Whether waiting longer is of no use: to be asked regularly."""
        lingering, waits = self._lingering, self.waits
        if lingering.is_closing() and self._closing is None:
            self._closing = now
        if not lingering.untaken or lingering.taken != self._taken:
            self._taken, self._taken_at = lingering.taken, now
        is_unread = now - self._taken_at > waits.unread_s
        is_gone = self._closing is not None and not lingering.untaken
        is_old = not self._has_key and now - self._accepted > waits.keyless_s + waits.unread_s
        return is_unread or is_old or (is_gone and now - (self._closing or now) > waits.unread_s)

    def cut(self) -> None:
        """End it now: nothing more is sent or read."""
        if self.transport is not None:  # pyright: ignore[reportUnnecessaryComparison] - none before the handshake
            # Or the kernel would keep what was not read, and try to deliver it for minutes.
            at_once = struct.pack("ii", 1, 0)
            with suppress(OSError):
                self.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, at_once
                )
            self._lingering.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def grace_s(self) -> float:
        """Seconds until it may be ended to make room."""
        return max(0.0, self._answered + self.waits.grace_s - self.loop.time())

    def shutdown(self) -> None:
        """Called when the service ends; the server's own way fails where the parser is in a state of error."""
        if self._is_between_requests:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Left to `end_if_overdue`: the server's own timer is gone after a single byte."""

    def _unsupported_upgrade_warning(self) -> None:
        """The server would log two lines for each request that asks for another protocol."""

    def _head_is_late(self) -> None:
        """A part of a head gets an answer, silence gets none."""
        if self.conn.trailing_data[0]:
            self._refuse(InvalidRequestError("the headers did not come in time", status=408))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the parser's own words stay inside
        """What is no HTTP gets the one error body."""
        if len(self.conn.trailing_data[0]) > HEAD_LIMIT:
            self._refuse(InvalidRequestError("the headers are larger than 16 KiB", status=431))
        else:
            self._refuse(InvalidRequestError("the request is not readable as HTTP/1.1"))

    def _refuse(self, error: InvalidRequestError) -> None:
        """Answer if no answer has begun, and close in any case."""
        try:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._answer(error)
        finally:
            if (
                not self._is_between_requests
            ):  # whoever works on the request is told that nobody listens
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()

    def _answer(self, error: InvalidRequestError) -> None:
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
