"""`tuneship models add | bases | show | check | remove`: your own base models, whether the service runs or not.

Results go to standard output (`--json` for programs), progress and errors to standard error. Exit code 1: nothing was
changed; 2: an argument that cannot be read; 4: `check` has found faults.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneship.cli.common import fail, has_installation, opened_installation, service_settings
from tuneship.cli.connection import ENDED_BY_CTRL_C
from tuneship.cli.output import Row, is_terminal, one_line, readable, show_json, show_rows, write
from tuneship.host.startup import StartupError
from tuneship.settings import ServiceSettings

if TYPE_CHECKING:  # the light install has no service
    from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
    from tuneship.service.catalogues.origins import Origin
    from tuneship.store.records.base_model_records import BaseModelUsers

WRONG = 4
# Of the table of `bases`, in the order of what is left out last.
COLUMNS = (
    "id",
    "fault",
    "parameters",
    "context",
    "weights",
    "kind",
    "in_use_by",
    "licence",
    "source",
)

app = typer.Typer()

DataDir = Annotated[
    Path | None, typer.Option(help="The data directory of the service, as for `tuneship serve`.")
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON: one document, or one per line where entries are streamed."
    ),
]
ModelId = Annotated[str, typer.Argument(metavar="ID", help="As `tuneship models bases` shows it.")]


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            help="A directory of a Hugging Face checkpoint, the hub's id of one in the local cache, or a GGUF file."
        ),
    ],
    identifier: Annotated[
        str | None, typer.Option("--id", help="Its id; default: the name of the source.")
    ] = None,
    hard_links: Annotated[
        bool,
        typer.Option(help="Share the checkpoint's files instead of copying: do not change them."),
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            help="The number format in which it is served: float32, bfloat16, int8, int4, or auto, the fastest here "
            "that keeps the loss of a reference text; default: float32 or bfloat16, by size and machine."
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Add a base model; a running service offers it at once."""
    settings = service_settings(data_dir=data_dir)
    os.umask(0o077)  # the files are for the service's own user
    _need_service()
    from tuneship.service.catalogues.adding import add as add_model  # noqa: PLC0415 - the light install
    from tuneship.service.catalogues.sources import default_id, find_source  # noqa: PLC0415

    data_folder = settings.data_dir
    # Files of another user would be closed to the service.
    if data_folder.is_dir() and data_folder.stat().st_uid != os.geteuid():
        fail(f"{data_folder} belongs to another user: run this as that user")
    try:
        found = find_source(source)
        chosen = identifier if identifier is not None else default_id(found)
        now = datetime.now(UTC)
        origin = add_model(
            settings,
            found,
            chosen,
            now,
            lambda text: typer.echo(f"{readable(text)} ...", err=True),
            hard_links=hard_links,
            weights=weights,
        )
    except StartupError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted: nothing was added", ENDED_BY_CTRL_C)
    if as_json:
        names = ("loss_before", "loss_after", "weights", "served_loss")
        show_json({"id": chosen} | {name: getattr(origin, name) for name in names})
        return
    before, after = origin.loss_before, origin.loss_after
    text = (
        f"{before:.4f} as transformers reads the source, {after:.4f} as the engine reads the copy"
    )
    if origin.served_loss is not None:
        text += f", {origin.served_loss:.4f} as it is served ({origin.weights})"
    write(f"loss of a reference text: {text}\nadded {chosen}")


@app.command()
def bases(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the base models of this machine: shipped, added, and those of the operator's file."""
    settings = service_settings(data_dir=data_dir)
    catalogue, users = _catalogue(settings), _users(settings)
    # All of them, also those that cannot be used.
    models = {**catalogue.added, **catalogue.shipped, **catalogue.listed}
    records = [_record(catalogue, models[one], users) for one in sorted(models)]
    if as_json:
        show_json({"base_models": records})
        return
    show_rows(map(_row, records), COLUMNS)


@app.command()
def show(identifier: ModelId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one base model: its origin, files and losses, and the users of it."""
    settings = service_settings(data_dir=data_dir)
    catalogue, users = _catalogue(settings), _users(settings)
    model = _model(catalogue, identifier)
    record = _record(catalogue, model, users) | {"path": str(model.path.absolute())}
    origin = _origin(model)
    if origin is not None:
        names = ("versions", "source_sha256", "sha256", "loss_before", "loss_after", "served_loss")
        record |= {name: getattr(origin, name) for name in names}
    if as_json:
        show_json(record)
        return
    for name, value in record.items():
        if isinstance(value, dict):
            fields: Mapping[str, Any] = value
            write(f"{name}:")
            for key, entry in fields.items():
                write(f"  {key}: {one_line(entry) or 'none'}")
        elif value is not None:
            write(f"{name}: {one_line(value)}")


@app.command()
def check(identifier: ModelId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Compare a base model's files with their digests, and the engine with transformers; ask it a question."""
    model = _model(_catalogue(service_settings(data_dir=data_dir)), identifier)
    from tuneship.conversion.order import QUESTION  # noqa: PLC0415 - the light install
    from tuneship.service.catalogues.adding import check as check_model  # noqa: PLC0415

    try:
        result = check_model(model)
    except StartupError as error:
        fail(str(error))
    record: dict[str, Any] = {"id": identifier, "faults": result.faults}
    report = result.report
    if report is not None and report.fault is None:
        losses = {"transformers": report.loss_before, "engine": report.loss_after}
        record |= {"losses": losses, "served_format": report.served_format}
        record |= {"served_loss": report.served_loss, "question": QUESTION, "answer": report.answer}
    if as_json:
        show_json(record)
        raise typer.Exit(WRONG if result.faults else 0)
    if "losses" in record:
        by, served = record["losses"], f"{record['served_loss']:.4f} as it is served here"
        text = (
            f"{by['transformers']:.4f} by transformers, {by['engine']:.4f} by the engine, {served}"
        )
        write(f"loss of a reference text: {text} ({record['served_format']})")
        write(f"{QUESTION}\n{readable(record['answer'])}")
    for fault in result.faults:
        write(f"{identifier}: {one_line(fault)}")
    if result.faults:
        raise typer.Exit(WRONG)
    write(f"{identifier} is as it should be")


@app.command()
def remove(identifier: ModelId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Remove a base model that was added and that nobody uses."""
    settings = service_settings(data_dir=data_dir)
    catalogue = _catalogue(settings)
    from tuneship.service.catalogues.adding import remove as remove_model  # noqa: PLC0415 - light install
    from tuneship.service.catalogues.origins import added_folder  # noqa: PLC0415

    if identifier not in catalogue.added:
        _model(catalogue, identifier)
        fail(f"{identifier} was not added, and only added models can be removed")

    def users() -> list[str]:
        found = _users(settings).get(identifier)
        return [] if found is None else found.all

    try:
        remove_model(added_folder(settings.data_dir), identifier, users)
    except StartupError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{identifier} cannot be removed: {error.strerror}")
    if as_json:
        show_json({"id": identifier, "removed": True})
    else:
        write(f"removed {identifier}")


def _need_service() -> None:
    """Exit with one line on the light install."""
    try:
        import tuneship.service.catalogues.adding  # noqa: F401, PLC0415 - the light install
    except ModuleNotFoundError as error:
        fail(f"this needs `pip install 'tuneship[service]'` (missing: {error.name})")


def _catalogue(settings: ServiceSettings) -> "Catalogue":
    _need_service()
    from tuneship.service.catalogues.base_models import Catalogue  # noqa: PLC0415 - the light install
    from tuneship.service.catalogues.origins import added_folder  # noqa: PLC0415

    try:
        return Catalogue(settings.model_catalogue, added_folder(settings.data_dir))
    except StartupError as error:
        fail(str(error))


def _users(settings: ServiceSettings) -> "Mapping[str, BaseModelUsers]":
    """Who uses which base model; nobody before the first start of a service."""
    if not has_installation(settings):
        return {}
    with opened_installation(settings) as opened:
        from tuneship.store.records.base_model_records import users_of_base_models  # noqa: PLC0415 - light

        with opened.database.read() as connection:
            return users_of_base_models(connection)


def _model(catalogue: "Catalogue", identifier: str) -> "CataloguedModel":
    model = catalogue.get(identifier)
    if model is None:
        fail("there is no base model with this id: `tuneship models bases` shows them")
    return model


def _origin(model: "CataloguedModel") -> "Origin | None":
    from tuneship.service.catalogues.origins import Origin  # noqa: PLC0415 - the light install

    try:
        return Origin.read(model.path)
    except (OSError, ValueError):
        return None


def _record(
    catalogue: "Catalogue", model: "CataloguedModel", users: "Mapping[str, BaseModelUsers]"
) -> dict[str, Any]:
    """The facts about a model that `bases` shows."""
    origin, used = _origin(model), users.get(model.id)
    kind = "catalogue file" if model.id in catalogue.listed else "shipped"
    is_usable = model.fault is None
    return {
        "id": model.id,
        "parameters": model.parameters if is_usable else None,
        "context_length": model.context_length if is_usable else None,
        "origin": {
            "kind": kind if origin is None else origin.kind,
            "source": None if origin is None else origin.source,
            "added_at": None if origin is None else origin.added_at,
        },
        "weights": model.weights,
        "licence": None if origin is None else origin.licence,
        "fault": model.fault,
        "in_use_by": {
            "jobs": [] if used is None else used.jobs,
            "deployments": [] if used is None else used.deployments,
            "models": [] if used is None else used.models,
        },
    }


def _row(record: Mapping[str, Any]) -> Row:
    """A line of the table; for people the number of parameters is rounded."""
    parameters, origin = record["parameters"], record["origin"]
    if parameters is not None and is_terminal():
        sizes = ((1_000_000_000, "B"), (1_000_000, "M"))
        rounded = (f"{parameters / size:.3g}{unit}" for size, unit in sizes if parameters >= size)
        parameters = next(rounded, str(parameters))
    counted = [
        f"{len(ids)} {kind if len(ids) > 1 else kind[:-1]}"
        for kind, ids in record["in_use_by"].items()
        if ids
    ]
    return {
        **record,
        "parameters": parameters,
        "context": record["context_length"],
        "kind": origin["kind"],
        "in_use_by": ", ".join(counted) or "nobody",
        "source": origin["source"],
    }
