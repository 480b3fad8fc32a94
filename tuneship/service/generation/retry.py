"""Runs a generation again when its replica was lost, once, and only while the caller has not been told a word of it."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tuneship.service.generation.text_stream import Tell
from tuneship.serving.replica_client import ReplicaLost

W = TypeVar("W")


async def with_second_try(run: Callable[[Tell], Awaitable[W]], tell: Tell, is_heard: bool) -> W:
    """`is_heard`: what is told goes to the caller at once; a whole answer can always be written again.

    Raises `ReplicaLost` when the second replica is lost too, or when the text has begun.
    """
    told = False

    def noted(text: str) -> None:
        nonlocal told
        told = True
        tell(text)

    try:
        return await run(noted)
    except ReplicaLost:
        if told and is_heard:
            raise
    return await run(noted)
