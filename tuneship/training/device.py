"""What a training uses of its machine: device, number format, threads, memory. The one place that chooses.

What is chosen by measuring is kept for a job's later attempts, which must compute the same. Loads torch; next:
`base_model.py` (what is loaded in this format), `learner.py`.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tuneship.host import memory

# Parameters below which a second thread and a shorter number format cost more than they bring.
SMALL_MODEL = 5_000_000
# Its products must be so many times as fast as float32's: half as many bits cost something in
# accuracy.
WORTH_BFLOAT16 = 1.3
FORMAT_FILE = "number_format"


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_device(rank: int) -> None:
    """Make a job's process of that rank compute on the GPU of that number, where there are GPUs."""
    if device().type == "cuda":
        torch.cuda.set_device(rank)


def devices_there(asked: int) -> int:
    """So many of the devices that are asked for: GPUs where there are any, else shares of the processor."""
    if sys.platform != "linux":  # whose nameless memory and death signals several processes need
        return 1
    return min(asked, torch.cuda.device_count()) if device().type == "cuda" else asked


def number_format(parameters: int) -> torch.dtype:
    """Of the base model's weights and of what passes through them; the adapter is always float32.

    On CPU it is measured: a processor may list bfloat16 instructions and be slower with them (0.5 times as fast as
    float32 on one that we had, twice as fast on another).
    """
    if device().type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if parameters < SMALL_MODEL:
        return torch.float32
    gain = _product_seconds(torch.float32) / _product_seconds(torch.bfloat16)
    return torch.bfloat16 if gain > WORTH_BFLOAT16 else torch.float32


def kept_number_format(
    directory: Path, parameters: int, choose: Callable[[int], torch.dtype] = number_format
) -> torch.dtype:
    """What `choose` said for a job when it first began; `directory` survives its attempts."""
    file = directory / FORMAT_FILE
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if file.is_file() and (kept := known.get(file.read_text(encoding="utf-8"))) is not None:
        return kept
    chosen = choose(parameters)
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(str(chosen).removeprefix("torch."), encoding="utf-8")
    return chosen


def _product_seconds(dtype: torch.dtype) -> float:
    """Processor time of 256 tokens through a layer of width 1024, the best of a few."""
    tokens, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    seconds: list[float] = []
    for _ in range(6):
        began = time.process_time()
        torch.mm(tokens, weights)
        seconds.append(time.process_time() - began)
    return max(min(seconds), 1e-6)


def choose_threads(asked: int, parameters: int, processes: int = 1) -> int:
    """Of each of the job's processes: `asked`, or by the size of the model. One core is left to serving."""
    if asked:
        return asked
    cores = len(os.sched_getaffinity(0)) - 1
    return 1 if parameters < SMALL_MODEL else max(1, cores // processes)


def free_memory(processes: int = 1) -> int:
    """Bytes that each of the job's processes can still take: of its GPU, or its part of the machine's."""
    if device().type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory.free_memory() // processes
