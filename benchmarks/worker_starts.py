"""Measures the start of replicas and trainings: forked from a loaded process, beside processes of their own.

    python benchmarks/worker_starts.py [--rounds 5]

Both are started by the product's own runtimes, with isolation, on the demo's base model; each round starts both, in
turns. A replica must give the same greedy tokens in both, a training the same losses. Prints medians: seconds from the
request for a replica until it is ready, its memory that is not shared then, seconds from the request for a training
until its first step is reported.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.isolation.landlock import Places
from tuneship.processes.forked_workers import LIBRARIES, ForkedProcesses
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.processes.worker_protocol import Runtime, WorkerSpec
from tuneship.replicas.serving_process import ServingOptions, start_serving
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.jobs.work_folders import FolderProgress
from tuneship.serving.replica_client import GenerateRequest, SocketLink
from tuneship.training.spec import (
    LOG_FILE,
    SPEC_FILE,
    ResolvedHyperparameters,
    TrainingSpec,
)

READY_S = "replica ready, s"
READY_MIB = "replica ready, MiB not shared"
FIRST_STEP_S = "training until its first step, s"
ROWS, PROMPT, TOKENS = 32, tuple(range(3, 19)), 12
POLL_S = 0.002
MOST_LINES = 100
PATIENCE_S = 120.0
SETTINGS = ResolvedHyperparameters(
    learning_rate=0.01,
    batch_size=8,
    epochs=1,
    warmup_steps=0,
    lora_rank=4,
    lora_alpha=8,
    lora_dropout=0.0,
    target_modules=("all-linear",),
    seed=7,
)


def private_mib(process: int) -> float:
    """Memory of a process that it shares with no other."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def median_of_starts(runtimes: dict[str, Runtime], base: Path, folder: Path, rounds: int) -> None:
    """Measure in turns and print; ends the program where the two do not do the same work."""
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(rounds):
        order = list(runtimes) if turn % 2 else list(reversed(runtimes))
        work = defaultdict[str, list[object]](list)
        for way in order:
            for found, result in (
                asyncio.run(replica(runtimes[way], base, folder)),
                asyncio.run(training(runtimes[way], base, folder)),
            ):
                work[way].append(result)
                for name, value in found.items():
                    measured[name, way].append(value)
        if work[order[0]] != work[order[1]]:
            sys.exit("the two ways gave different tokens or losses")
    for (name, way), values in sorted(measured.items()):
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{name:36} {way:10} {statistics.median(values):8.2f}   ({spread})")


async def replica(runtime: Runtime, base: Path, folder: Path) -> tuple[dict[str, float], object]:
    """Start a replica: what was measured, and its tokens."""
    began = time.monotonic()
    worker, ours = start_serving(runtime, base, folder / "serving.log", ServingOptions(1 << 24), ())
    try:
        line = await SocketLink.open(ours)
        measured = {READY_S: time.monotonic() - began, READY_MIB: private_mib(worker.pid)}
        tokens = await line.generate(GenerateRequest(PROMPT, TOKENS)).read_all()
        await line.aclose()
    finally:
        worker.kill()
    return measured, tokens


def prepared(base: Path, folder: Path) -> WorkerSpec:
    """The files of a training of a few steps in an empty folder, and its process."""
    data, line = folder / "data.jsonl", {"instruction": "Which code?", "response": "E11.9"}
    data.write_text(f"{json.dumps(line)}\n" * ROWS, encoding="utf-8")
    written = folder / "output", folder / "checkpoints"
    for place in written:
        place.mkdir()
    spec = TrainingSpec(
        str(base), data, data, "instruction", *written, 0.5, PATIENCE_S, 1, SETTINGS
    )
    (folder / SPEC_FILE).write_text(spec.to_json(), encoding="utf-8")
    places = Places(spec.read_paths, (folder, *written))
    return WorkerSpec("tuneship.training", (str(folder),), folder / LOG_FILE, places=places)


async def training(runtime: Runtime, base: Path, folder: Path) -> tuple[dict[str, float], object]:
    """Run a training of a few steps: what was measured, and its losses."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        order = prepared(base, Path(name))
        progress, first_step_s = FolderProgress(Path(name), Threads("progress", 1)), 0.0
        began = time.monotonic()
        worker = runtime.start(order)
        try:
            while worker.exit_code() is None and time.monotonic() - began < PATIENCE_S:
                if not first_step_s and await losses(progress):
                    first_step_s = time.monotonic() - began
                await asyncio.sleep(POLL_S)
        finally:
            worker.kill()
        if worker.exit_code() != 0 or not first_step_s:
            sys.exit(f"a training ended with {worker.exit_code()}")
        return {FIRST_STEP_S: first_step_s}, await losses(progress)


async def losses(progress: FolderProgress) -> list[object]:
    """The losses that a training has reported so far."""
    lines = (await progress.news(0, MOST_LINES)).lines
    return [line["training_loss"] for line in lines if line["kind"] == "step"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = Catalogue(None, folder).default.path
        with closing(ForkedProcesses(isolated=True, log=folder / "fork-server.log")) as forked:
            for module in LIBRARIES:
                forked.preload(module)
            own = LocalProcesses(isolated=True)
            median_of_starts({"forked": forked, "its own": own}, base, folder, rounds)


if __name__ == "__main__":
    main()
