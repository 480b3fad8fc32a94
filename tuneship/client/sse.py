"""Reading server-sent events from blocks of bytes, cut anywhere. Knows the format (WHATWG) and no meaning."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tuneship.contract.errors import BadResponse

# Bytes; a server that sends more without an end must not fill our memory.
LONGEST_EVENT = 1 << 20
# A carriage return at the end of a block may be half of an end.
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass(frozen=True)
class ServerEvent:
    """One event; `id` is the last one that was sent, here or before."""

    kind: str
    data: str
    id: str | None


class EventReader:
    """Takes blocks, gives events. One reader reads one answer."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._buffer = b""
        self._kind = "message"
        self._data: list[str] = []
        self._held = 0
        self._id: str | None = None

    def feed(self, block: bytes) -> Iterator[ServerEvent]:
        """The events that this block completes. Raises `BadResponse` for one without an end or not in UTF-8."""
        *lines, self._buffer = LINE_END.split(self._buffer + block)
        for line in lines:
            event = self._line(_text(line))
            if event is not None:
                yield event
        if len(self._buffer) + self._held > LONGEST_EVENT:
            raise BadResponse("the stream holds an event without an end")

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            return self._dispatched()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
            self._held += len(value)
        elif name == "id" and "\0" not in value:
            self._id = value or None
        return None  # a comment (no name) or an unknown field

    def _dispatched(self) -> ServerEvent | None:
        event = ServerEvent(self._kind, "\n".join(self._data), self._id) if self._data else None
        self._kind, self._data, self._held = "message", [], 0
        return event


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise BadResponse("the stream is not in UTF-8") from None
