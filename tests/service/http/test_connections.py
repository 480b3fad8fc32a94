"""Everything that one turn of the event loop writes to a caller goes out at once."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from tuneship.service.http.sockets.connections import (
    WRITE_BUFFER_BYTES,
    Connection,
    _LingeringTransport,
)


class FakeTransport:
    """Records what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done


def noted(work: Callable[[_LingeringTransport, list[Any]], None]) -> list[Any]:
    """Run `work` with the transport's record so far, and return the record two turns of the loop later."""

    async def run() -> list[Any]:
        transport = FakeTransport()
        connection = SimpleNamespace(
            loop=asyncio.get_running_loop(), conn=SimpleNamespace(their_state=None)
        )
        lingering = _LingeringTransport(cast("Connection", connection), cast("Any", transport))
        work(lingering, transport.done)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return transport.done

    return asyncio.run(run())


def test_head_and_body_are_one_write() -> None:
    def answer(lingering: _LingeringTransport, done: list[Any]) -> None:
        lingering.write(b"head ")
        lingering.write(b"")
        lingering.write(b"body")
        assert done == []

    assert noted(answer) == [b"head body"]


def test_a_write_of_a_full_buffer_does_not_wait() -> None:
    long = b"x" * WRITE_BUFFER_BYTES

    def answer(lingering: _LingeringTransport, done: list[Any]) -> None:
        lingering.write(b"head ")
        lingering.write(long)
        assert done == [b"head " + long]
        lingering.write(b"end")

    assert noted(answer) == [b"head " + long, b"end"]


def test_written_bytes_go_out_before_the_close_and_nothing_after_it() -> None:
    def answer(lingering: _LingeringTransport, done: list[Any]) -> None:
        lingering.write(b"last words")
        lingering.close()
        assert done == [b"last words", "closed"]
        lingering.write(b"too late")

    assert noted(answer) == [b"last words", "closed"]


def test_a_caller_who_has_gone_is_written_nothing() -> None:
    def answer(lingering: _LingeringTransport, done: list[Any]) -> None:
        lingering.write(b"head")
        done.append("closed")

    assert noted(answer) == ["closed"]
