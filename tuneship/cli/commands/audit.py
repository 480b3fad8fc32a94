"""`tuneship audit`: verifies and exports the audit chain of a service, whether the service runs or not.

`verify` exits with 0 when every row follows from the one before and every signed head is in the chain, with 4 when not,
and with 5 when there are rows but no signed head to compare them with. It also says how many rows are not in the chain
yet, as PostgreSQL has them for moments, or while no service runs. `export` writes the chain as JSON Lines or CSV to
standard output.
"""

import csv
import json
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneship.cli.common import drop_unwritable_output, fail, opened_installation, service_settings
from tuneship.contract.common import count, render_time_ms

if TYPE_CHECKING:  # the light install has no service
    from tuneship.store.database.database import Database
    from tuneship.store.records.audit import Chain
    from tuneship.store.records.audit_heads import Heads

BROKEN, NO_HEADS = 4, 5
# The beginnings of cells that a spreadsheet would run as formulas.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

app = typer.Typer(no_args_is_help=True, help="The audit chain: verify, export.")

DataDir = Annotated[
    Path | None, typer.Option(help="The data directory of the service, as for `tuneship serve`.")
]


class Format(StrEnum):
    """The format of an export."""

    JSONL = "jsonl"
    CSV = "csv"


@app.command()
def verify(
    heads: Annotated[
        Path | None,
        typer.Option(help="A kept copy of the signed heads; default: the service's own."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Check every row and every signed head."""
    with _opened(data_dir, heads) as (database, chain, signed):
        from tuneship.store.records import audit  # noqa: PLC0415 - the light install
        from tuneship.store.records.audit_heads import HeadsDamaged  # noqa: PLC0415

        try:
            kept = list(signed.read())
        except HeadsDamaged as error:
            fail(f"signed heads: {error}", BROKEN)
        with database.read() as connection:
            fault = chain.fault(audit.rows_of(connection))
            last, _ = audit.head_of(connection)
            signed_rows = audit.rows_at(connection, [head.seq for head in kept])
            macs: dict[int, bytes] = {row["seq"]: row["mac"] for row in signed_rows}
            unlinked = chain.unlinked(connection)
    if fault is not None:
        fail(f"the audit chain is broken at row {fault.seq}: {fault.reason}", BROKEN)
    if unlinked.forged:
        forged = f"{unlinked.forged} of {unlinked.number}"
        text = f"rows that wait to be linked, and were not written by the service: {forged}"
        fail(text, BROKEN)
    # A chain that was cut off at its end, or written again from some row on, is sound in itself: only
    # the heads that were signed earlier do.
    for head in kept:
        if head.seq > last:
            fail(f"rows {last + 1} to {head.seq} were removed from the end", BROKEN)
        if macs[head.seq] != head.mac:
            text = f"the chain was written again: row {head.seq} is not the one that was signed"
            fail(text, BROKEN)
    if last and not kept:
        fail(
            f"the chain is unbroken ({count(last, 'row')}), but {signed.file} is missing or holds no signed "
            "head: whether rows were removed from the end cannot be checked",
            NO_HEADS,
        )
    typer.echo(
        f"the chain is unbroken: {count(last, 'row')}, with {count(len(kept), 'signed head')}"
    )
    if unlinked.oldest is not None:
        oldest = render_time_ms(unlinked.oldest)
        typer.echo(
            f"{count(unlinked.number, 'more row waits', 'more rows wait')} to be linked, since {oldest}; "
            "no signed head covers what waits"
        )


@app.command()
def export(
    client_id: Annotated[str | None, typer.Option(help="One tenant; default: all.")] = None,
    after: Annotated[int, typer.Option(min=0, help="Only rows behind this number.")] = 0,
    form: Annotated[Format, typer.Option("--format", help="How rows are written.")] = Format.JSONL,
    data_dir: DataDir = None,
) -> None:
    """Write rows to standard output, oldest first, with their seals in hexadecimal."""
    with (
        _opened(data_dir, None) as (database, chain, _),
        database.read() as connection,
        _whole_output(),
    ):
        from tuneship.store.records import audit  # noqa: PLC0415 - the light install

        rows: Iterable[dict[str, Any]] = (
            {**row, "at": render_time_ms(row["at"]), "mac": row["mac"].hex()}
            for row in audit.rows_of(connection, after=after, client_id=client_id)
        )
        if form is Format.JSONL:
            for row in rows:
                typer.echo(json.dumps(row))
        else:
            names = [column.name for column in audit.audit.columns]
            table = csv.DictWriter(sys.stdout, names)
            table.writeheader()
            table.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
        waiting = chain.unlinked(connection).number
        if waiting:
            rest = count(waiting, "row is", "rows are")
            typer.echo(f"{rest} not in the chain yet, and not in this export", err=True)


@contextmanager
def _whole_output() -> Generator[None]:
    """Exit with a line if not everything could be written, e.g. because the disk is full."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_unwritable_output()
        fail(f"the export is not whole: {error.strerror}")


def csv_cell(value: object) -> object:
    """A value for a spreadsheet, with a quote before text that it would run as a formula."""
    if isinstance(value, dict):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


@contextmanager
def _opened(
    data_dir: Path | None, heads: Path | None
) -> Generator[tuple["Database", "Chain", "Heads"]]:
    settings = service_settings(data_dir=data_dir)
    with opened_installation(settings) as opened:
        from tuneship.security.master_key import derived_secret  # noqa: PLC0415 - the light install
        from tuneship.store.records.audit import Chain  # noqa: PLC0415
        from tuneship.store.records.audit_heads import Heads, heads_file  # noqa: PLC0415

        database, secret = opened.database, opened.secret
        file = heads or heads_file(settings.audit_heads, settings.data_dir)
        yield (
            database,
            Chain(derived_secret(secret, "audit")),
            Heads(file, derived_secret(secret, "audit heads")),
        )
