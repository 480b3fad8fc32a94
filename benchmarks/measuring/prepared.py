"""Requests as prepared bytes on a kept connection, one at a time: no HTTP library is measured."""

import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from measuring.load import Server

END_OF_HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)")


class RequestPath:
    """One path to the same token over HTTP: a connection and the bytes to send."""

    def __init__(self, name: str, server: Server, prompt: str) -> None:
        address = urlsplit(server.url)
        self.name, self._server = name, server
        self._connection = socket.create_connection((address.hostname, address.port), timeout=600)
        body = json.dumps(server.question(prompt, 1))
        sizes = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        fields = {"Host": address.netloc, **server.headers, **sizes}
        head = "".join(f"{field}: {value}\r\n" for field, value in fields.items())
        self._request = f"POST {server.path} HTTP/1.1\r\n{head}\r\n{body}".encode()

    def ask(self) -> bytes:
        """Send the request; returns the bytes of the whole answer."""
        self._connection.sendall(self._request)
        answer = b""
        while not _is_whole(answer):
            arrived = self._connection.recv(1 << 16)
            if not arrived:
                raise SystemExit(f"the {self.name} disconnected")
            answer += arrived
        return answer

    def text(self, answer: bytes) -> str:
        """The completion in an answer."""
        head, _, body = answer.partition(END_OF_HEAD)
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise SystemExit(f"the {self.name} answered {head[:200]!r} {body[:200]!r}")
        return self._server.answer(json.loads(body)).text


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(END_OF_HEAD)
    length = LENGTH.search(head)
    return bool(end) and length is not None and len(body) >= int(length[1])


def own_cpu_ms(pid: int) -> float:
    """CPU milliseconds of one process without its children, to the nanosecond."""
    spent = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            spent += int(file.read_text(encoding="ascii").split()[0])
    return spent / 1e6
