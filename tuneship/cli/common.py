"""Shared by the commands: settings from options and environment, the database, and errors of one line."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from tuneship.host.startup import StartupError

if TYPE_CHECKING:
    from tuneship.service.open_installation import Installation  # the light install has no service
    from tuneship.settings import ServiceSettings  # starts slowly


def drop_unwritable_output() -> None:
    """Discard output that cannot be written: otherwise Python's last flush would fail, too, and print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one line on standard error and exit with a code."""
    from tuneship.cli.output import readable  # noqa: PLC0415 - starts slowly

    # It may hold words of another program: of a service, or of a model's file.
    typer.echo(f"tuneship: {readable(message)}", err=True)
    raise typer.Exit(code)


def service_settings(**options: Any) -> "ServiceSettings":
    """The service's settings; for an option that is None the environment decides."""
    from pydantic import ValidationError  # noqa: PLC0415 - starts slowly

    from tuneship.settings import ServiceSettings, faults_in  # noqa: PLC0415

    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        return ServiceSettings(**chosen)
    except ValidationError as error:
        fail(f"a setting is not valid: {faults_in(error)}")


def has_installation(settings: "ServiceSettings") -> bool:
    """Whether a service has run on this data; exits with one line when that cannot be seen."""
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the light install

    from tuneship.service.open_installation import has_installation as is_there  # noqa: PLC0415

    try:
        return is_there(settings)
    except StartupError as error:
        fail(str(error))
    except (SQLAlchemyError, OSError, ValueError) as error:  # its own text may hold the URL
        fail(f"the data of the service cannot be opened: {type(error).__name__}")


@contextmanager
def opened_installation(
    settings: "ServiceSettings", *, reads_files: bool = False
) -> Generator["Installation"]:
    """The installation of a service, running or not; exits with one line when it cannot be opened.

    `reads_files`: whether the command needs datasets and models.
    """
    # Restored at the end, because `make up` opens keys, too, and starts processes afterwards.
    before = os.umask(0o077)
    try:
        try:
            from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the light install

            from tuneship.service.open_installation import open_for_command  # noqa: PLC0415
            from tuneship.store.files.blobs import BlobsAway  # noqa: PLC0415
        except ModuleNotFoundError as error:
            fail(f"this needs `pip install 'tuneship[service]'` (missing: {error.name})")
        try:
            opened = open_for_command(settings, reads_files=reads_files)
        except StartupError as error:
            fail(str(error))
        except (SQLAlchemyError, OSError, ValueError) as error:  # its own text may hold the URL
            fail(f"the data of the service cannot be opened: {type(error).__name__}")
        try:
            yield opened
        except SQLAlchemyError as error:
            fail(f"the database failed: {type(error).__name__}")
        except BlobsAway as fault:
            fail(f"the files in {opened.blobs.place} cannot be had: {fault}")
        finally:
            opened.database.close()
    finally:
        os.umask(before)
