"""`tuneship jobs export`: writes a job that has ended into a tracker, as a release with `tracking` does it."""

from typing import Annotated, Literal

import typer

from tuneship.cli.common import fail
from tuneship.cli.completion import completing
from tuneship.cli.connection import connected, reported
from tuneship.cli.output import one_line, show_json, write
from tuneship.cli.parameters import AsJson
from tuneship.contract.common import JobId

app = typer.Typer(no_args_is_help=True)


@app.callback()
def jobs() -> None:
    """Hold the verbs of jobs that are not made from a declared operation."""


@app.command()
def export(
    job_id: Annotated[
        str, typer.Argument(metavar="JOB_ID", autocompletion=completing(JobId), show_default=False)
    ],
    to: Annotated[
        Literal["mlflow", "tensorboard", "wandb"],
        typer.Option("--to", help="wandb: the folder of an offline run.", show_default=False),
    ],
    place: Annotated[
        str | None,
        typer.Option(
            help="The server's URL, or the folder. Default: TUNESHIP_MLFLOW_URL, TUNESHIP_TENSORBOARD_DIR or "
            "TUNESHIP_WANDB_DIR.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an ended job into MLflow, TensorBoard or Weights & Biases: parameters, curves, digests of its data.

    A job that is there already is completed; nothing is doubled.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - starts slowly

    from tuneship.settings import TrackingSettings, faults_in  # noqa: PLC0415

    try:
        from tuneship.tracking.job_facts import JobNotEnded, run_of_job  # noqa: PLC0415
        from tuneship.tracking.outside import write_outside  # noqa: PLC0415
        from tuneship.tracking.targets import PLACES, targets_of  # noqa: PLC0415
    except ModuleNotFoundError as error:  # the distribution of the client has no trackers
        fail(f"this needs `pip install 'tuneship[{to}]'` (missing: {error.name})")
    try:
        settings = TrackingSettings()
        # The option counts before the environment, and only the chosen tracker is used.
        chosen = {name: None for name in PLACES.values() if name != PLACES[to]}
        chosen |= {PLACES[to]: place} if place else {}
        targets = targets_of(TrackingSettings.model_validate(settings.model_dump() | chosen))
    except ValidationError as error:
        fail(f"a setting is not valid: {faults_in(error)}")
    except ValueError as error:
        fail(f"--place: {error}")
    if not targets:
        fail(f"--place is needed, or TUNESHIP_{PLACES[to].upper()}")
    with reported(), connected() as client:
        try:
            run = run_of_job(client, job_id)
        except JobNotEnded as error:
            fail(str(error))
    [report] = write_outside([run], targets, settings.tracking_timeout_s)
    if report.problem is not None:
        fail(f"{to}: not written: {report.problem}")
    if as_json:
        show_json(report.model_dump(mode="json", exclude_none=True))
    else:
        write(one_line(report.place))
