"""The training process: `python -m tuneship.training WORK_DIR`.

Reads WORK_DIR/spec.json and appends to WORK_DIR/progress.jsonl; its last line says how it ended. Exit
code 0 for completed and cancelled, 1 for failed, 2 for a call it does not understand. torch is loaded
only after the watch for a stop has begun. Next: `run.py`.
"""

import sys
import traceback
from pathlib import Path

from tuneship.training.progress import (
    Progress,
    Reason,
    StopRequest,
    TrainingCancelled,
    TrainingFailed,
)
from tuneship.training.spec import CANCEL_FILE, PROGRESS_FILE, SPEC_FILE, TrainingSpec

MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
"""How torch says on CPU, in a plain RuntimeError, that memory is over."""


def main(arguments: list[str]) -> int:
    """Run the job of one work directory."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m tuneship.training WORK_DIR\n")
        return 2
    work_dir = Path(arguments[0])
    progress = Progress(work_dir / PROGRESS_FILE)
    stop = StopRequest(work_dir / CANCEL_FILE)
    stop.watch(progress)
    try:
        spec = TrainingSpec.from_json((work_dir / SPEC_FILE).read_text(encoding="utf-8"))
        stop.raise_if_requested()
        from tuneship.training.run import train  # noqa: PLC0415 (loads torch: seconds)

        train(spec, progress, stop)
    except TrainingCancelled:
        progress.end("cancelled", at_step=progress.step)
    except Exception as error:  # noqa: BLE001 (whatever it is, the supervisor must learn of it)
        failure = failure_of(error)
        progress.end(
            "failed",
            reason=failure.reason.value,
            message=failure.message,
            at_step=progress.step,
        )
        return 1
    return 0


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
            "the machine's memory was not enough; a smaller batch_size or lora_rank needs less",
        )
    frames = traceback.extract_tb(error.__traceback__)
    sys.stderr.write("".join(traceback.format_list(frames)) + type(error).__name__ + "\n")
    last = frames[-1]
    return TrainingFailed(
        Reason.INTERNAL,
        f"unexpected {type(error).__name__} in {Path(last.filename).name} line {last.lineno}",
    )


def is_out_of_memory(error: Exception) -> bool:
    """True for Python's, CUDA's (`OutOfMemoryError`) and the CPU allocator's way to say it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in MEMORY_WORDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
