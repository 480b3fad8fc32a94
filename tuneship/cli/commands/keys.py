"""`tuneship keys`: creates, lists, rotates and revokes API keys, whether the service runs or not.

It works on the service's database, found by the same settings as `serve`; in a running service a change takes effect
within a second. A key is shown once, when it is created. Results go to standard output (`--json` for programs), errors
to standard error with exit code 1, or 2 for an option that cannot be read.
"""

import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tuneship.cli.common import fail, opened_installation, service_settings
from tuneship.cli.output import is_terminal, show_rows
from tuneship.contract.common import render_time
from tuneship.contract.declaring.scopes import PRESETS, SCOPES, UnknownScope, in_short, scopes_of

if TYPE_CHECKING:  # the light install has no service
    from tuneship.service.access.api_keys import Keys

CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
LABEL = re.compile(r"[^\x00-\x1f\x7f]{0,128}")
DURATION = re.compile(r"([1-9][0-9]{0,4})([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
NOT_READABLE = 2
# `make up` labels the key of its flows so, followed by the file that holds it.
FLOWS_LABEL = "make up, "
# Columns that are never wrapped: half a date or half a key is of no use.
UNWRAPPED = ("key", "state", "expires", "last used")
PIPED = ("key_id", "client_id", "state", "expires_at", "last_used_at", "label", "scopes")

app = typer.Typer(no_args_is_help=True, help="API keys: make, list, rotate, revoke.")

DataDir = Annotated[
    Path | None, typer.Option(help="The data directory of the service, as for `tuneship serve`.")
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON: one document, or one per line where entries are streamed."
    ),
]
KeyId = Annotated[
    str, typer.Argument(help="The eight letters and digits after `tsk_`, as `list` shows them.")
]
Expires = Annotated[
    str | None,
    typer.Option(help="Lifetime: a whole number of m, h, d or w, such as 90d; or never."),
]


@app.command()
def create(
    client_id: Annotated[
        str, typer.Option(help="The tenant: what the caller sends as X-Client-ID.")
    ],
    scopes: Annotated[
        str, typer.Option(help=f"Scopes or presets ({', '.join(PRESETS)}), separated by commas.")
    ],
    expires: Expires = None,
    label: Annotated[str, typer.Option(help="A note for people, shown by `list`.")] = "",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it, once. Without --expires it lives until it is revoked."""
    if not CLIENT_ID.fullmatch(client_id):
        fail("--client-id takes letters, digits and . _ @ -, 128 at most", NOT_READABLE)
    if not LABEL.fullmatch(label):
        fail("--label takes 128 characters on one line at most", NOT_READABLE)
    try:
        granted = scopes_of(scopes)
    except UnknownScope as error:
        fail(f"{error}; there are {', '.join((*PRESETS, *sorted(SCOPES)))}", NOT_READABLE)
    lifetime = _lifetime(expires)
    with opened(data_dir) as keys:
        end = None if lifetime is None else utc_now() + lifetime
        _show(keys, keys.issue(client_id, granted, end, label), as_json)


@app.command(name="list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show every key with its client, scopes and state, but never its secret."""
    with opened(data_dir) as keys:
        records = [_record(row) for row in keys.listed()]
    if as_json:
        typer.echo(json.dumps({"keys": records}, indent=2))
        return
    if not is_terminal():
        show_rows(records, PIPED)
        return
    table = Table()
    for name in ("key", "client", "may", "state", "expires", "last used", "label"):
        table.add_column(name, no_wrap=name in UNWRAPPED, overflow="fold")
    for record in records:
        may = in_short(record["scopes"])
        dates = ((record[name] or "never")[:10] for name in ("expires_at", "last_used_at"))
        names = (record["key_id"], record["client_id"])
        table.add_row(*names, may, record["state"], *dates, record["label"])
    Console().print(table)


@app.command()
def rotate(
    key_id: KeyId,
    expires: Expires = None,
    overlap: Annotated[
        str | None, typer.Option(help="How long the old key still works, such as 24h; else not.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by one with the same client, scopes and lifetime, and show the new key, once."""
    kept = timedelta(0) if overlap is None else _duration(overlap)
    with opened(data_dir) as keys:
        from tuneship.service.access.api_keys import (  # noqa: PLC0415 - light
            KeyEnded,
            KeyOfPerson,
            replace_credentials,
        )

        row = next((row for row in keys.listed() if row["id"] == key_id), None)
        if row is None:
            fail(f"there is no key {key_id}")
        # Without --expires the new key gets as long a life as the old one had, counted from now.
        lifetime = _lifetime(expires or None)
        if not expires and row["expires_at"] is not None:
            lifetime = row["expires_at"] - row["created_at"]
        end = None if lifetime is None else utc_now() + lifetime
        try:
            made = keys.rotate(key_id, end, kept)
        except KeyEnded:
            fail(f"the key {key_id} is not in force any more: create a new one")
        except KeyOfPerson:
            fail(f"the key {key_id} stands for a person who signs in: it has no secret to replace")
        # Shown before the file is written, which may fail: this is the only copy of the key.
        _show(keys, made, as_json, replaces=key_id)
        files = [service_settings(data_dir=data_dir).data_dir / "credentials.json"]
        if row["label"].startswith(FLOWS_LABEL):
            files.append(Path(row["label"].removeprefix(FLOWS_LABEL)))
        for file in files:
            replace_credentials(file, key_id, made, end)


@app.command()
def revoke(key_id: KeyId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """End a key; a running service refuses it within a second."""
    with opened(data_dir) as keys:
        from tuneship.service.access.api_keys import NoSuchKey  # noqa: PLC0415 - the light install

        try:
            row = keys.revoke(key_id)
        except NoSuchKey:
            fail(f"there is no key {key_id}")
    answer = {"key_id": key_id, "revoked_at": _text(row["revoked_at"])}
    typer.echo(json.dumps(answer) if as_json else f"revoked {key_id}")


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


@contextmanager
def opened(data_dir: Path | None) -> Generator["Keys"]:
    """The keys of the service on a data directory; without a service there, exits with a one-line error."""
    with opened_installation(service_settings(data_dir=data_dir)) as opened:
        from tuneship.security.master_key import derived_secret  # noqa: PLC0415 - the light install
        from tuneship.service.access.api_keys import Keys  # noqa: PLC0415
        from tuneship.store.records.audit import Chain  # noqa: PLC0415

        database, secret = opened.database, opened.secret
        chain = Chain(derived_secret(secret, "audit"))
        yield Keys(database, derived_secret(secret, "keys"), utc_now, chain)


def _lifetime(text: str | None) -> timedelta | None:
    return None if text is None or text == "never" else _duration(text)


def _duration(text: str) -> timedelta:
    match = DURATION.fullmatch(text)
    if match is None:
        fail(f"{text!r} is no duration: write a whole number of m, h, d or w, as 90d", NOT_READABLE)
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else render_time(moment)


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    from tuneship.service.access.api_keys import is_in_force  # noqa: PLC0415 - the light install

    ended = "expired" if row["revoked_at"] is None else "revoked"
    moments = ("created_at", "expires_at", "revoked_at", "last_used_at")
    return {
        "key_id": row["id"],
        "client_id": row["client_id"],
        "scopes": row["scopes"],
        "label": row["label"],
        "state": "in force" if is_in_force(row, utc_now()) else ended,
        **{name: _text(row[name]) for name in moments},
    }


def _show(keys: "Keys", key: str, as_json: bool, **more: str) -> None:
    """Print a new key, which cannot be read again later."""
    row = next(row for row in keys.listed() if row["id"] == key.split("_")[1])
    record = _record(row)
    answer = {
        "key_id": record["key_id"],
        "api_key": key,
        **{name: record[name] for name in ("client_id", "scopes", "expires_at")},
        **more,
    }
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    # The key alone goes to standard output, so that a shell can keep it in a variable.
    typer.echo(key)
    may, end = in_short(record["scopes"]), record["expires_at"] or "never"
    typer.echo(f"for {record['client_id']}: {may}; expires {end}. It is not shown again.", err=True)
