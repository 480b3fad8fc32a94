"""`tuneship jobs watch`: shows a job live until it has ended, and reconnects when the connection breaks."""

import math
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from tuneship.cli.completion import completing
from tuneship.cli.connection import connected, reported
from tuneship.cli.operations import FOLLOWING_TRIES
from tuneship.cli.output import one_line, show_json, write
from tuneship.cli.parameters import AsJson
from tuneship.cli.streams import entry_line
from tuneship.contract.common import JobId
from tuneship.contract.jobs import Job, JobStatus
from tuneship.contract.reports.job_reports import JobStep

if TYPE_CHECKING:  # they start slowly
    from rich.console import Console

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
        from rich.console import Console  # noqa: PLC0415 - starts slowly

        from tuneship.cli.live import shows_pictures  # noqa: PLC0415

        console = Console()
        if not as_json and shows_pictures(console):
            with _live(client, seen, console):
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
    losses: dict[int, float] = field(default_factory=dict[int, float])
    ended: threading.Event = field(default_factory=threading.Event)


def _follow(client: "Client", seen: _Watched, *, shows: bool, as_json: bool) -> None:
    with closing(client.jobs.follow_logs(seen.job.id)) as entries:
        for entry in entries:
            if isinstance(entry, JobStep):
                seen.step = entry
                if math.isfinite(entry.training_loss):
                    seen.losses[entry.step] = entry.training_loss
            if shows and as_json:
                show_json(entry.model_dump(mode="json"), is_stream=True)
            elif shows:
                write(entry_line(entry))


@contextmanager
def _live(client: "Client", seen: _Watched, console: "Console") -> Generator[None]:
    """A picture that is drawn again twice a second, while a thread reads the job's record."""
    from rich.console import Group, RenderableType  # noqa: PLC0415 - starts slowly
    from rich.text import Text  # noqa: PLC0415

    from tuneship.cli.live import LOSS_STYLE, Picture, bars, sparkline  # noqa: PLC0415

    def read_again() -> None:
        from tuneship.client import TuneshipError  # noqa: PLC0415 - starts slowly

        while not seen.ended.wait(RECORD_EVERY_S):
            # The stream decides whether the service is lost; this one only adds to it.
            try:
                ends_at = time.monotonic() + RECORD_WITHIN_S
                seen.job = client.with_options(tries=1, ends_at=ends_at).jobs.get(seen.job.id)
            except TuneshipError:
                continue

    bar = bars()
    task = bar.add_task("", total=None)

    def draw() -> RenderableType:
        job, step = seen.job, seen.step
        done = step.step if step else job.current_step
        bar.update(task, completed=done, total=job.total_steps or None)
        rows: list[RenderableType] = [Text(one_line(state_of(job, step))), bar]
        if losses := losses_of(job, step):
            curve = sparkline(list(seen.losses.values()), max(8, console.width - len(losses) - 2))
            rows.append(Text.assemble((curve, LOSS_STYLE), "  " if curve else "", losses))
        return Group(*rows)

    reader = threading.Thread(target=read_again, daemon=True)
    reader.start()
    try:
        with Picture(console, draw):
            yield
    finally:
        seen.ended.set()
        # The client is closed next.
        reader.join()


def state_of(job: Job, step: JobStep | None) -> str:
    """The state of a job that has not ended, its speed, and when it will end."""
    if job.status == JobStatus.QUEUED and step is None:
        place = "" if job.queue_position is None else f", {job.queue_position} in the queue"
        return f"{job.id}  {job.status}{place}"
    parts = [job.id, str(job.status)]
    if job.tokens_per_second is not None:
        parts.append(f"{job.tokens_per_second:,.0f} tokens/s")
    if job.estimated_completion_at is not None:
        parts.append(f"ends at {job.estimated_completion_at.astimezone():%H:%M:%S}")
    return "  ".join(parts)


def losses_of(job: Job, step: JobStep | None) -> str:
    """The newest losses of a job; empty before the first one."""
    training = step.training_loss if step else job.training_loss
    validation = step.validation_loss if step else job.validation_loss
    known = {"loss": training, "validation": validation}
    return "  ".join(f"{name} {loss:.4f}" for name, loss in known.items() if loss is not None)


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
