"""Chooses device, number format and threads of a training, and knows its GPUs and its free memory.

A choice that was made by measuring is saved for the job's later attempts, which must compute the same. Loads torch;
next: `base_model.py` (loads weights in this format), `learner.py`.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tuneship.host import memory
from tuneship.training.progress_file import ProgressFile
from tuneship.training.spec import FORMAT_FILE, TrainingSpec

# Below this size a second thread and a shorter number format cost more time than they save.
SMALL_MODEL_PARAMETERS = 5_000_000
# bfloat16 costs some accuracy, so it is used only where it is so many times as fast as float32.
MIN_BFLOAT16_SPEEDUP = 1.3


def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_device(rank: int) -> None:
    """Make this rank's process compute on the GPU of the same number, if there are GPUs."""
    if device().type == "cuda":
        torch.cuda.set_device(rank)


def available_devices(requested: int) -> int:
    """How many of the requested devices exist: GPUs if there are any, else shares of the processor."""
    # Several processes need anonymous shared memory and parent-death signals.
    if sys.platform != "linux":
        return 1
    return min(requested, torch.cuda.device_count()) if device().type == "cuda" else requested


def report_gpus(count: int, spec: TrainingSpec, progress: ProgressFile) -> None:
    """Report the GPUs on which the job trains to its record and log: the first `count` visible ones.

    Of a processor they say nothing, unless there are GPUs.
    """
    if device().type != "cuda":
        if spec.gpus:
            why = "torch is built without them, or the driver does not fit or did not start"
            text = f"trains on the processor: the GPUs of this machine cannot be used ({why})"
            progress.log("warning", text)
        return
    # The numbers that the service has for them, else those of this process.
    numbers = spec.gpus or tuple(map(str, range(count)))
    known = [torch.cuda.get_device_properties(number) for number in range(count)]
    names = [
        f"GPU {number} ({one.name}, {one.uuid})"
        for number, one in zip(numbers, known, strict=False)
    ]
    progress.write("devices", devices=names)
    text = f"trains on {' and '.join(names)}"
    if spec.shares_gpus:
        progress.log("warning", f"{text}, beside others: more processes run than there are GPUs")
    else:
        progress.log("info", text)


def number_format(parameters: int) -> torch.dtype:
    """The number format of the base model's weights and activations; the adapter is always float32.

    On CPU it is measured: a processor may list bfloat16 instructions and be slower with them (0.5 times as fast as
    float32 on one that was tried, twice as fast on another).
    """
    if parameters < SMALL_MODEL_PARAMETERS:
        return torch.float32
    if device().type == "cuda":
        # Older GPUs compute in bfloat16 by way of float32, which takes longer than float32 itself.
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if is_native else torch.float32
    speedup = _matmul_seconds(torch.float32) / _matmul_seconds(torch.bfloat16)
    return torch.bfloat16 if speedup > MIN_BFLOAT16_SPEEDUP else torch.float32


def number_format_of_job(
    directory: Path, parameters: int, choose: Callable[[int], torch.dtype] = number_format
) -> torch.dtype:
    """The number format that `choose` chose in the job's first attempt; `directory` survives attempts."""
    file = directory / FORMAT_FILE
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if file.is_file() and (saved := known.get(file.read_text(encoding="utf-8"))) is not None:
        return saved
    chosen = choose(parameters)
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(str(chosen).removeprefix("torch."), encoding="utf-8")
    return chosen


def needs_autocast(place: torch.device, base_format: torch.dtype) -> bool:
    """Whether the float32 adapter meets a base model in bfloat16 in peft's own layers, which only GPUs run."""
    return place.type != "cpu" and base_format is not torch.float32


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Processor time of 256 tokens through a layer of width 1024, the best of a few."""
    tokens, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    seconds: list[float] = []
    for _ in range(6):
        began = time.process_time()
        torch.mm(tokens, weights)
        seconds.append(time.process_time() - began)
    return max(min(seconds), 1e-6)


def choose_threads(requested: int, parameters: int, processes: int = 1) -> int:
    """The number of threads of each of the job's processes; 0 requested: by the size of the model."""
    if requested:
        return requested
    # Every core: serving has the higher priority (`NICENESS` in `__main__.py`).
    cores = len(os.sched_getaffinity(0))
    return 1 if parameters < SMALL_MODEL_PARAMETERS else max(1, cores // processes)


def free_memory(processes: int = 1) -> int:
    """Free bytes for each of the job's processes: of its GPU, or its share of the machine's."""
    if device().type == "cuda":
        # The allocator of this process keeps freed memory, which the driver does not count as free.
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + kept
    return memory.free_memory() // processes
