"""`tuneship models card`: the model card of a tuned model, as Markdown or JSON.

The service knows the origin of a model; what its release measured and people state is in the card that the release
wrote.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from tuneship.cli.common import fail
from tuneship.cli.completion import completing
from tuneship.cli.connection import connected, reported
from tuneship.cli.output import readable, write
from tuneship.cli.parameters import AsJson
from tuneship.contract.common import ModelId
from tuneship.contract.model_card import ModelCard

if TYPE_CHECKING:  # starts slowly
    from tuneship.client import Client

ReleaseFile = Annotated[
    Path | None,
    typer.Option(
        "--release",
        help="The result file of its release, whose model card then has all that the release found.",
    ),
]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def models() -> None:
    """Hold the command for model cards."""


@app.command()
def card(
    model_id: Annotated[
        str,
        typer.Argument(metavar="MODEL_ID", autocompletion=completing(ModelId), show_default=False),
    ],
    release: ReleaseFile = None,
    as_json: AsJson = False,
) -> None:
    """Write the model card of a tuned model: Markdown, or with `--json` the canonical JSON."""
    from tuneship.cards.canonical import canonical  # noqa: PLC0415 - starts slowly
    from tuneship.cards.making import with_release  # noqa: PLC0415
    from tuneship.cards.rendering import as_markdown  # noqa: PLC0415

    released = None if release is None else card_of_release(release, model_id)
    with reported(), connected() as client:
        found = _card_of(client, model_id)
        if released is not None:
            found = with_release(found, released)
        write(canonical(found).decode() if as_json else readable(as_markdown(found)), end="")


def card_of_release(file: Path, model_id: str) -> ModelCard:
    """The card that a release wrote, by its result file. Ends the command where there is none of this model."""
    try:
        result: Any = json.loads(file.read_text(encoding="utf-8"))
        named = result["model_card"]
        place = file.parent / named
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--release: {file} is no result file of a release with a model card")
    try:
        # The folder may have moved together with its result file.
        place = place if place.is_file() else file.with_name(place.name)
        found = ModelCard.model_validate_json(place.read_bytes())
    except OSError as error:
        fail(f"--release: {place}: {error.strerror}")
    except ValidationError:
        fail(f"--release: {place} is no model card")
    if found.model.id != model_id:
        fail("--release: its model card is of another model")
    return found


def _card_of(client: "Client", model_id: str) -> ModelCard:
    """The card as far as the service knows the model's origin."""
    from tuneship.cards.making import new_card  # noqa: PLC0415 - starts slowly
    from tuneship.client.card_facts import origin_of  # noqa: PLC0415

    tuned = client.models.get(model_id)
    if tuned.base_model is None:
        fail("a base model has no card here: its owner has it")
    origin = origin_of(client, tuned.name, tuned.base_model, model_id, None)
    return new_card(
        datetime.now(UTC),
        origin.model,
        data=origin.data,
        training=origin.training,
        privacy=origin.privacy,
    )
