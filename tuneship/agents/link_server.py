"""Answers the messages of a replica's process with a `ReplicaLink`: an agent serves engines with it that are no
processes of ours. The messages: `replica_client.py`, which is the other end, and `serving/replica.py`.
"""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneship.replicas.replica import Replica
from tuneship.serving.embed_request import EmbedRequest, Pooling, texts_of
from tuneship.serving.replica_client import (
    EMBED_FIELDS,
    FIELDS,
    PROMPT_SCORES_PER_FRAME,
    ReplicaLost,
    RequestTooLarge,
    ServingError,
    UnusableGrammar,
)
from tuneship.serving.sequence import GenerateRequest

Frame = dict[str, Any]


class LinkServer:
    """Serves one connection, and tracks its requests until they end."""

    def __init__(self, replica: Replica, writer: asyncio.StreamWriter) -> None:
        """`replica`: answers all requests. `writer`: sends the answers."""
        self._replica = replica
        self._link = replica.link
        self._writer = writer
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Say that the replica is ready, and answer until it is lost or the connection ends; then end both."""
        self._send({"ready": {"pid": self._replica.worker.pid}})
        ends = [
            asyncio.create_task(self._read(reader)),
            asyncio.create_task(self._link.wait_lost()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, *self._tasks.values()):
                task.cancel()
            self._writer.close()
            await self._link.aclose()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while (line := await reader.readline()).endswith(b"\n"):
                frame: Frame = json.loads(line)
                identifier = str(frame["id"])
                if frame["op"] == "cancel":
                    if (task := self._tasks.get(identifier)) is not None:
                        task.cancel()
                    continue
                task = asyncio.create_task(self._answered(identifier, frame))
                self._tasks[identifier] = task
                task.add_done_callback(lambda _, name=identifier: self._tasks.pop(name, None))

    async def _answered(self, identifier: str, frame: Frame) -> None:
        """Carry one message out; a failure is the answer."""
        work: Coroutine[Any, Any, None]
        try:
            match frame["op"]:
                case "generate":
                    work = self._generate(identifier, _request(frame))
                case "embed":
                    work = self._embed(identifier, _embed_request(frame))
                case operation:
                    work = self._operate(operation, frame)
            await work
        except ServingError as error:
            marks = {RequestTooLarge: "too_large", UnusableGrammar: "grammar", ReplicaLost: "lost"}
            marked = {mark: True for kind, mark in marks.items() if isinstance(error, kind)}
            self._send({"id": identifier, "error": str(error), **marked})
        except (KeyError, TypeError, ValueError) as error:
            text = f"frame not understood: {type(error).__name__}"
            self._send({"id": identifier, "error": text})

    async def _operate(self, operation: str, frame: Frame) -> None:
        """Load or unload an adapter, or count. Raises `ServingError`, and `ValueError` for another operation."""
        answer: Frame = {}
        match operation:
            case "load":
                await self._link.load(str(frame["adapter"]), Path(frame["path"]), frame.get("key"))
            case "unload":
                await self._link.unload(str(frame["adapter"]))
            case "stats":
                answer = {**await self._link.stats(), "pid": self._replica.worker.pid}
            case _:
                raise ValueError("no such operation")
        self._send({"id": frame["id"], "ok": True, **answer})

    async def _generate(self, identifier: str, request: GenerateRequest) -> None:
        """Pass tokens and scores on as they come. Raises `ServingError`."""
        sent, prompt_sent = 0, 0
        async with self._link.generate(request) as stream:
            while True:
                tokens = await anext(stream, None)
                # Scores go before their tokens; also a stop token, which is none of the tokens, has one.
                for start in range(prompt_sent, len(stream.prompt_scores), PROMPT_SCORES_PER_FRAME):
                    part = stream.prompt_scores[start : start + PROMPT_SCORES_PER_FRAME]
                    prompt_sent += len(part)
                    scored = {"prompt_scores": [[identifier, part]]}
                    self._send({"tokens": [], "finished": [], **scored})
                scores, sent = stream.scores[sent:], len(stream.scores)
                scored = {"scores": [[identifier, one] for one in scores]} if scores else {}
                pairs = [[identifier, token] for token in tokens or ()]
                ended = [[identifier, stream.finish_reason]] if tokens is None else []
                self._send({"tokens": pairs, "finished": ended, **scored})
                if tokens is None:
                    return

    async def _embed(self, identifier: str, request: EmbedRequest) -> None:
        for number, vector in enumerate(await self._link.embed(request)):
            self._send({"embedded": [[identifier, number, vector]]})

    def _send(self, frame: Frame) -> None:
        self._writer.write(json.dumps(frame, separators=(",", ":")).encode() + b"\n")


def _request(frame: Frame) -> GenerateRequest:
    """Read a request. Raises `KeyError` and `TypeError`."""
    values: Frame = {name: frame[name] for name in FIELDS}
    for name in ("tokens", "stop_tokens"):
        values[name] = tuple(values[name])
    return GenerateRequest(**values)


def _embed_request(frame: Frame) -> EmbedRequest:
    """Read a request. Raises `KeyError`, `TypeError` and `ValueError`."""
    values: Frame = {name: frame[name] for name in EMBED_FIELDS}
    values["texts"], values["pooling"] = texts_of(values["texts"]), Pooling(values["pooling"])
    return EmbedRequest(**values)
