"""What the commands share: settings from options and environment, and complaints of one line."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from pydantic import ValidationError

from tuneship.settings import ServiceSettings
from tuneship.startup import StartupError

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
    os.umask(0o077)
    try:
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the light install

        from tuneship.service.opening import open_for_command  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(f"this needs `pip install 'tuneship[service]'` (missing: {error.name})")
    try:
        opened = open_for_command(settings)
    except StartupError as error:
        fail(str(error))
    except (SQLAlchemyError, OSError, ValueError) as error:  # its own text may hold the URL
        fail(f"the data of the service cannot be opened: {type(error).__name__}")
    try:
        yield opened.database, opened.secret
    except SQLAlchemyError as error:
        fail(f"the database failed: {type(error).__name__}")
    finally:
        opened.database.close()
