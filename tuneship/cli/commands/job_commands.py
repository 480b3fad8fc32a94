"""`tuneship jobs watch`: shows a job live until it has ended, and reconnects when the connection breaks."""

import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneship.cli.completion import completing
from tuneship.cli.connection import connected, reported
from tuneship.cli.operations import FOLLOWING_TRIES
from tuneship.cli.output import is_terminal, one_line, show_json, write
from tuneship.cli.parameters import AsJson
from tuneship.cli.streams import entry_line
from tuneship.contract.common import JobId
from tuneship.contract.jobs import Job, JobStatus
from tuneship.contract.reports.job_reports import JobStep

if TYPE_CHECKING:  # starts slowly
    from tuneship.client import Client

# Speed and end time are in the job's record, which is read again so often.
RECORD_EVERY_S = 2.0
RECORD_WITHIN_S = 5.0

app = typer.Typer(no_args_is_help=True)


@app.callback()
def jobs() -> None:
    """Hold the verbs of jobs that are not made from a declared operation."""


@app.command()
def watch(
    job_id: Annotated[
        str, typer.Argument(metavar="JOB_ID", autocompletion=completing(JobId), show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Watch a job until it has ended: loss, speed, and when it will end.

    Broken connections and restarts of the service are waited out. Ends with 0 if the job is completed, else with 1.
    In a pipe every log line and step is a line.
    """
    with reported(), connected() as asked:
        seen = _Watched(asked.jobs.get(job_id))
        # From here on the service is known to be there, and a long pause is worth its while.
        client = asked.with_options(tries=FOLLOWING_TRIES)
        if is_terminal() and not as_json:
            with _live(client, seen):
                _follow(client, seen, shows=False, as_json=False)
        else:
            _follow(client, seen, shows=True, as_json=as_json)
        job = client.jobs.get(job_id)
        if as_json:
            show_json(job.model_dump(mode="json"), is_stream=True)
        else:
            write(ending(job))
        if job.status != JobStatus.COMPLETED:
            raise typer.Exit(1)


@dataclass
class _Watched:
    """The state of a watched job: its record, and the last step of its stream."""

    job: Job
    step: JobStep | None = None
    ended: threading.Event = field(default_factory=threading.Event)


def _follow(client: "Client", seen: _Watched, *, shows: bool, as_json: bool) -> None:
    with closing(client.jobs.follow_logs(seen.job.id)) as entries:
        for entry in entries:
            if isinstance(entry, JobStep):
                seen.step = entry
            if shows and as_json:
                show_json(entry.model_dump(mode="json"), is_stream=True)
            elif shows:
                write(entry_line(entry))


@contextmanager
def _live(client: "Client", seen: _Watched) -> Generator[None]:
    """A line that rich draws again several times a second, while a thread reads the job's record."""
    from rich.console import Console  # noqa: PLC0415 - starts slowly
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    def read_again() -> None:
        from tuneship.client import TuneshipError  # noqa: PLC0415 - starts slowly

        while not seen.ended.wait(RECORD_EVERY_S):
            # The stream decides whether the service is lost; this one only adds to it.
            try:
                ends_at = time.monotonic() + RECORD_WITHIN_S
                seen.job = client.with_options(tries=1, ends_at=ends_at).jobs.get(seen.job.id)
            except TuneshipError:
                continue

    reader = threading.Thread(target=read_again, daemon=True)
    reader.start()
    try:
        with Live(
            get_renderable=lambda: Text(progress_line(seen.job, seen.step)),
            console=Console(),
            refresh_per_second=4,
            transient=True,
        ):
            yield
    finally:
        seen.ended.set()
        # The client is closed next.
        reader.join()


def progress_line(job: Job, step: JobStep | None) -> str:
    """One line about a job that has not ended."""
    if job.status == JobStatus.QUEUED and step is None:
        place = "" if job.queue_position is None else f", {job.queue_position} in the queue"
        return f"{job.id}  {job.status}{place}"
    done = step.step if step else job.current_step
    total = job.total_steps
    share = f" ({100 * done // total} %)" if total else ""
    training = step.training_loss if step else job.training_loss
    validation = step.validation_loss if step else job.validation_loss
    parts: list[Any] = [
        job.id,
        job.status,
        f"step {done}/{total or '?'}{share}",
        None if training is None else f"loss {training:.4f}",
        None if validation is None else f"validation {validation:.4f}",
        None if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f} tokens/s",
    ]
    if job.estimated_completion_at is not None:
        parts.append(f"ends at {job.estimated_completion_at.astimezone():%H:%M:%S}")
    return "  ".join(part for part in parts if part is not None)


def ending(job: Job) -> str:
    """One line about a job that has ended."""
    if job.status == JobStatus.COMPLETED:
        loss = "" if job.validation_loss is None else f", validation loss {job.validation_loss:.4f}"
        return f"{job.id} is completed{loss}: {one_line(job.fine_tuned_model)}"
    why = (
        ""
        if job.error is None
        else f": {one_line(job.error.reason)}: {one_line(job.error.message)}"
    )
    return f"{job.id} is {one_line(job.status)}{why}"
