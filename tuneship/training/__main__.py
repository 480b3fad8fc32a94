"""The training process: `python -m tuneship.training WORK_DIR [DESCRIPTOR]`, or `--wait DESCRIPTOR`.

With a descriptor it reads its order (work directory and keys) from that pipe; with `--wait` it loads torch first, since
the order may come later.

Reads WORK_DIR/spec.json and appends to WORK_DIR/progress.jsonl, whose last line says how the job ended. Exit code 0
for completed and cancelled, 1 for failed, 2 for arguments it does not understand. torch is loaded only after the watch
for a stop has begun. Next: `training_loop.py`.
"""

import errno
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

from tuneship.host.priority import lower_priority
from tuneship.isolation.isolation import narrow
from tuneship.isolation.landlock import Places
from tuneship.processes.launch import INHERITED
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
    LEASE_FILE,
    PROGRESS_FILE,
    SIGNALLED,
    SPEC_FILE,
    Order,
    TrainingSpec,
)

# Of a core that both want, serving gets three quarters.
NICENESS = 5
# Out of memory on CPU, and in a library of CUDA, is a plain RuntimeError of torch with one of these texts.
MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
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
    """Run the job of one work directory; returns the exit code."""
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
    """Wait for the order on a pipe; None when the pipe is closed before it is complete."""
    with os.fdopen(descriptor, encoding="utf-8") as line:
        return Order.from_line(line.readline())


def wait_for_job(descriptor: int) -> Order | None:
    """Load the libraries that every job needs, then wait for an order; None when the pipe is closed before."""
    import tuneship.training.training_loop  # noqa: F401, PLC0415 (loads torch: seconds)

    return read_order(descriptor)


def run_job(order: Order) -> int:
    """Do the job of an order and write the last line of its progress; returns the exit code."""
    work_dir = order.folder
    progress = ProgressFile(work_dir / PROGRESS_FILE)
    stop = StopRequest(work_dir / CANCEL_FILE, work_dir / LEASE_FILE)
    # Serving goes first, so that training may use every core.
    lower_priority(NICENESS)
    try:
        spec = TrainingSpec.from_json((work_dir / SPEC_FILE).read_text(encoding="utf-8"))
        if spec.gpus:  # before a library asks for them; child processes inherit it
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)  # noqa: TID251 - the process's own
        restrict_to_job_files(order, spec)
        stop.watch(progress)
        stop.raise_if_requested()
        from tuneship.training.training_loop import train  # noqa: PLC0415 (loads torch: seconds)

        train(spec, order.keys, progress, stop)
    except TrainingCancelled:
        progress.end("cancelled")
    except RankLost as lost:
        # No last line: like a kill of this process, this is no end of the job, and the next attempt resumes.
        progress.log("warning", str(lost))
        return 1 if lost.exit_code >= 0 else SIGNALLED - lost.exit_code
    except Exception as error:  # noqa: BLE001 (whatever it is, the supervisor must get a reason)
        failure = failure_of(error)
        progress.end("failed", reason=failure.reason.value, message=failure.message)
        return 1
    return 0


def restrict_to_job_files(order: Order, spec: TrainingSpec) -> None:
    """Restrict this process to the files of its job, where it is isolated at all."""
    write = (order.folder, *spec.written_paths, Path(tempfile.gettempdir()))
    if narrow(Places(spec.read_paths, write, uses_gpus=True)):
        return
    # The kernel restricts one thread at a time, and a library has started others: the process replaces itself by a
    # new program, which has one thread, and hands it the order.
    theirs, ours = os.pipe()
    os.write(ours, order.to_line().encode())
    os.close(ours)
    os.set_inheritable(theirs, True)
    launch = ("-m", "tuneship.processes.launch", str(os.getppid()), INHERITED)
    module = ("tuneship.training", str(order.folder), str(theirs))
    os.execv(sys.executable, [sys.executable, *launch, *module])  # noqa: S606 - ourselves


def failure_of(error: Exception) -> TrainingFailed:
    """The failure as it is shown to the owner of the job."""
    if isinstance(error, TrainingFailed):
        return error
    if is_out_of_memory(error):
        return TrainingFailed(
            Reason.OUT_OF_MEMORY,
            f"the memory of the machine, or of its GPU, was not enough; {NEEDS_LESS_MEMORY}",
        )
    if disk_error(error) in DISK_MESSAGES:
        return TrainingFailed(Reason.INTERNAL, DISK_MESSAGES[disk_error(error)])
    # The text of an unforeseen error may quote data: only its type and place are reported, and its frames logged.
    frames = traceback.extract_tb(error.__traceback__)
    sys.stderr.write("".join(traceback.format_list(frames)) + type(error).__name__ + "\n")
    last = frames[-1]
    return TrainingFailed(
        Reason.INTERNAL,
        f"unexpected {type(error).__name__} in {Path(last.filename).name} line {last.lineno}",
    )


def disk_error(error: Exception) -> int:
    """The errno of an error, 0 where it has none."""
    if isinstance(error, OSError):
        return error.errno or 0
    # The library that writes tensors has it only in its text.
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match and type(error).__name__ == "SafetensorError" else 0


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is Python's, CUDA's (`OutOfMemoryError`) or the CPU allocator's out-of-memory error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in MEMORY_WORDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
