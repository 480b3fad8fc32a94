"""`tuneship releases`: the dossier of a release, which holds what was decided and from what, and its verification.

`verify` exits with 0 when every digest is right and every decision comes out as it is recorded, with 4 when not, and
with 5 when there is no audit head to compare with the service. A dossier holds no text of data, prompts or answers.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneship.cli.common import fail
from tuneship.cli.connection import connected, reported
from tuneship.cli.output import one_line, readable, write
from tuneship.contract.common import count

if TYPE_CHECKING:  # they start slowly
    from tuneship.contract.audit import AuditHead
    from tuneship.dossier.checks import Findings

WRONG, NO_HEAD = 4, 5
# Characters of a text that whoever made a dossier chose.
MOST_SHOWN = 200
NEEDS_TUNESHIP = "this needs `pip install tuneship` (missing: {})"

app = typer.Typer(no_args_is_help=True, help="Dossiers of releases: make and verify them.")


@app.command(epilog="Example:\n\ntuneship releases dossier out.json -o dossier.zip")
def dossier(
    result: Annotated[
        Path, typer.Argument(help="The result file of a release, as `--result` wrote it.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The zip file to write.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of that name.")
    ] = False,
    no_audit_head: Annotated[
        bool,
        typer.Option(
            "--no-audit-head",
            help="Ask no service for the signed head of its audit chain, which needs the scope `audit:read`.",
        ),
    ] = False,
) -> None:
    """Bundle a release: card, report, records, signed audit head, digests, components, and a manifest of them all."""
    if out.exists() and not overwrite:
        fail(f"{out}: exists already; `--overwrite` replaces it")
    try:
        from tuneship.dossier.archive import NoDossier, pack  # noqa: PLC0415 - not in the client
        from tuneship.dossier.checks import verify as check  # noqa: PLC0415
        from tuneship.dossier.contents import MANIFEST, gather, made_here, written_manifest  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(NEEDS_TUNESHIP.format(error.name))
    head = None if no_audit_head else _asked_head()
    with reported():
        try:
            members = gather(result, head)
            members[MANIFEST] = written_manifest(members, made_here())
        except (NoDossier, ValueError) as error:
            fail(f"{result}: {error}")
        content = pack(members)
        # What is handed out must be what a verification accepts, also of files that somebody has changed since.
        found = check(content)
        _fail_with(found.problems, result)

        from tuneship.host.durable import write_private  # noqa: PLC0415 - starts slowly

        write_private(out, content)
        write(
            f"{out}: {count(len(members), 'file')}, {_summary(found)}; SHA-256 {_sha256(content)}"
        )


@app.command()
def verify(
    dossier: Annotated[Path, typer.Argument(help="A file that `releases dossier` wrote.")],
    public_key: Annotated[
        str | None,
        typer.Option(
            help="The key of the service's audit heads in hexadecimal, known from elsewhere."
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Also ask the service whether its audit chain still has the row of the head.",
        ),
    ] = False,
) -> None:
    """Verify a dossier: every digest, every decision bit by bit, the audit head; and name what was changed."""
    try:
        from tuneship.dossier.archive import MAX_BYTES, NoDossier  # noqa: PLC0415 - not in the client
        from tuneship.dossier.checks import verify as check  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(NEEDS_TUNESHIP.format(error.name))
    with reported(), dossier.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    try:
        found = check(content)
    except NoDossier as error:
        fail(f"{dossier}: {error}", WRONG)
    head = found.head
    if head is not None and public_key is not None and public_key.lower() != head.public_key:
        found.problems.append("the audit head is signed with another key than --public-key")
    if head is not None and online:
        found.problems += _differences(head)
    _fail_with(found.problems, dossier)
    # Whoever made the file chose these texts.
    key, outcome, reason = (
        one_line(found.release[one])[:MOST_SHOWN] for one in ("run_key", "outcome", "reason")
    )
    write(f"{dossier}: {key}: {outcome} ({reason})")
    write(f"{_summary(found)}; SHA-256 {_sha256(content)}")
    if found.undecided:
        write(
            f"not verified again, because what they are made from is not here: {', '.join(found.undecided)}"
        )
    if head is None:
        fail("it has no audit head: nothing ties it to a moment of the service", NO_HEAD)
    write(
        f"audit head: row {head.seq}, signed {one_line(head.at)[:MOST_SHOWN]} with key {head.public_key}"
    )


def _asked_head() -> "AuditHead":
    try:
        with reported(), connected() as client:
            return client.audit.head()
    except typer.Exit:
        typer.echo("tuneship: `--no-audit-head` makes a dossier without one", err=True)
        raise


def _differences(head: "AuditHead") -> list[str]:
    """Ask the service about the row of a head; returns what its chain says against it."""
    from tuneship.contract.errors import ResourceNotFound  # noqa: PLC0415 - starts slowly

    with reported(), connected() as client:
        try:
            now = client.audit.head(seq=head.seq)
        except ResourceNotFound:
            return [
                f"the service's audit chain has no row {head.seq}: rows were removed from its end"
            ]
    if now.public_key != head.public_key:
        return ["the service signs its audit heads with another key"]
    return (
        []
        if now.mac == head.mac
        else [f"row {head.seq} of the service's audit chain is another one"]
    )


def _fail_with(problems: list[str], file: Path) -> None:
    """End with 4 and a line for each problem."""
    for one in problems:
        typer.echo(f"tuneship: {readable(f'{file}: {one}')}", err=True)
    if problems:
        raise typer.Exit(WRONG)


def _summary(found: "Findings") -> str:
    decided = ", ".join(found.decided)
    return f"decided again as recorded: {decided}" if decided else "no decision to decide again"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
