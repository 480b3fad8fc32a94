"""The training process: `python -m tuneship.training WORK_DIR`, or `--wait DESCRIPTOR` to be told the directory later.

The keys of sealed files come on a pipe too: in the line that `--wait` reads, or with `WORK_DIR DESCRIPTOR` at once.

Reads WORK_DIR/spec.json and appends to WORK_DIR/progress.jsonl; its last line says how it ended. Exit
code 0 for completed and cancelled, 1 for failed, 2 for a call it does not understand. torch is loaded
only after the watch for a stop has begun. Next: `run.py`.
"""

import errno
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

from tuneship.runtime.isolation import narrow
from tuneship.runtime.landlock import Places
from tuneship.runtime.launch import INHERITED
from tuneship.training.progress_file import (
    NEEDS_LESS_MEMORY,
    ProgressFile,
    RankLost,
    Reason,
    StopRequest,
    TrainingCancelled,
    TrainingFailed,
)
from tuneship.training.spec import (
    CANCEL_FILE,
    LOG_FILE,
    PROGRESS_FILE,
    SIGNALLED,
    SPEC_FILE,
    Order,
    TrainingSpec,
)

# How torch says on CPU, in a plain RuntimeError, that memory is over.
MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
NOT_WRITTEN = "a checkpoint or the model could not be written; the operator of the service must"
DISK_FULL = f"the service's disk is full: {NOT_WRITTEN} free some space"
DISK_BROKEN = f"the service's disk failed: {NOT_WRITTEN} look after it"
DISK_MESSAGES = {
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.EIO: DISK_BROKEN,
    errno.EROFS: DISK_BROKEN,
}


def main(arguments: list[str]) -> int:
    """Run the job of one work directory, which is named at once or, after `--wait`, on a pipe."""
    match arguments:
        case ["--wait", descriptor]:
            order = wait_for_job(int(descriptor))
        case [work_dir]:
            order = Order(Path(work_dir))
        case [_, descriptor] if descriptor.isdigit():
            order = read_order(int(descriptor))
        case _:
            usage = "python -m tuneship.training WORK_DIR [DESCRIPTOR] | --wait DESCRIPTOR"
            sys.stderr.write(f"usage: {usage}\n")
            return 2
    return 0 if order is None else run_job(order)


def read_order(descriptor: int) -> Order | None:
    """The line on a pipe, when it comes; None when the pipe is closed before."""
    with os.fdopen(descriptor, encoding="utf-8") as line:
        return Order.from_line(line.readline())


def wait_for_job(descriptor: int) -> Order | None:
    """Load what every job needs, then wait for a line that names a work directory; None when the line is closed.

    From then on the output goes to that directory's log, as if the process had been started for it.
    """
    import tuneship.training.run  # noqa: F401, PLC0415 (loads torch: seconds)

    order = read_order(descriptor)
    if order is None:
        return None
    with (order.folder / LOG_FILE).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    return order


def run_job(order: Order) -> int:
    """From the orders to the last line of progress; returns the exit code."""
    work_dir = order.folder
    progress = ProgressFile(work_dir / PROGRESS_FILE)
    stop = StopRequest(work_dir / CANCEL_FILE)
    try:
        spec = TrainingSpec.from_json((work_dir / SPEC_FILE).read_text(encoding="utf-8"))
        give_up_other_jobs(order, spec)
        stop.watch(progress)
        stop.raise_if_requested()
        from tuneship.training.run import train  # noqa: PLC0415 (loads torch: seconds)

        train(spec, order.keys, progress, stop)
    except TrainingCancelled:
        progress.end("cancelled")
    except RankLost as lost:  # no end of the job: like a kill of this process, it is resumed
        progress.log("warning", str(lost))
        return 1 if lost.exit_code >= 0 else SIGNALLED - lost.exit_code
    except Exception as error:  # noqa: BLE001 (whatever it is, the supervisor must learn of it)
        failure = failure_of(error)
        progress.end("failed", reason=failure.reason.value, message=failure.message)
        return 1
    return 0


def give_up_other_jobs(order: Order, spec: TrainingSpec) -> None:
    """Keep only this job's files open to this process, where it is isolated at all.

    The kernel takes files away from one thread at a time. Where a library has started others, the process begins again
    as a new program, which has one.
    """
    read = (Path(spec.base_model), spec.training_file, spec.validation_file)
    write = (order.folder, spec.output_dir, spec.checkpoint_dir, Path(tempfile.gettempdir()))
    is_done = narrow(Places(tuple(one for one in read if one is not None), write))
    if is_done:
        return
    theirs, ours = os.pipe()
    os.write(ours, order.to_line().encode())
    os.close(ours)
    os.set_inheritable(theirs, True)
    launch = ("-m", "tuneship.runtime.launch", str(os.getppid()), INHERITED)
    module = ("tuneship.training", str(order.folder), str(theirs))
    os.execv(sys.executable, [sys.executable, *launch, *module])  # noqa: S606 - ourselves


def failure_of(error: Exception) -> TrainingFailed:
    """The failure as the job's owner sees it.

    The text of an unforeseen error may quote data: its type and place are told, its frames go to
    stderr, its text nowhere.
    """
    if isinstance(error, TrainingFailed):
        return error
    if is_out_of_memory(error):
        return TrainingFailed(
            Reason.OUT_OF_MEMORY,
            f"the machine's memory was not enough; {NEEDS_LESS_MEMORY}",
        )
    if disk_error(error) in DISK_MESSAGES:
        return TrainingFailed(Reason.INTERNAL, DISK_MESSAGES[disk_error(error)])
    frames = traceback.extract_tb(error.__traceback__)
    sys.stderr.write("".join(traceback.format_list(frames)) + type(error).__name__ + "\n")
    last = frames[-1]
    return TrainingFailed(
        Reason.INTERNAL,
        f"unexpected {type(error).__name__} in {Path(last.filename).name} line {last.lineno}",
    )


def disk_error(error: Exception) -> int:
    """The number of the system's error, 0 for none. The library that writes tensors tells it in its text only."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found and type(error).__name__ == "SafetensorError" else 0


def is_out_of_memory(error: Exception) -> bool:
    """True for Python's, CUDA's (`OutOfMemoryError`) and the CPU allocator's way to say it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in MEMORY_WORDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
