"""The command `tuneship`: the composition root that people start."""

import logging
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from tuneship.settings import ServiceSettings

DIRECTORY_IN_USE = 6

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tune a language model on your data and ship it safely.",
)


@app.callback()
def tuneship() -> None:
    """Tune a language model on your data and ship it safely."""


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free port.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where everything is kept.")] = None,
    allow_fault_injection: Annotated[
        bool, typer.Option(help="Let fault.* tags break deployments, for drills.")
    ] = False,
    die_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run the service. It prints `ready <url>`; credentials lie in <data-dir>/credentials.json."""
    given = {"host": host, "port": port, "data_dir": data_dir}
    chosen = {name: value for name, value in given.items() if value is not None}
    if allow_fault_injection:
        chosen["allow_fault_injection"] = True
    try:
        settings = ServiceSettings(**chosen)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        places = ", ".join(".".join(str(part) for part in one["loc"]) for one in error.errors())
        fail(f"a setting is not valid: {places}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

        from tuneship.service.catalogue import CatalogueFault  # noqa: PLC0415 - the light install
        from tuneship.service.serve import DirectoryInUse  # noqa: PLC0415 - has no service
        from tuneship.service.serve import serve as run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(f"the service needs `pip install 'tuneship[service]'` (missing: {error.name})")
    try:
        run(settings, with_parent=os.getppid() if die_with_parent else None)
    except DirectoryInUse:
        fail(f"another service runs on {settings.data_dir}", code=DIRECTORY_IN_USE)
    except SQLAlchemyError as error:
        fail(f"the service cannot open its database: {type(error).__name__}")
    except (CatalogueFault, OSError) as error:
        fail(f"the service cannot start: {error}")


def fail(message: str, code: int = 1) -> NoReturn:
    """One clear line on standard error, then the exit code."""
    typer.echo(f"tuneship: {message}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
