"""`tuneship models export`: writes a tuned model unsealed, as peft reads it, whether the service runs or not."""

from pathlib import Path
from typing import Annotated

import typer

from tuneship.cli.common import fail, opened_installation, service_settings

app = typer.Typer(
    no_args_is_help=True, help="Base models: add, bases, show, check, remove. Tuned models: export."
)


@app.callback()
def models() -> None:
    """Add base models of your own, and export tuned models for use elsewhere."""


@app.command()
def export(
    model_id: Annotated[str, typer.Argument(help="As in `GET /v1/models`.")],
    folder: Annotated[Path, typer.Argument(help="A new folder; the files in it are not sealed.")],
    data_dir: Annotated[
        Path | None, typer.Option(help="The data directory, as for `tuneship serve`.")
    ] = None,
) -> None:
    """Write a tuned model's adapter unsealed into a new folder. Needs the master key."""
    settings = service_settings(data_dir=data_dir)
    with opened_installation(settings, reads_files=True) as opened:
        from tuneship.security.sealed_files import read_plain  # noqa: PLC0415 - the light install
        from tuneship.service.access.data_keys import keyring_of  # noqa: PLC0415
        from tuneship.store import queries as rows  # noqa: PLC0415
        from tuneship.store import tables  # noqa: PLC0415
        from tuneship.store.stored_files import model_ref  # noqa: PLC0415

        # All is read before the folder is made, so that a damaged file leaves nothing behind.
        try:
            with opened.database.read() as connection:
                row = rows.fetch(connection, tables.models, model_id, client_id=None)
                if row is None:
                    fail("there is no tuned model with this id")
                keyring = keyring_of(opened.secret)
                key = keyring.find(connection, row["client_id"], row["blob"])
            with opened.blobs.fetched(model_ref(row)) as files:
                content = {name: read_plain(files / name, key) for name in row["sha256"]}
            folder.mkdir(mode=0o700)
            for name, data in content.items():
                (folder / name).write_bytes(data)
        except OSError as error:
            fail(f"the model cannot be exported: {error}")
    typer.echo(f"{len(content)} files in {folder}")
