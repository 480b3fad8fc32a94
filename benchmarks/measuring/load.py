"""Clients that send requests without a pause over kept HTTP connections, to tuneship and to peers alike."""

import http.client
import importlib.metadata
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from measuring.running import Running, cpu_seconds


@dataclass(frozen=True)
class Answer:
    """A completion. `tokens` is the server's own count; some count the end token, which no text shows."""

    text: str
    tokens: int = field(compare=False)


@dataclass(frozen=True)
class Server:
    """A server: its address, the form of its requests and answers, and the process whose CPU time counts."""

    name: str
    url: str
    path: str
    headers: Mapping[str, str]
    # Prompt and maximum of tokens to request body.
    question: Callable[[str, int], dict[str, Any]]
    answer: Callable[[dict[str, Any]], Answer]
    pid: int


@dataclass(frozen=True)
class Round:
    """One burst of load."""

    seconds: float
    cpu_seconds: float
    # Path of the server, prompt, answer.
    answers: tuple[tuple[str, str, Answer], ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """Generated tokens per second of the server's CPU time."""
        return self.tokens / max(self.cpu_seconds, 1e-9)

    @property
    def tokens(self) -> int:
        """The generated tokens of all answers."""
        return sum(answer.tokens for *_, answer in self.answers)


def burst(servers: Sequence[Server], clients: int, prompts: Sequence[str], most: int) -> Round:
    """Let `clients` share the prompts, each sending the next request when it has an answer.

    The servers are paths of one process; each client uses one of them.
    """
    shares = [prompts[place::clients] for place in range(clients)]
    asked = [servers[place % len(servers)] for place in range(clients)]
    answers: list[list[tuple[str, str, Answer]]] = [[] for _ in shares]
    lines = [connected(server) for server in asked]

    def work(place: int) -> None:
        server = asked[place]
        for prompt in shares[place]:
            answer = ask(server, lines[place], prompt, most)
            answers[place].append((server.path, prompt, answer))

    pid = servers[0].pid
    threads = [threading.Thread(target=work, args=(place,)) for place in range(clients)]
    begun, cpu = time.perf_counter(), cpu_seconds(pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, busy = time.perf_counter() - begun, cpu_seconds(pid) - cpu
    for line in lines:
        line.close()
    collected = tuple(answer for share in answers for answer in share)
    if len(collected) != len(prompts):
        raise SystemExit(f"{servers[0].name} left requests unanswered")
    return Round(seconds, busy, collected)


def ask(server: Server, line: http.client.HTTPConnection, prompt: str, most: int) -> Answer:
    """Send one request over a kept connection."""
    body = json.dumps(server.question(prompt, most))
    headers = {"Content-Type": "application/json", **server.headers}
    line.request("POST", server.path, body, headers)
    response = line.getresponse()
    text = response.read()
    if response.status != 200:
        raise RuntimeError(f"{server.name} answered {response.status}: {text[:200]!r}")
    return server.answer(json.loads(text))


def connected(server: Server) -> http.client.HTTPConnection:
    address = urlsplit(server.url)
    line = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
    line.connect()
    return line


def service(running: Running, path: str) -> Server:
    """A deployment or an endpoint of tuneship, with greedy requests."""

    def question(prompt: str, most: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": prompt}]
        return {"messages": turns, "max_tokens": most, "temperature": 0}

    settings = running.settings
    return Server(
        name=f"tuneship {importlib.metadata.version('tuneship')}",
        url=str(settings.url),
        path=f"{path}/generate",
        headers={
            "Authorization": f"Bearer {settings.api_key.get_secret_value()}",
            "X-Client-ID": settings.client_id,
        },
        question=question,
        answer=lambda found: Answer(found["completion"], found["usage"]["completion_tokens"]),
        pid=running.pid,
    )
