"""`tuneship models export`: writes a tuned model for other programs, whether the service runs or not.

`tuneship models download` does the same with a key of the API, and `tuneship models import` takes an adapter in.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneship.cli.commands.model_cards import ReleaseFile, card_of_release
from tuneship.cli.common import fail, opened_installation, service_settings
from tuneship.cli.connection import ENDED_BY_CTRL_C
from tuneship.cli.output import write
from tuneship.contract.common import count
from tuneship.contract.model_card import ModelCard
from tuneship.contract.models import ExportFormat, GgufType

if TYPE_CHECKING:  # the light install has no service
    from tuneship.service.models.exports import Exportable
    from tuneship.service.open_installation import Installation
    from tuneship.settings import ServiceSettings

app = typer.Typer(no_args_is_help=True)


@app.callback()
def models() -> None:
    """Add base models of your own, and export tuned models for use elsewhere."""


@app.command()
def export(
    model_id: Annotated[str, typer.Argument(help="As in `GET /v1/models`.")],
    folder: Annotated[
        Path, typer.Argument(help="A new folder; the files in it are not encrypted.")
    ],
    wanted: Annotated[
        ExportFormat,
        typer.Option(
            "--format", help="peft: the adapter; merged: a checkpoint; gguf: for llama.cpp."
        ),
    ] = "peft",
    gguf_type: Annotated[GgufType, typer.Option(help="The number format of a GGUF file.")] = "f16",
    release: ReleaseFile = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The data directory, as for `tuneship serve`.")
    ] = None,
) -> None:
    """Write a tuned model unencrypted into a new folder, with a model card. Needs the master key."""
    settings = service_settings(data_dir=data_dir)
    with opened_installation(settings, reads_files=True) as opened:
        from tuneship.service.models.exports import ExportRefused, refuse_hipaa  # noqa: PLC0415 - light install

        if folder.exists() or folder.is_symlink():
            fail(f"{folder} exists already")
        card = None if release is None else card_of_release(release, model_id)
        try:
            model = _exportable(opened, model_id)
            refuse_hipaa(model, is_allowed=settings.export_hipaa_models)
            files = _fill(settings, opened, model, folder, (wanted, gguf_type), card)
        except ExportRefused as error:
            fail(str(error))
        except OSError as error:
            fail(f"the model cannot be exported: {error.strerror or error}")
        except KeyboardInterrupt:
            fail("interrupted: nothing was exported", ENDED_BY_CTRL_C)
    write(f"{count(files, 'file')} in {folder}")


def _exportable(opened: "Installation", model_id: str) -> "Exportable":
    from tuneship.service.access.data_keys import keyring_of  # noqa: PLC0415 - the light install
    from tuneship.service.models.exports import exportable  # noqa: PLC0415
    from tuneship.store.database import rows, tables  # noqa: PLC0415

    with opened.database.read() as connection:
        row = rows.fetch(connection, tables.models, model_id, client_id=None)
        if row is None:
            fail("there is no tuned model with this id")
        return exportable(connection, keyring_of(opened.secret), row)


def _fill(
    settings: "ServiceSettings",
    opened: "Installation",
    model: "Exportable",
    folder: Path,
    wanted: tuple[str, str],
    card: ModelCard | None,
) -> int:
    """Make the folder, whole or not at all; returns the number of its files. Raises `ExportRefused` and `OSError`."""
    from tuneship.conversion.running import A_DAY, convert_in_process  # noqa: PLC0415
    from tuneship.host.durable import flush  # noqa: PLC0415 - the light install
    from tuneship.host.staging import remove_abandoned, staged  # noqa: PLC0415
    from tuneship.service.catalogues.base_models import Catalogue  # noqa: PLC0415
    from tuneship.service.catalogues.origins import added_folder  # noqa: PLC0415
    from tuneship.service.models.exports import EXPORTING, Exporter  # noqa: PLC0415

    catalogue = Catalogue(settings.model_catalogue, added_folder(settings.data_dir))
    exporter = Exporter(opened.blobs, catalogue, convert_in_process)
    place = folder.absolute().parent
    typer.echo("writing and comparing ...", err=True)
    with staged(place, EXPORTING, lambda where: remove_abandoned(where, EXPORTING)) as stage:
        made = exporter.make(model, stage, wanted, A_DAY, card)
        count = len(list(made.iterdir()))
        made.rename(folder)
    flush(place)
    return count
