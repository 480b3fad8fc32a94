"""What the commands share: settings from options and environment, and complaints of one line."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from pydantic import ValidationError

from tuneship.settings import ServiceSettings

if TYPE_CHECKING:  # the light install has no service
    from pydantic_core import ErrorDetails

    from tuneship.store.database import Database


def fail(message: str, code: int = 1) -> NoReturn:
    """One clear line on standard error, then the exit code."""
    typer.echo(f"tuneship: {message}", err=True)
    raise typer.Exit(code)


def service_settings(**options: Any) -> ServiceSettings:
    """The service's settings; an option that was not given (None) leaves it to the environment."""
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        return ServiceSettings(**chosen)
    except ValidationError as error:
        fail(f"a setting is not valid: {', '.join(map(_fault, error.errors()))}")


def _fault(error: "ErrorDetails") -> str:
    """The place; what is wrong only where that is said of several settings, and so in our own words."""
    place = ".".join(str(part) for part in error["loc"])
    return place or error["msg"].removeprefix("Value error, ")


@contextmanager
def opened_database(settings: ServiceSettings) -> Generator[tuple["Database", bytes]]:
    """The database and the master secret of a service, running or not; one clear line when they cannot be had."""
    secret = settings.master_key
    if not secret.is_file():
        fail(
            f"no service has run on {settings.data_dir}: start `tuneship serve`, or name --data-dir"
        )
    os.umask(0o077)
    try:
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the light install

        from tuneship.service.access import read_or_make_secret  # noqa: PLC0415
        from tuneship.store.belonging import (  # noqa: PLC0415
            FilesOfAnotherDatabase,
            check_belonging,
            record_belonging,
        )
        from tuneship.store.database import (  # noqa: PLC0415
            Database,
            DatabaseInUse,
            UnknownDatabase,
            url_of,
        )
    except ModuleNotFoundError as error:
        fail(f"this needs `pip install 'tuneship[service]'` (missing: {error.name})")
    url = url_of(settings.database_url, settings.data_dir)
    try:
        check_belonging(settings.data_dir, url)
        database = Database(url)
        record_belonging(settings.data_dir, url)
        master = read_or_make_secret(secret)
    except (FilesOfAnotherDatabase, UnknownDatabase) as error:
        fail(str(error))
    except DatabaseInUse:
        fail("a service of an older version works on the database: use the command of that version")
    except (SQLAlchemyError, OSError, ValueError) as error:  # its own text may hold the URL
        fail(f"the data of the service cannot be opened: {type(error).__name__}")
    try:
        yield database, master
    except SQLAlchemyError as error:
        fail(f"the database failed: {type(error).__name__}")
    finally:
        database.close()
