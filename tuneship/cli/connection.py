"""Finds the service that a command calls, and reports failed calls in one line.

The first place that names a service counts: the client's variables in the environment, `tuneship login`, the service
on this machine (its data directory says where it listens, and holds a key for its owner).
"""

import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from tuneship.cli.common import drop_unwritable_output, fail
from tuneship.cli.fields import BadField, is_header
from tuneship.host.process_start import still_runs

if TYPE_CHECKING:  # they start slowly
    from tuneship.client import Client
    from tuneship.settings import ClientSettings, PipelineSettings

ENDED_BY_CTRL_C = 130
# 128 and the number of SIGPIPE: whoever read the output has closed it.
NOBODY_READS = 141
NO_SERVICE = (
    "no service is known: start one with `tuneship serve`, log in to one with `tuneship login`, or set "
    "TUNESHIP_URL, TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID"
)
COMPLETES_WITHIN_S = 1.5


class NoService(Exception):
    """No service is configured, or its configuration cannot be used."""


@dataclass(frozen=True)
class ChosenService:
    """The address and credentials of a service, and the place that named it."""

    settings: "ClientSettings"
    source: str


def login_file() -> Path:
    """The file of `tuneship login`, in the user's configuration folder."""
    return Path(typer.get_app_dir("tuneship")) / "login.json"


def settings_of_environment() -> tuple["ClientSettings", "PipelineSettings"]:
    """Read the settings of the client and of the pipeline from the environment. Raises `NoService`."""
    from pydantic import ValidationError  # noqa: PLC0415 - starts slowly

    from tuneship.settings import ClientSettings, PipelineSettings, faults_in  # noqa: PLC0415

    try:
        return ClientSettings(), PipelineSettings()
    except ValidationError as error:
        raise NoService(f"a setting is not valid: {faults_in(error)}") from None


def chosen_service() -> ChosenService:
    """The service that the first configured place names. Raises `NoService`."""
    settings, pipeline = settings_of_environment()
    data_dir = pipeline.data_dir.expanduser()
    if settings.url:
        needed = {"TUNESHIP_API_KEY": settings.api_key, "TUNESHIP_CLIENT_ID": settings.client_id}
        missing = [name for name, value in needed.items() if not value]
        if missing:
            raise NoService(f"TUNESHIP_URL is set, and {' and '.join(missing)} must be set too")
        if not is_header(settings.client_id + settings.api_key.get_secret_value()):
            raise NoService("TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID must be printable ASCII")
        return ChosenService(settings, "the environment")
    file = login_file()
    if file.is_file():
        from tuneship.settings import ClientSettings  # noqa: PLC0415 - starts slowly

        if file.stat().st_mode & 0o077:
            raise NoService(
                f"{file} holds a key and is open to other users: run `chmod 600 {file}`"
            )
        fields = {name: value for name, value in _fields_in(file).items() if value}
        try:
            return ChosenService(ClientSettings(**fields), "tuneship login")
        except ValueError:
            raise NoService(f"{file} is damaged: run `tuneship login` again") from None
    return ChosenService(_on_this_machine(data_dir), f"the service of {data_dir}")


def _fields_in(file: Path) -> dict[str, Any]:
    try:
        fields: Any = json.loads(file.read_text())
    except OSError as error:
        raise NoService(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise NoService(f"{file} is damaged: it holds no JSON object")
    return fields


def _on_this_machine(data_dir: Path) -> "ClientSettings":
    """The owner's settings for the service of a data directory. Raises `NoService`."""
    from tuneship.settings import ClientSettings, written_url  # noqa: PLC0415 - starts slowly

    credentials = data_dir / "credentials.json"
    url = written_url(data_dir)
    if url is None or not credentials.is_file():
        raise NoService(NO_SERVICE)
    # Another program may have taken the port since: it must not be sent the key.
    if not still_runs(_fields_in(data_dir / "service.json")):
        raise NoService(
            f"no service runs on {data_dir}: the last one, at {url}, has ended (`tuneship serve` starts it; one on "
            "another machine or in a container is named by TUNESHIP_URL, TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID)"
        )
    kept = _fields_in(credentials)
    try:
        return ClientSettings(url=url, api_key=kept["api_key"], client_id=kept["client_id"])
    except (KeyError, ValueError):
        raise NoService(f"{credentials} is damaged: start the service again") from None


@contextmanager
def connected(chosen: ChosenService | None = None, **options: Any) -> Generator["Client"]:
    """A client of the chosen service with these options; failed calls end the command with their reason."""
    from tuneship.client import (  # noqa: PLC0415 - starts slowly
        ApiError,
        Client,
        Options,
        ServiceUnreachable,
        TuneshipError,
    )
    from tuneship.client.error_text import error_text  # noqa: PLC0415

    chosen = chosen or chosen_service()
    try:
        opened = Client(chosen.settings, options=Options(**options))
    except OSError as error:
        raise NoService(f"{chosen.settings.ca_file} holds no certificates ({error})") from None
    try:
        with opened as client:
            yield client
    except ApiError as error:
        fail(error_text(error))
    except ServiceUnreachable as error:
        host = urlsplit(chosen.settings.url).netloc.rpartition("@")[2]
        fail(f"{error}: does a service run at {host} (named by {chosen.source})?")
    except TuneshipError as error:
        fail(str(error))


@contextmanager
def reported() -> Generator[None]:
    """Report a failed call in one line; end quietly on Ctrl-C, and when nobody reads the output."""
    try:
        yield
        sys.stdout.flush()
    except (BadField, NoService) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(ENDED_BY_CTRL_C) from None
    except UnicodeDecodeError:
        fail("standard input: is not UTF-8")
    except BrokenPipeError:
        drop_unwritable_output()
        raise typer.Exit(NOBODY_READS) from None
    except OSError as error:
        drop_unwritable_output()
        fail(f"{error.filename or 'the output'}: {error.strerror or type(error).__name__}")


@contextmanager
def for_completion() -> Generator["Client"]:
    """A client that answers soon or not at all, for the ids that a shell completes."""
    from tuneship.client import Client, Options  # noqa: PLC0415 - starts slowly

    patience = {"connect_timeout_s": COMPLETES_WITHIN_S, "read_timeout_s": COMPLETES_WITHIN_S}
    settings = chosen_service().settings.model_copy(update={**patience, "tries": 1})
    options = Options(ends_at=time.monotonic() + COMPLETES_WITHIN_S)
    with Client(settings, options=options) as client:
        yield client
