"""One HTTP connection: uvicorn's protocol over llhttp, one request at a time, each read in time and to the letter.

uvicorn has no limit on the wait for a head, reads pipelined requests without end, takes what RFC 9112 lets a recipient
take, and answers what it cannot read with plain text. Here a request is fed to the parser up to its end and
not beyond; the next one waits until it is answered. Everything behind the head is the border's (`service/http/`); how
long a body may take is in `service/body.py`.
"""

import asyncio
import json
import logging
import re
from typing import Any, cast
from urllib.parse import unquote

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tuneship.contract.errors import InvalidRequestError
from tuneship.store.identifiers import new_id

logger = logging.getLogger(__name__)

HEAD_S = 10.0
"""From the first byte of a head (or from connecting) to its end."""
HEAD_LIMIT = 256 << 10
"""Bytes that are read of a head, so that the border can answer a head above its own limit properly."""
OVERHEAD_LIMIT = 16 << 10
"""Bytes of chunks that bring nothing of the body: their sizes, extensions and trailers."""
LINGER_S = 2.0
"""How long a refused caller may go on sending before the connection is cut."""
END = b"\r\n\r\n"
"""Of every head, and of every body in chunks: the last chunk or the last trailer, then an empty line."""
REQUEST_LINE = re.compile(rb"(?!CONNECT )[!-~]+ [!-~]+ HTTP/1\.[01]\r\n")
"""The parser would take more spaces and other versions; CONNECT is for proxies."""
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
BARE_LF = re.compile(rb"(?<!\r)\n")


class _Lingering:
    """A transport whose `close` lets the caller read the answer: closing over unread bytes would reset the connection.

    RFC 9112 section 9.6: close the writing side, read on for a while, then close.
    """

    def __init__(self, connection: "Connection", transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self.has_closed = False
        self.holds_writes = False
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.has_closed or self._transport.is_closing()

    def resume_reading(self) -> None:
        """Not while a next request waits: every one that is answered would let in more than itself."""
        if not self._connection.holds_back:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Now, or with the next write."""
        self._held += data
        if not self.holds_writes:
            self._transport.write(self._held)
            self._held = b""

    def close(self) -> None:
        if self.is_closing():
            return
        self.holds_writes = False
        self.write(b"")
        self.has_closed = True
        if not self._connection.is_sending or not self._transport.can_write_eof():
            self._transport.close()  # TLS has no half-close
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._connection.loop.call_later(LINGER_S, self._transport.close)


class _Cycle(RequestResponseCycle):
    """One request and its answer. A caller with HTTP/1.0 knows no chunks: a body without a length ends it."""

    _has_length = False

    async def send(self, message: Any) -> None:
        """As the server calls it. The head of a body of known length goes out with it: the caller wakes up once."""
        is_head = message["type"] == "http.response.start"
        if is_head:
            names = {name.lower() for name, _ in message["headers"]}
            self._has_length = b"content-length" in names
        if not self._has_length and self.scope["http_version"] == "1.0":
            self.chunked_encoding = False
            self.expected_content_length = len(message.get("body", b""))
        transport: Any = self.transport
        transport.holds_writes = is_head and self._has_length and self.scope["method"] != "HEAD"
        await super().send(message)


class Connection(HttpToolsProtocol):
    """Ends a connection whose head does not come: with 408 after a part of one, silently after nothing."""

    head_s = HEAD_S
    app: Any
    parser: Any
    scope: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*arguments, **options)
        self._impatience: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._unread = bytearray()
        self._searched = 0
        """Bytes of `_unread` that hold no end of a head."""
        self._is_in_body = False
        self._body_left: int | None = 0
        """Bytes that have not been fed to the parser; None for chunks."""
        self._overhead = 0
        """Bytes of chunks since the last one of the body."""
        self._is_unreadable = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock runs from connecting."""
        self._lingering = _Lingering(self, transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_sending(self) -> bool:
        """Whether more of a request may come, which nobody will read."""
        return self._is_in_body or self._is_unreadable

    @property
    def holds_back(self) -> bool:
        """Whether bytes of a next request wait for the answer to this one."""
        return bool(self._unread) and self._is_answering()

    def data_received(self, data: bytes) -> None:
        """A head that begins on a kept connection starts the clock; a whole head stops it."""
        if self._lingering.has_closed:
            return
        self._unset_keepalive_if_required()
        self._has_begun = True
        if self._impatience is None and self._is_between_requests():
            self._wait_for_head()
        self._unread += data
        self._read_on()
        if not self._is_between_requests():
            self._stop_waiting()

    def _read_on(self) -> None:
        """What has come, up to the end of one request."""
        try:
            while self._unread and not self._is_answering():
                size = self._readable()
                if not size:
                    break
                piece = bytes(self._unread[:size])
                del self._unread[:size]
                self.parser.feed_data(piece if self._is_in_body else _plain_head(piece))
                self._check_overhead()
        except HttpParserError:
            self._is_unreadable = True
            self._refuse_unreadable()
            return
        if self.holds_back:
            self.transport.pause_reading()
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _check_overhead(self) -> None:
        if self._is_in_body and self._overhead > OVERHEAD_LIMIT:
            raise HttpParserError("chunks without a body")

    def _readable(self) -> int:
        """How many bytes can be fed without a byte of the next request; of a head all or nothing."""
        if not self._is_in_body:
            return self._head_size()
        if self._body_left is not None:
            size = min(self._body_left, len(self._unread))
            self._body_left -= size
            return size
        end = self._unread.find(END)
        size = max(len(self._unread) - len(END) + 1, 0) if end < 0 else end + len(END)
        self._overhead += size
        return size

    def _head_size(self) -> int:
        end = self._unread.find(END, max(self._searched - len(END) + 1, 0))
        if end >= 0:
            self._searched = 0
            return end + len(END)
        is_wrong = self._unread[0] <= ord(" ") or BARE_LF.search(self._unread, self._searched)
        self._searched = len(self._unread)
        if is_wrong or self._searched > HEAD_LIMIT:
            raise HttpParserError("no head")
        return 0

    def on_message_begin(self) -> None:
        """Called by the parser, as are the next ones."""
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer is nothing that a caller may say of the request."""
        if not self._is_in_body:
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """What the parser lets through and RFC 9112 does not; then the request goes to the border."""
        version = self.parser.get_http_version()
        given, hosts = dict(self.headers), sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise HttpParserError("not one host")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise HttpParserError("a coding that we do not know")
        self._body_left = None if codings else int(given.get(b"content-length", 0))
        self._overhead = 0
        self._begin(version, given.get(b"expect", b"").lower() == b"100-continue")
        self._is_in_body = True

    def _begin(self, version: str, expects_100: bool) -> None:
        """Unlike uvicorn's own parsing of the target: only what stands before the first `?` is the path."""
        raw_path, _, query = self.url.partition(b"?")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.config.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": self.parser.get_method().decode("ascii"),
            "root_path": self.root_path,
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        is_new = version == "1.1"
        self.cycle = _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=is_new and expects_100,
            keep_alive=is_new and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        task = self.loop.create_task(self.cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """Handed on."""
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing more is read before the answer."""
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """What came meanwhile is read."""
        super().on_response_complete()
        if self._unread and not self.transport.is_closing():
            self.data_received(b"")

    def _is_answering(self) -> bool:
        return not self._is_in_body and not self._is_between_requests()

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
        if self._has_begun and not self._is_in_body:  # a body may outlast its answer
            self._refuse(InvalidRequestError("the headers did not come in time", status=408))
        else:
            self.transport.close()

    def _refuse_unreadable(self) -> None:
        """What is no HTTP gets the one error body, unless an answer has begun; the parser's own words stay inside."""
        self._stop_waiting()
        if self._is_in_body:
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse(InvalidRequestError("the request is not readable as HTTP/1.1"))

    def _refuse(self, error: InvalidRequestError) -> None:
        request_id = new_id("req")
        logger.info("%s %d without a request", request_id, error.status)
        body = json.dumps(error.as_json(request_id)).encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": len(body),
            "X-Request-ID": request_id,
            "X-Should-Retry": "true" if error.retryable else "false",
            "Connection": "close",
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.transport.close()


def _plain_head(head: bytes) -> bytes:
    """A head that the parser reads by the letter: nothing is upgraded here, and it would skip the body for it."""
    if not REQUEST_LINE.match(head):
        raise HttpParserError("no request line")
    return UPGRADE.sub(b"\r\nIgnored:", head)
