"""Parsing server-sent events (WHATWG) from blocks of bytes that may be cut anywhere. It knows no event's meaning."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tuneship.contract.errors import BadResponse

# A server that sends more without ending the event must not fill our memory.
LONGEST_EVENT_BYTES = 1 << 20
# A carriage return at the end of a block may be the first half of a line end.
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass(frozen=True)
class ServerEvent:
    """One event; `id` is the last id that was sent, with this event or before it."""

    kind: str
    data: str
    id: str | None


class EventReader:
    """Parses the events of one answer, block by block."""

    def __init__(self) -> None:
        """Start before the first byte."""
        self._buffer = b""
        self._kind = "message"
        self._data: list[str] = []
        self._data_length = 0
        self._id: str | None = None

    def feed(self, block: bytes) -> Iterator[ServerEvent]:
        """The events that this block completes. Raises `BadResponse` for one that is too long or not in UTF-8."""
        *lines, self._buffer = LINE_END.split(self._buffer + block)
        for line in lines:
            try:
                text = line.decode()
            except UnicodeDecodeError:
                raise BadResponse("the stream is not in UTF-8") from None
            # An empty line ends the event; one without data is dropped, as the standard says.
            if not text:
                if self._data:
                    yield ServerEvent(self._kind, "\n".join(self._data), self._id)
                self._kind, self._data, self._data_length = "message", [], 0
                continue
            # A line of another name is a comment (it has no name) or an unknown field.
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)
                self._data_length += len(value)
            elif name == "id" and "\0" not in value:
                self._id = value or None
        if len(self._buffer) + self._data_length > LONGEST_EVENT_BYTES:
            raise BadResponse("the stream holds an event without an end")
