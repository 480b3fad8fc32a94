"""`tuneship release`: runs the flow of `flows/tune_and_deploy.py` as its script does."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tuneship.cli.common import fail
from tuneship.cli.connection import chosen_service, login_file, reported, settings_of_environment

# By its name: the library does not know the pipeline, which stands above it.
FLOW = "flows.tune_and_deploy"

app = typer.Typer(no_args_is_help=True)


@app.command(epilog="Example:\n\ntuneship release --params release.yaml --result out.json")
def release(
    params: Annotated[
        Path, typer.Option(metavar="FILE", help="YAML or JSON file, as `examples/release.yaml`.")
    ],
    result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result here as JSON.")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Write plain lines to a terminal, as to a file, instead of the live picture.",
        ),
    ] = False,
) -> None:
    """Tune a model and release it step by step, as long as its gates allow it.

    Without a service it starts one for itself. Ends with 0 promoted, 3 rejected, 4 rolled back, 5 paused for a
    person, 1 any error, 130 or 143 stopped after the traffic was returned.
    """
    from tuneship.settings import use_service  # noqa: PLC0415 - starts slowly

    with reported():
        if not settings_of_environment()[0].url and login_file().is_file():
            use_service(chosen_service().settings)
    # The pipeline lies in the folder of a project or in a checkout, as for the script.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = find_spec(FLOW)
    except ModuleNotFoundError:
        found = None
    # Every user of Prefect has a folder of that name.
    if found is None:
        fail("there is no pipeline here: run this in a project that `tuneship init` made")
    sys.argv = ["tuneship release", "--params", str(params)]
    if result is not None:
        sys.argv += ["--result", str(result)]
    if plain:
        sys.argv += ["--plain"]
    runpy.run_module(FLOW, run_name="__main__", alter_sys=True)
