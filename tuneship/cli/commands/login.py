"""`tuneship login`, `logout` and `whoami`: which service the commands call, and with which key."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from tuneship.cli.common import fail
from tuneship.cli.connection import (
    ChosenService,
    chosen_service,
    connected,
    login_file,
    reported,
    settings_of_environment,
)
from tuneship.cli.fields import BadField, is_header
from tuneship.cli.output import note, show_fields, show_json
from tuneship.cli.parameters import AsJson
from tuneship.host.durable import write_private

if TYPE_CHECKING:  # starts slowly
    from tuneship.settings import ClientSettings

app = typer.Typer(no_args_is_help=True)


@app.command()
def login(
    url: Annotated[str, typer.Argument(metavar="URL", help="As in https://tuneship.example.org")],
    client_id: Annotated[
        str | None, typer.Option(help="The tenant of the key; without it you are asked.")
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Read the key from a file; without it you are asked."),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="PEM file of an authority of your own that signed the certificate."),
    ] = None,
) -> None:
    """Store a service's address and a key for later commands, in a file that only you can read.

    The service is asked first whether the key is good. The key is never an argument: other users see those.
    """
    with reported():
        if client_id is None and not sys.stdin.isatty():
            raise BadField("--client-id: is needed where nobody can be asked")
        client_id = client_id or typer.prompt("Client id").strip()
        fields = {"url": url, "client_id": client_id, "api_key": _key(api_key_file)}
        if ca_file is not None:
            fields["ca_file"] = str(ca_file.resolve())
        settings = _settings(fields)
        _check(ChosenService(settings, "the URL"))
        file = login_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(file, json.dumps(fields, indent=2) + "\n")
        note(f"logged in to {url} as {client_id}; the key is in {file}")
        if settings_of_environment()[0].url:
            note("TUNESHIP_URL is set and takes precedence over this login")


def _key(file: str | None) -> str:
    if file is None:
        if not sys.stdin.isatty():
            raise BadField(
                "--api-key-file: is needed where nobody can be asked; - is standard input"
            )
        return typer.prompt("API key", hide_input=True).strip()
    try:
        return (sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")).strip()
    except (OSError, UnicodeDecodeError):
        raise BadField("--api-key-file: cannot be read") from None


def _settings(fields: dict[str, Any]) -> "ClientSettings":
    from pydantic import ValidationError  # noqa: PLC0415 - starts slowly

    from tuneship.settings import ClientSettings  # noqa: PLC0415

    if not fields["url"].startswith(("http://", "https://")):
        raise BadField("URL: must begin with http:// or https://")
    place = urlsplit(fields["url"])
    if "@" in place.netloc:
        raise BadField("URL: must not hold a user or a password")
    if place.scheme == "http" and place.hostname not in ("localhost", "127.0.0.1", "::1"):
        note("the key is sent over http, which others in the network can read: use https")
    for name, text in (("the client id", fields["client_id"]), ("the API key", fields["api_key"])):
        if not is_header(text):
            raise BadField(f"{name}: must be one line of printable ASCII")
    try:
        return ClientSettings(**fields)
    except ValidationError as error:
        names = ", ".join(str(one["loc"][0]) for one in error.errors())
        raise BadField(f"a setting is not valid: {names}") from None


def _check(chosen: ChosenService) -> None:
    """Ask the service whether it knows the key; one that may only generate is known, too."""
    from tuneship.contract.errors import PermissionDenied  # noqa: PLC0415 - starts slowly

    with connected(chosen) as client:
        try:
            client.models.list(limit=1)
        except PermissionDenied:
            return


@app.command()
def logout() -> None:
    """Forget the stored login. The key stays valid until it is revoked."""
    with reported():
        file = login_file()
        if not file.is_file():
            fail("nobody is logged in")
        file.unlink()
        note("logged out")


@app.command()
def whoami(as_json: AsJson = False) -> None:
    """Show which service and identity the commands use, and where both are set; exit with 1 if the key is refused."""
    with reported():
        chosen = chosen_service()
        key = chosen.settings.api_key.get_secret_value()
        answer = {
            "url": chosen.settings.url,
            "client_id": chosen.settings.client_id,
            # The public part of a key, as `tuneship keys list` shows it.
            "key_id": key.split("_")[1] if key.startswith("tsk_") and key.count("_") > 1 else None,
            "named_by": chosen.source,
        }
        if as_json:
            show_json(answer)
        else:
            show_fields(answer)
        _check(chosen)
