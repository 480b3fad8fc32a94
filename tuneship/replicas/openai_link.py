"""The link to a replica that is an OpenAI-compatible server: token ids in, token ids out of `/v1/completions`.

It implements `ReplicaLink` of `replica_link.py`. Beside the completions it needs what vLLM (0.10.2 or later) adds
to that API: `return_token_ids`, `return_tokens_as_token_ids`, `stop_token_ids`, `ignore_eos`, `cache_salt`, and
adapters that are loaded while it runs. `vllm.py` starts the server.
"""

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx

from tuneship.host.thread_pools import Threads
from tuneship.processes.worker_protocol import Worker
from tuneship.security.sealed_files import read_plain
from tuneship.serving.replica_client import (
    ANSWER_TIMEOUT_S,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    ReplicaLost,
    ReplicaRefused,
    ServingError,
    TokenScore,
    TokenStream,
    UnusableGrammar,
)

logger = logging.getLogger(__name__)

# The name under which the server serves the base model; an adapter's name is a model id, which
# has colons.
BASE = "base"
# Longest line of an event; the first event may repeat a prompt of a million tokens.
MAX_LINE_BYTES = 8 << 20
# No vocabulary is larger, and a tokenizer cannot decode a larger token id.
MAX_VOCABULARY = 1 << 31
EXIT_POLL_S = 0.1
WAITING = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"


class OpenAiLink:
    """Concurrent requests to one server."""

    def __init__(
        self, client: httpx.AsyncClient, worker: Worker, folder: Path, held: ExitStack
    ) -> None:
        """`client`: has the server's address and key. `folder`: belongs to the server, and is removed at the end.

        `held`: what else the server has, released at the end.
        """
        self._client = client
        self._worker = worker
        self._folder = folder
        self._held = held
        self._in_flight: dict[asyncio.Task[None], TokenStream] = {}
        self._is_closed = False
        self._threads = Threads("files of a replica", 2)

    @property
    def in_flight(self) -> int:
        """Number of generations that have not ended."""
        return len(self._in_flight)

    @property
    def is_lost(self) -> bool:
        """Whether the link is closed or the server's process has ended."""
        return self._is_closed or self._worker.exit_code() is not None

    async def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Load an adapter. Raises `ReplicaRefused` when the server cannot use the files; its log says why.

        The server reads plain files, and may read them again after it has evicted the adapter: its folder has them,
        decrypted, until the adapter is unloaded. At `path` they may be gone by then.
        """
        try:
            plain = await self._threads.run(self._decrypt, adapter, path, key)
        except OSError as error:
            await self._clear(adapter)
            text = f"adapter files cannot be opened: {error.strerror or error}"
            raise ReplicaRefused(text) from error
        # In place: the server may still have one of this name if an earlier unload failed.
        body = {"lora_name": adapter, "lora_path": str(plain.absolute()), "load_inplace": True}
        answer = await self._ask("POST", "/v1/load_lora_adapter", body)
        if not answer.is_success:
            await self._clear(adapter)
            raise ReplicaRefused(f"the server refused the adapter ({answer.status_code})")

    async def unload(self, adapter: str) -> None:
        """Unload an adapter. It is no error if the server has evicted it before."""
        answer = await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": adapter})
        if not answer.is_success:
            logger.warning("the server had no such adapter to unload (%s)", answer.status_code)
        await self._clear(adapter)

    async def _clear(self, adapter: str) -> None:
        """Remove the decrypted files of an adapter."""
        await self._threads.run(shutil.rmtree, self._folder_of(adapter), ignore_errors=True)

    def _decrypt(self, adapter: str, path: Path, key: str | None) -> Path:
        folder = self._folder_of(adapter)
        folder.mkdir(mode=0o700, exist_ok=True)
        for file in path.iterdir():
            (folder / file.name).write_bytes(read_plain(file, key))
        return folder

    def _folder_of(self, adapter: str) -> Path:
        return self._folder / hashlib.sha256(adapter.encode()).hexdigest()

    async def stats(self) -> dict[str, int]:
        """Return the server's counts, as far as it has them. Raises `ReplicaLost` if it is not healthy."""
        health = await self._ask("GET", "/health")
        if not health.is_success:
            raise ReplicaLost(f"the server says that it is not healthy ({health.status_code})")
        metrics = await self._ask("GET", "/metrics")
        # Prometheus' text format. Each metric is summed over its labels: a server may have several engines.
        counts: dict[str, float] = {}
        for line in metrics.text.splitlines() if metrics.is_success else ():
            name = line.partition("{")[0].partition(" ")[0]
            if name in (WAITING, RUNNING):
                counts[name] = counts.get(name, 0.0) + float(line.rpartition(" ")[2])
        running = int(counts.get(RUNNING, self.in_flight))
        return {"running": running, "waiting": int(counts.get(WAITING, 0))}

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Send a request at once; the stream's iteration raises errors, and closing it early disconnects."""
        generation = TokenStream(lambda: task.cancel())  # noqa: PLW0108 - the task is made below
        task = asyncio.create_task(self._stream(request, generation))
        self._in_flight[task] = generation
        task.add_done_callback(self._on_end)
        return generation

    async def embed(self, request: EmbedRequest) -> list[str]:  # noqa: ARG002 - the protocol's signature
        """Refuse: a server that generates embeds no texts. Raises `ReplicaRefused`."""
        raise ReplicaRefused("a server that generates embeds no texts")

    async def aclose(self) -> None:
        """Disconnect from the server and remove its folder."""
        self._is_closed = True
        self._held.close()
        tasks = list(self._in_flight)
        for task, generation in self._in_flight.items():
            generation.fail(ReplicaLost("the connection was closed"))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        await self._threads.run(shutil.rmtree, self._folder, ignore_errors=True)

    async def wait_lost(self) -> ReplicaLost:
        """Return when the server's process has ended."""
        while not self.is_lost:  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(EXIT_POLL_S)
        return ReplicaLost("the server's process ended")

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        if self.is_lost:
            raise ReplicaLost("the server's process ended")
        try:
            return await self._client.request(method, path, json=body, timeout=ANSWER_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ReplicaLost(f"the server did not answer: {type(error).__name__}") from error

    async def _stream(self, request: GenerateRequest, generation: TokenStream) -> None:
        """Pass on what the server streams; `_on_end` passes on the errors raised here."""
        if self.is_lost:
            raise ReplicaLost("the server's process ended")
        if request.grammar is not None:
            raise UnusableGrammar("is not supported by the engine of this model")
        body = {
            "model": BASE if request.adapter is None else request.adapter,
            "prompt": list(request.tokens),
            "max_tokens": request.max_tokens,
            "temperature": 0.0 if request.is_greedy else request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop_token_ids": list(request.stop_tokens),
            "ignore_eos": True,  # only the stop tokens above end a generation
            "stream": True,
            "return_token_ids": True,
        }
        asked = [one for one in (request.logprobs, request.prompt_logprobs) if one is not None]
        if asked:
            body |= {"logprobs": max(asked), "return_tokens_as_token_ids": True}
        if request.prompt_logprobs is not None:
            body["echo"] = True  # where nothing is to be generated, the server requires it
        if request.queue:  # an empty salt is refused
            # With the queue as salt, cached prefixes are shared within a deployment only.
            body["cache_salt"] = request.queue
        async with self._client.stream(
            "POST", "/v1/completions", json=body, timeout=None
        ) as answer:
            if answer.is_server_error:
                raise ReplicaLost(f"the server failed ({answer.status_code})")
            if not answer.is_success:
                raise ReplicaRefused(f"the server refused the request ({answer.status_code})")
            generation.finish(await _read_stream(answer, request, generation))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        generation = self._in_flight.pop(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServingError):
            generation.fail(error)
        elif isinstance(error, httpx.HTTPError):
            text = f"the connection to the server broke: {type(error).__name__}"
            generation.fail(ReplicaLost(text))
        elif error is not None:  # the stream was not that of a completion
            text = f"the server broke the protocol: {type(error).__name__}"
            generation.fail(ReplicaLost(text))


async def _read_stream(
    answer: httpx.Response, request: GenerateRequest, generation: TokenStream
) -> FinishReason:
    """Pass tokens on until the stream's own end. Raises `ValueError` and the like if it is not a completion."""
    reason: FinishReason | None = None
    is_done = False
    room = request.max_tokens + 1  # a stop token comes along and is not counted
    async for event in _events(answer):
        if event == b"[DONE]":
            is_done = True
            continue
        chunk = json.loads(event)
        if "error" in chunk:  # even a refused request may get status 200 and then an error
            code = int(chunk["error"]["code"])
            is_refusal = code < httpx.codes.INTERNAL_SERVER_ERROR
            error = ReplicaRefused if is_refusal else ReplicaLost
            raise error(f"the server ended the stream with an error ({code})")
        (choice,) = chunk["choices"]
        tokens = _token_ids(choice["token_ids"])
        room -= len(tokens)
        if is_done or room < 0:
            raise ValueError("more tokens than requested")
        _add_scores(choice, request, generation, len(tokens))
        if not request.max_tokens:
            tokens = []  # the server generates one all the same
        for token in tokens:
            if token not in request.stop_tokens:
                generation.add(token)
        if choice.get("finish_reason") is not None:
            reason = FinishReason(choice["finish_reason"])
            reason = reason if request.max_tokens else FinishReason.LENGTH
    if reason is None or not is_done:
        raise ValueError("the stream ended early")
    return reason


def _add_scores(
    choice: dict[str, Any], request: GenerateRequest, generation: TokenStream, count: int
) -> None:
    """Append the log probabilities of `count` new tokens, after those of the prompt that the first event repeats."""
    if request.logprobs is None and request.prompt_logprobs is None:
        return
    given = choice["logprobs"]
    scores = zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True)
    entries = list(scores)
    if request.prompt_logprobs is not None and not generation.prompt_scores:
        length = len(request.tokens)
        prompt, entries = (
            entries[1:length],
            entries[length:],
        )  # the first token has no log probability
        if len(prompt) != length - 1:
            raise ValueError("not all log probabilities of the prompt")
        generation.prompt_scores += [_score(*one, request.prompt_logprobs) for one in prompt]
    if request.logprobs is not None and request.max_tokens:
        if len(entries) != count:
            raise ValueError("not one log probability for each token")
        generation.scores += [_score(*one, request.logprobs) for one in entries]


def _score(token: str, logprob: float, likeliest: dict[str, float], count: int) -> TokenScore:
    """A score, from names like `token_id:5`; the server lists the token itself among the likeliest ones."""
    top = sorted(likeliest.items(), key=lambda one: -one[1])[:count]
    pairs = [(_token_id(name), float(value)) for name, value in top]
    return TokenScore(_token_id(token), float(logprob), pairs)


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _token_ids(listed: Any) -> list[int]:
    tokens = cast("list[object]", listed if isinstance(listed, list) else [None])
    if not all(type(token) is int and 0 <= token < MAX_VOCABULARY for token in tokens):
        raise TypeError("no token ids")
    return cast("list[int]", tokens)


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the `data` of each server-sent event."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("a line of the stream is too long")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
