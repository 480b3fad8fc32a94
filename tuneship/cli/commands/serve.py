"""`tuneship serve`, which runs the service, and `tuneship openapi`, which prints its API."""

import json
import logging
import os
import sqlite3
from pathlib import Path
from typing import Annotated

import typer

from tuneship.cli.common import fail, service_settings
from tuneship.host.startup import StartupError

app = typer.Typer(no_args_is_help=True)


@app.command()
def serve(  # noqa: PLR0913 - the options of a command
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free port.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where everything is kept.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file; with it, and --tls-key, only TLS is spoken.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    allow_fault_injection: Annotated[
        bool,
        typer.Option(
            "--allow-fault-injection", help="Let fault.* tags break deployments, for drills."
        ),
    ] = False,
    accept_clock: Annotated[
        bool,
        typer.Option(
            "--accept-clock", help="Start although the clock is behind the newest time of the data."
        ),
    ] = False,
    die_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run the service. It prints `ready <url>`; credentials are in <data-dir>/credentials.json."""
    settings = service_settings(
        host=host,
        port=port,
        data_dir=data_dir,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        allow_fault_injection=allow_fault_injection or None,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("alembic", "uvicorn.error"):  # their own progress is of no use to an operator
        logging.getLogger(name).setLevel(logging.WARNING)
    from tuneship.settings import unknown_variables  # noqa: PLC0415 - starts slowly

    for name in unknown_variables():
        logging.getLogger("tuneship").warning("%s is no setting and is ignored", name)
    try:
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the light install has no service

        from tuneship.service.serve import serve as run  # noqa: PLC0415
        from tuneship.store.files.blobs import BlobsAway  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(f"the service needs `pip install 'tuneship[service]'` (missing: {error.name})")
    try:
        parent = os.getppid() if die_with_parent else None
        run(settings, with_parent=parent, accept_clock=accept_clock)
    except StartupError as error:
        fail(str(error), code=error.exit_code)
    except SQLAlchemyError as error:
        # SQLite's own text is shown, such as `database or disk is full`; that of a database server
        # may hold its address and password.
        origin = getattr(error, "orig", None)
        is_file = isinstance(origin, sqlite3.Error)
        fault = f"{settings.data_dir}: {origin}" if is_file else type(error).__name__
        fail(f"the service cannot open its database: {fault}")
    except BlobsAway as fault:
        fail(f"the files in {settings.blob_url} cannot be had: {fault}")
    except OSError as error:
        fail(f"the service cannot start: {error}")


@app.command()
def openapi(
    openai: Annotated[
        bool, typer.Option(help="Print OpenAI's API below /openai/v1 instead of the main one.")
    ] = False,
) -> None:
    """Print the API as an OpenAPI 3.1 document, e.g. to generate a client in another language."""
    from tuneship.contract.document.openapi import document  # noqa: PLC0415 - starts slowly
    from tuneship.contract.openai.document import openai_document  # noqa: PLC0415 - starts slowly

    printed = openai_document() if openai else document()
    typer.echo(json.dumps(printed, indent=1, ensure_ascii=False))
