"""A stand-in for `vllm serve` with the same options and protocol (HTTP/1.1 over a Unix socket, server-sent events).

It continues a prompt by counting on from its last token; an adapter counts in steps of its rank. Certain last tokens
make it misbehave (see `Trouble`). It appends each request and its end to a file. Like vLLM, it starts a child process,
which would outlive it.
"""

import argparse
import enum
import json
import os
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class Trouble(enum.IntEnum):
    """Last tokens of prompts for which the server misbehaves."""

    NO_JSON = 9001
    NO_TOKEN_IDS = 9002
    TEXT_FOR_TOKENS = 9003
    TOO_MANY = 9004
    CUT = 9005
    BAD_REASON = 9006
    ERROR_EVENT = 9007
    ENDLESS_LINE = 9008
    NO_CHOICES = 9009
    UNDONE = 9010
    REFUSED = 9011
    FAILED = 9012
    DIES = 9013
    SILENT = 9014
    REFUSED_LATE = 9015


def events(*data: str) -> bytes:
    return "".join(f"data: {one}\n\n" for one in (*data, "[DONE]")).encode()


GARBAGE = {
    Trouble.NO_JSON: events("<html>"),
    Trouble.NO_TOKEN_IDS: events('{"choices": [{"text": "a", "finish_reason": "stop"}]}'),
    Trouble.TEXT_FOR_TOKENS: events('{"choices": [{"token_ids": ["a", -1, true]}]}'),
    Trouble.TOO_MANY: events(*['{"choices": [{"token_ids": [2]}]}'] * 200),
    Trouble.BAD_REASON: events('{"choices": [{"token_ids": [], "finish_reason": "abort"}]}'),
    Trouble.ERROR_EVENT: events('{"error": {"message": "it broke", "code": 500}}'),
    Trouble.REFUSED_LATE: events('{"error": {"message": "no", "code": 400}}'),
    Trouble.ENDLESS_LINE: b"x" * (12 << 20),
    Trouble.NO_CHOICES: events('{"choices": []}'),
    Trouble.UNDONE: events('{"choices": [{"token_ids": [2], "finish_reason": null}]}'),
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag")
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--generation-config", choices=["vllm"], required=True)
    parser.add_argument("--no-enable-log-requests", action="store_true", required=True)
    parser.add_argument("--disable-uvicorn-access-log", action="store_true", required=True)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    for name in ("--max-loras", "--max-cpu-loras", "--max-lora-rank"):
        parser.add_argument(name, type=int, required=True)
    # Options that vLLM does not have.
    parser.add_argument("--seen", type=Path, required=True)
    parser.add_argument("--start-after", type=float, default=0.0)
    parser.add_argument("--die-at-start", action="store_true")
    return parser.parse_args()


def note(options: argparse.Namespace, **what: Any) -> None:
    with options.seen.open("a") as file:
        file.write(json.dumps(what) + "\n")


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A server with one thread per connection."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options.uds, Handler)
        self.options = options
        self.key = os.environ["VLLM_API_KEY"]
        self.adapters: dict[str, int] = {}
        self.running = 0


class Handler(BaseHTTPRequestHandler):
    """Answers requests as vLLM does."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Do not log requests."""

    def do_GET(self) -> None:
        if self.path == "/health":
            sick = (self.server.options.seen.parent / "sick").exists()
            self.answer(503 if sick else 200, b"")
        elif self.path == "/metrics":
            text = 'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_waiting{engine="1"} 1.0\n'
            text += f'# HELP x\nvllm:num_requests_running{{engine="0"}} {self.server.running}.0\n'
            self.answer(200, text.encode())
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.answer(401, b'{"error": "Unauthorized"}')
        elif self.path == "/v1/load_lora_adapter":
            self.load(body)
        elif self.path == "/v1/unload_lora_adapter":
            known = self.server.adapters.pop(body["lora_name"], None)
            self.answer(404 if known is None else 200, b"{}")
        elif self.path == "/v1/completions":
            self.complete(body)
        else:
            self.answer(404, b"{}")

    def load(self, body: dict[str, Any]) -> None:
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") != "True":
            self.answer(404, b"{}")
            return
        try:
            config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        except (OSError, ValueError):
            self.answer(400, b'{"error": {"message": "no adapter"}}')
            return
        if config["r"] > self.server.options.max_lora_rank:
            self.answer(400, b'{"error": {"message": "rank"}}')
            return
        self.server.adapters[body["lora_name"]] = config["r"]
        self.answer(200, b"Success")

    def complete(self, body: dict[str, Any]) -> None:
        note(self.server.options, asked=body)
        model, trouble = body["model"], body["prompt"][-1]
        step = (
            1 if model == self.server.options.served_model_name else self.server.adapters.get(model)
        )
        if step is None or trouble == Trouble.REFUSED:
            self.answer(404 if step is None else 400, b'{"error": {"message": "no"}}')
        elif trouble == Trouble.FAILED:
            self.answer(500, b"{}")
        else:
            self.server.running += 1
            try:
                self.stream(body, step)
                note(self.server.options, ended="well")
            except (BrokenPipeError, ConnectionResetError):
                note(self.server.options, ended="hung up")
                self.close_connection = True
            finally:
                self.server.running -= 1

    def stream(self, body: dict[str, Any], step: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        last: int = body["prompt"][-1]
        if last in set(Trouble):
            self.trouble(Trouble(last))
            return
        most = max(1, body["max_tokens"])  # with 0 it generates a token that it does not count
        for number in range(1, most + 1):
            token = last + number * step
            is_stop = token in body["stop_token_ids"]
            is_last = number == most
            reason = "stop" if is_stop else ("length" if is_last else None)
            echoed = body["prompt"] if body.get("echo") and number == 1 else []
            answered = [*echoed, *([token] if body["max_tokens"] else ())]
            self.event([token], reason, logprobs_of(answered, body.get("logprobs"), bool(echoed)))
            if is_stop:
                break
            time.sleep(0.002)
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def trouble(self, trouble: Trouble) -> None:
        self.event([1], None)
        if trouble == Trouble.DIES:
            os._exit(3)
        while trouble == Trouble.SILENT:  # until the caller disconnects
            self.chunk(b": nothing\n\n")
            time.sleep(0.02)
        if trouble == Trouble.CUT:
            self.close_connection = True
            return
        self.chunk(GARBAGE[trouble])
        self.chunk(b"")

    def event(self, tokens: list[int], reason: str | None, logprobs: Any = None) -> None:
        choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}
        choice |= {} if logprobs is None else {"logprobs": logprobs}
        self.chunk(b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def logprobs_of(tokens: list[int], top: int | None, is_first: bool) -> dict[str, Any] | None:
    """Every token has -token / 10, and the others around it are likelier, as vLLM writes them."""
    if top is None:
        return None
    found = [-token / 10 for token in tokens]
    likely = [
        {f"token_id:{other}": -other / 10 for other in (*range(1, top + 1), token)}
        for token in tokens
    ]
    return {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": [None, *found[1:]] if is_first else found,
        "top_logprobs": [None, *likely[1:]] if is_first else likely,
    }


def main() -> None:
    options = parsed()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(options, pid=os.getpid(), child=child.pid, folder=str(Path.cwd()), arguments=sys.argv[1:])
    if options.die_at_start:
        sys.exit("no memory")
    time.sleep(options.start_after)
    Server(options).serve_forever()


if __name__ == "__main__":
    main()
