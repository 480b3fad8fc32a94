"""Generation through HTTP beside `transformers serve` with continuous batching, on the same tuned model.

    python benchmarks/serving_peers.py [--rounds 5] [--peer-python PATH]

Tunes the shipped base, serves the adapter with `tuneship serve`, and the same adapter merged into its base with the
peer (which serves no adapters). Same clients, same prompts, greedy; rounds take turns. Every text of every round must
be the same on both sides before a number is printed. The peer runs in an environment of its own (`.peers/`).
"""

import argparse
import http.client
import importlib.metadata
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measuring.environments import python_with
from measuring.load import Answer, Round, Server, burst
from measuring.load import service as service_of
from measuring.running import Running, deploy, example_rows, job_on, running, tune, upload
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuneship.client import Client

CLIENTS = (1, 8, 32)
TARGETS = {8: 1.5, 32: 3.0}
NEW_TOKENS = 48
PEER_START_S = 180.0


def main() -> None:
    """Tune, serve on all sides, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of a round of 8 or more clients")
    parser.add_argument("--peer-python", type=Path, help="with transformers[serving]")
    parser.add_argument("--peer-threads", type=int, default=1, help="compute threads of a peer")
    chosen = parser.parse_args()
    version = importlib.metadata.version("transformers")
    peer = chosen.peer_python or python_with("transformers", [f"transformers[serving]=={version}"])
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "data") as service:
        with Client(service.settings) as client:
            deployment_id, base = _tuned(client)
        merged = _merged(service, base, Path(folder) / "merged")
        ours = service_of(service, f"/v1/deployments/{deployment_id}")
        name = f"transformers serve {version}"
        with _peer(name, _transformers(peer, merged), merged, chosen.peer_threads) as theirs:
            _compare(ours, theirs, chosen)


def _tuned(client: Client) -> tuple[str, Path]:
    """A deployment of a model that writes long answers, and its base model's directory."""
    sources = {"training": "hospital_a.jsonl", "validation": "validation.jsonl"}
    names = {
        name: upload(client, name, _long_answers(source, 320 if name == "training" else 32))
        for name, source in sources.items()
    }
    job = tune(client, job_on(names["training"], names["validation"]))
    from tuneship.service.catalogue import Catalogue  # noqa: PLC0415 (only where the base lies)

    return deploy(client, str(job.fine_tuned_model), "bench"), Catalogue().default.path


def _long_answers(source: str, rows: int) -> list[bytes]:
    """Each answer lists several diagnoses, so that a generation goes on to its limit."""
    questions = [json.loads(line)["instruction"] for line in example_rows(source, rows + 5)]
    names = [question.partition("? ")[2] for question in questions]
    return [
        json.dumps({"instruction": questions[n], "response": "; ".join(names[n : n + 5])}).encode()
        + b"\n"
        for n in range(rows)
    ]


def _merged(service: Running, base: Path, directory: Path) -> Path:
    """One whole model, as a server without adapters needs it."""
    adapters = sorted(service.data_dir.rglob("adapter_config.json"))
    adapter = next(one.parent for one in adapters if "checkpoint" not in str(one))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


def _transformers(python: Path, model: Path) -> list[str]:
    start = "from transformers.cli.transformers import main; main()"
    options = ["--continuous-batching", "--device", "cpu", "--dtype", "float32"]
    return [str(python), "-c", start, "serve", str(model), *options]


@contextmanager
def _peer(name: str, command: list[str], model: Path, threads: int) -> Generator[Server]:
    """An OpenAI-compatible server, once it has answered a first question."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            _wait_for(process, port)
            yield Server(
                name=name,
                url=f"http://127.0.0.1:{port}",
                path="/v1/chat/completions",
                headers={},
                question=lambda prompt, most: {
                    "model": str(model),
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": most,
                    "temperature": 0,
                },
                answer=_openai_answer,
                pid=process.pid,
            )
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _openai_answer(found: dict[str, Any]) -> Answer:
    choice = found["choices"][0]
    ended = choice["finish_reason"] == "stop"  # it counts the end token, we do not
    return Answer(choice["message"]["content"], found["usage"]["completion_tokens"] - ended)


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    end = time.monotonic() + PEER_START_S
    while time.monotonic() < end and process.poll() is None:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            line.request("GET", "/health")
            if line.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
        finally:
            line.close()
    raise SystemExit("the peer did not start")


def _compare(ours: Server, theirs: Server, chosen: argparse.Namespace) -> None:
    """Rounds in turn; texts first, then the numbers."""
    draws = random.Random(1)
    rows = example_rows("validation.jsonl", 500)
    prompts = [json.loads(line)["instruction"] for line in draws.sample(rows, chosen.requests)]
    rounds: dict[tuple[int, str], list[Round]] = {}
    for number in range(chosen.rounds + 1):  # the first warms up both sides
        for clients in CLIENTS:
            asked = prompts[: max(4, clients * 2)] if clients < 8 else prompts
            for server in (ours, theirs):
                found = burst(server, clients, asked, NEW_TOKENS)
                if number:
                    rounds.setdefault((clients, server.name), []).append(found)
    _check_texts(rounds, ours, theirs)
    print(f"{ours.name} beside {theirs.name}, {chosen.requests} prompts, up to {NEW_TOKENS} tokens")
    for clients in CLIENTS:
        _print(clients, rounds[clients, ours.name], rounds[clients, theirs.name])


def _check_texts(rounds: dict[tuple[int, str], list[Round]], ours: Server, theirs: Server) -> None:
    """Every prompt has one answer, on both sides and at every number of clients."""
    expected = dict(answer for one in rounds[32, ours.name] for answer in one.answers)
    answers = {
        (name, prompt, answer)
        for (_, name), found in rounds.items()
        for one in found
        for prompt, answer in one.answers
    }
    wrong = [(name, prompt) for name, prompt, answer in answers if answer != expected[prompt]]
    if wrong:
        for name, prompt in wrong[:5]:
            found = [answer for who, what, answer in answers if (who, what) == (name, prompt)]
            print(f"{name}: {found} instead of {expected[prompt]}", file=sys.stderr)
        raise SystemExit(f"{len(wrong)} answers of {ours.name} and {theirs.name} differ")
    print(f"all {len(answers) // 2} texts are the same on both sides")


def _print(clients: int, ours: list[Round], theirs: list[Round]) -> None:
    def middle(found: list[Round]) -> tuple[float, float]:
        return (
            statistics.median(one.tokens_per_s for one in found),
            statistics.median(one.tokens_per_cpu_s for one in found),
        )

    (rate, per_cpu), (their_rate, their_per_cpu) = middle(ours), middle(theirs)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)]
    target = f", target {TARGETS[clients]}" if clients in TARGETS else ""
    print(
        f"{clients:3} clients: {rate:6.0f} and {their_rate:6.0f} tokens/s = {statistics.median(ratios):5.2f}x{target}; "
        f"per CPU second {per_cpu:6.0f} and {their_per_cpu:6.0f} = {per_cpu / their_per_cpu:5.2f}x"
    )


if __name__ == "__main__":
    main()
