"""Events of OpenAI's fine-tuning jobs: the job's log in OpenAI's sentences, merged with its measured steps. Pure.

An event's place is the pair (entry of the log, number). The numbers of a step are 0 and more: it was stored while this
entry was the newest. Sentences have numbers below 0, since one entry of our log may be several of OpenAI's.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from tuneship.contract.openai.ids import shown_id
from tuneship.contract.openai.jobs import FineTuningJobEvent, MetricsData
from tuneship.store.database.tables import JobLogRow, JobMetricsRow, JobRow

Place = tuple[int, int]
# More than any entry of the log has sentences.
SENTENCES = 8
EVENT_ID = re.compile(r"ftevent-[0-9a-z]{20,32}-([0-9]{1,18})-([0-9]{1,18})")
LEVELS = {"warning": "warn", "error": "error"}
COMPLETED = re.compile(r"completed; the model is the state after step (\d+)")


def place_of(event_id: str) -> Place | None:
    """The place of an event by its id; None for text that is no such id."""
    found = EVENT_ID.fullmatch(event_id)
    return None if found is None else (int(found[1]), int(found[2]) - SENTENCES)


def _queued(job: JobRow) -> Sequence[str]:
    return (
        f"Created fine-tuning job: {shown_id(job['id'])}",
        f"Validating training file: {shown_id(job['dataset_id'])}",
        "Files validated, moving job to queued state",
    )


# OpenAI's sentences for entries of our log, oldest first.
SAID: Mapping[str, Callable[[JobRow], Sequence[str]]] = {
    "job queued": _queued,
    "attempt 1 starts": lambda _: ("Fine-tuning job started",),
}


def sentences(job: JobRow, message: str) -> Sequence[str]:
    """The sentences of OpenAI for a message of our log, oldest first; any other message is said as it is."""
    if message in SAID:
        return SAID[message](job)
    completed = COMPLETED.fullmatch(message)
    if completed is None:
        return (message,)
    model = job["fine_tuned_model"]
    return (
        f"Checkpoint created at step {completed[1]} with Snapshot ID: {model}:ckpt-step-{completed[1]}",
        f"New fine-tuned model created: {model}",
        "The job has successfully completed",
    )


def events_of(
    job: JobRow,
    logs: Sequence[JobLogRow],
    steps: Sequence[JobMetricsRow],
    moments: Mapping[int, int],
) -> list[tuple[Place, FineTuningJobEvent]]:
    """All events of some entries and steps, newest first. `moments`: epoch seconds of the entries by id."""
    placed = [*_of_logs(job, logs), *_of_steps(job, steps, moments)]
    return sorted(placed, key=lambda one: one[0], reverse=True)


def _of_logs(job: JobRow, logs: Sequence[JobLogRow]) -> Iterator[tuple[Place, FineTuningJobEvent]]:
    for entry in logs:
        said = sentences(job, entry["message"])
        for number, message in enumerate(said, start=-len(said)):
            place = (entry["id"], number)
            yield (
                place,
                FineTuningJobEvent.model_validate(
                    {
                        "id": _id(job, place),
                        "created_at": int(entry["timestamp"].timestamp()),
                        "level": LEVELS.get(entry["level"], "info"),
                        "message": message,
                    }
                ),
            )


def _of_steps(
    job: JobRow, steps: Sequence[JobMetricsRow], moments: Mapping[int, int]
) -> Iterator[tuple[Place, FineTuningJobEvent]]:
    for row in steps:
        place = (row["log_id"], row["step"])
        is_measured = row["evaluated"]
        data = MetricsData(
            step=row["step"],
            total_steps=job["total_steps"],
            train_loss=row["training_loss"],
            valid_loss=row["validation_loss"] if is_measured else None,
            valid_mean_token_accuracy=row["accuracy"] if is_measured else None,
        )
        text = f"Step {data.step}/{data.total_steps}: training loss={data.train_loss:.2f}"
        if data.valid_loss is not None:
            text += f", validation loss={data.valid_loss:.2f}"
        yield (
            place,
            FineTuningJobEvent(
                id=_id(job, place),
                created_at=moments.get(row["log_id"], int(job["updated_at"].timestamp())),
                level="info",
                message=text,
                type="metrics",
                data=data,
            ),
        )


def _id(job: JobRow, place: Place) -> str:
    return f"{shown_id(job['id'], 'ftevent')}-{place[0]}-{place[1] + SENTENCES}"
