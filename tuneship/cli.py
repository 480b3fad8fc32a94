"""The command `tuneship`: the composition root that people start."""

import json
import logging
import os
import sqlite3
from pathlib import Path
from typing import Annotated

import typer

from tuneship import audit_cli, keys_cli, models_cli
from tuneship.command_line import fail, service_settings
from tuneship.contract.openapi import document
from tuneship.settings import ServiceSettings

DIRECTORY_IN_USE = 6

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tune a language model on your data and ship it safely.",
)
app.add_typer(keys_cli.app, name="keys")
app.add_typer(audit_cli.app, name="audit")
app.add_typer(models_cli.app, name="models")


@app.callback()
def tuneship() -> None:
    """Tune a language model on your data and ship it safely."""


@app.command()
def serve(  # noqa: PLR0913 - the options of a command
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free port.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where everything is kept.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file; with it, and --tls-key, only TLS is spoken.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    allow_fault_injection: Annotated[
        bool, typer.Option(help="Let fault.* tags break deployments, for drills.")
    ] = False,
    die_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run the service. It prints `ready <url>`; credentials lie in <data-dir>/credentials.json."""
    settings = service_settings(
        host=host,
        port=port,
        data_dir=data_dir,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        allow_fault_injection=allow_fault_injection or None,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

        from tuneship.service.access import MasterKeyDamaged  # noqa: PLC0415 - the light install
        from tuneship.service.catalogue import CatalogueFault  # noqa: PLC0415
        from tuneship.service.keyring import AnotherMasterKey  # noqa: PLC0415
        from tuneship.service.serve import DirectoryInUse  # noqa: PLC0415 - has no service
        from tuneship.service.serve import serve as run  # noqa: PLC0415
        from tuneship.store.belonging import FilesOfAnotherDatabase  # noqa: PLC0415
        from tuneship.store.database import DatabaseInUse, UnknownDatabase  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(f"the service needs `pip install 'tuneship[service]'` (missing: {error.name})")
    try:
        run(settings, with_parent=os.getppid() if die_with_parent else None)
    except (DirectoryInUse, DatabaseInUse) as error:
        place = settings.data_dir if isinstance(error, DirectoryInUse) else "this database"
        fail(f"another service runs on {place}", code=DIRECTORY_IN_USE)
    except AnotherMasterKey:
        fail(f"{settings.master_key} is not the key that the stored files are sealed with")
    except SQLAlchemyError as error:
        fail(f"the service cannot open its database: {_database_fault(error, settings)}")
    except (
        CatalogueFault,
        FilesOfAnotherDatabase,
        MasterKeyDamaged,
        UnknownDatabase,
        OSError,
    ) as error:
        fail(f"the service cannot start: {error}")


def _database_fault(error: Exception, settings: ServiceSettings) -> str:
    """SQLite's own words, such as `database or disk is full`; those of a server may hold its address and password."""
    origin = getattr(error, "orig", None)
    is_file = isinstance(origin, sqlite3.Error)
    return f"{settings.data_dir}: {origin}" if is_file else type(error).__name__


@app.command()
def openapi() -> None:
    """Print the API as an OpenAPI 3.1 document, e.g. to generate a client in another language."""
    typer.echo(json.dumps(document(), indent=1, ensure_ascii=False))


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
