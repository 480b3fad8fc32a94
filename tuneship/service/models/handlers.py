"""Handlers of models: base models of the catalogue and fine-tuned models as one list; and models for serving.

The limits of a model are in `limits.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.contract import models as contract
from tuneship.contract.common import Deleted
from tuneship.contract.errors import DeploymentError, InvalidRequestError, ModelNotFound
from tuneship.contract.models import Model, ModelLimits, ModelPage
from tuneship.host.weight_files import ADAPTER_CONFIG
from tuneship.prompts.template import TEMPLATE_FILES, PromptTemplate
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.replicas.replica_link import Adapter
from tuneship.security.sealed_files import ObjectDamaged, read_plain
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.common.field_errors import abbreviated
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context, Parts
from tuneship.service.context.lists import own_page
from tuneship.service.models.limits import limits_of_base, limits_of_tuned
from tuneship.store.database import rows, tables
from tuneship.store.database.listings import MODELS
from tuneship.store.database.tables import JobRow, ModelRow
from tuneship.store.files.blobs import Blobs, ObjectRef
from tuneship.store.files.stored_files import model_ref
from tuneship.store.records import deployment_records, job_records

# Prefix of the id of every fine-tuned model, and of no base model.
TUNED = "ft:"


@dataclass(frozen=True)
class FoundModel:
    """A model as the rows describe it: its base model, and its adapter if it is a fine-tuned one."""

    base: CataloguedModel
    adapter: Adapter | None = None
    # The adapter's files, whose prefix is also the name of their data key; None for a base model.
    files: ObjectRef | None = None
    # Its adapter was trained elsewhere.
    is_imported: bool = False


@dataclass(frozen=True)
class ServedModel(FoundModel):
    """A model ready to be served."""

    # The template that its adapter was tuned with; None for a base model and for an imported one, which has that of its
    # base model.
    own_template: PromptTemplate | None = field(kw_only=True, default=None)

    # No cached property: in Python 3.11 one that hangs would hold up those of all other models.
    @property
    def format(self) -> ModelTextFormat:
        """How it reads and writes conversations. Reads the base model's tokenizer. Raises `CatalogueFault`."""
        found = self.base.text_format
        return found if self.own_template is None else _with_template(found, self.own_template)

    @property
    def is_read(self) -> bool:
        """Whether the event loop finds all that it looks up: reading `format` takes as long as its template wants."""
        return self.base.is_read and "text_format" in vars(self.base) and self.format.is_read

    def read(self) -> None:
        """Read all that the event loop looks up. Raises `CatalogueFault`."""
        self.base.read()
        self.format.read()

    @property
    def template(self) -> PromptTemplate:
        """The template of its format."""
        return self.format.template


@serves(contract.list_models)
def list_models(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    base_model: str | None = None,
    fine_tuned_only: bool = False,
    tags: dict[str, str] | None = None,
) -> ModelPage:
    """Return a page of models: base models by id, then fine-tuned ones, newest first."""
    limit = context.page_size(limit)
    # A base model has no tags and is tuned from no other, so these filters leave none.
    shown = [] if fine_tuned_only or base_model or tags else list(context.parts.catalogue)
    bases = shown[offset : offset + limit]
    page = own_page(
        context,
        MODELS,
        rows.filters_of(tables.models, tags, base_model=base_model),
        limit - len(bases),
        max(0, offset - len(shown)),
        partial(_touch_jobs, context),
    )
    whole = rows.Page(page.rows, page.total + len(shown), limit, offset)
    items = [*map(_base_item, bases), *(tuned_item(context.parts, row) for row in page.rows)]
    return ModelPage(models=items, pagination=whole.pagination)


def _base_item(base: CataloguedModel) -> Model:
    return Model(
        id=base.id,
        name=base.name,
        version=base.version,
        description=base.description,
        parameters=base.parameters,
        context_length=base.context_length,
        supported_fine_tuning=base.is_tunable,
    )


def tuned_item(parts: Parts, row: ModelRow) -> Model:
    """A tuned model as the API shows it."""
    base = parts.catalogue.get(row["base_model"])
    if base is not None and base.fault is not None:
        base = None
    return Model(
        id=row["id"],
        name=row["name"],
        version="1",
        description="",
        parameters=base.parameters if base else None,
        context_length=base.context_length if base else None,
        supported_fine_tuning=False,
        base_model=row["base_model"],
        fine_tuning_job_id=row["job_id"],
        created_at=row["created_at"],
        fine_tuning_method=row["fine_tuning_method"],
        ends_learnt=row["ends_learnt"],
        appended_end=row["appended_end"],
        tags=row["tags"],
    )


@serves(contract.get_model)
def get_model(context: Context, model_id: str) -> Model:
    """Return one model as the list shows it."""
    if not model_id.startswith(TUNED):
        return _base_item(base_of(context.parts, model_id, "model_id"))
    with context.read() as connection:
        return tuned_item(context.parts, own_model(context, connection, model_id))


@serves(contract.get_model_limits)
def get_model_limits(context: Context, model_id: str) -> ModelLimits:
    """Return the limits of a model, read from the checks themselves, so that they cannot differ."""
    if not model_id.startswith(TUNED):
        return limits_of_base(base_of(context.parts, model_id, "model_id"))
    with context.read() as connection:
        row = own_model(context, connection, model_id)
    return limits_of_tuned(model_id, base_of(context.parts, row["base_model"], "model_id"))


@serves(contract.delete_model)
def delete_model(context: Context, model_id: str) -> Deleted:
    """Remove the row, then the files; files that a kill leaves behind are set aside later."""
    if not model_id.startswith(TUNED):
        base_of(context.parts, model_id, "model_id")
        raise InvalidRequestError("a base model cannot be deleted", status=409)
    # The write transaction comes first: no deployment of the model can be created between the check and the delete.
    connection = context.transaction
    row = own_model(context, connection, model_id)
    # A failed deployment counts too: a change can repair it.
    deployments = deployment_records.live_ids_of_model(connection, row["client_id"], row["id"])
    if deployments:
        raise InvalidRequestError(
            f"the model is deployed, delete its deployments first: {abbreviated(deployments)}",
            param="model_id",
            status=409,
        )

    rows.remove(connection, tables.models, model_id)
    context.parts.keyring.destroy(connection, row["blob"])
    context.after_commit.append(lambda: context.parts.blobs.delete(row["blob"]))
    return Deleted(id=model_id)


def own_model(
    context: Context, connection: sa.Connection, identifier: str, param: str = "model_id"
) -> ModelRow:
    """A tuned model of the caller. Raises `ModelNotFound`, for a missing one and for another tenant's alike."""
    row = rows.fetch(connection, tables.models, identifier, client_id=context.client_id)
    if row is None:
        raise ModelNotFound(f"{param} names a model that does not exist", param=param)
    _touch_jobs(context, connection, [row])
    return row


def _touch_jobs(context: Context, connection: sa.Connection, models: Sequence[ModelRow]) -> None:
    """Apply the security settings of the models' jobs to this request: a tuned model has none of its own."""
    ids = [row["job_id"] for row in models if row["job_id"] is not None]
    context.touch(*job_records.security_settings_by_id(connection, context.client_id, ids))


def model_id(base_model: str, name: str, job_id: str) -> str:
    """`ft:<base>:<name>:<suffix>`; the suffix is the job id without its prefix (§1)."""
    return f"ft:{base_model}:{name}:{job_id.removeprefix('ft_')}"


def base_of(parts: Parts, identifier: str, param: str) -> CataloguedModel:
    """The base model with this id. Raises `ModelNotFound`, also for one whose files cannot be used."""
    base = parts.catalogue.get(identifier)
    if base is None:
        known = ", ".join(base.id for base in parts.catalogue)
        raise ModelNotFound(
            f"{param} names a model that does not exist; the base models are {known}", param=param
        )
    if base.fault is not None:
        raise ModelNotFound(
            f"{param} names a base model whose files cannot be used: {base.fault}", param=param
        )
    return base


def find_model(
    connection: sa.Connection, parts: Parts, client_id: str, identifier: str
) -> FoundModel:
    """Look a model up without reading its files, as a write transaction may.

    Raises `ModelNotFound`, for a missing one and for another tenant's alike, and `DeploymentError` where its key is
    damaged.
    """
    if not identifier.startswith(TUNED):
        return FoundModel(base_of(parts, identifier, "model_name"))
    row = rows.fetch(connection, tables.models, identifier, client_id=client_id)
    if row is None:
        raise ModelNotFound("model_name names a model that does not exist", param="model_name")
    base = base_of(parts, row["base_model"], "model_name")
    files = model_ref(row)
    try:
        key = parts.keyring.find(connection, client_id, row["blob"])
    except ObjectDamaged as damage:
        raise _cannot_be_served(damage) from damage
    # Files in the data directory are where they are read; others must be here while a replica reads them. A hold is
    # entered in a thread, since it may download files: loading local ones does without both.
    hold = partial(parts.blobs.fetched, files) if parts.blobs.is_remote else None
    adapter = Adapter(identifier, parts.blobs.path_of(files.prefix), key, hold)
    return FoundModel(base, adapter, files, row["job_id"] is None)


def served_model(
    connection: sa.Connection, parts: Parts, client_id: str, identifier: str
) -> ServedModel:
    """Look a model up with its prompt template. Never call it inside a write transaction: it may read files.

    Raises as `find_model` does, `DeploymentError` also where the template is damaged, or the base model's engine cannot
    serve such an adapter; and `BlobsAway`.
    """
    found = find_model(connection, parts, client_id, identifier)
    if found.adapter is None or found.files is None:
        return ServedModel(found.base)
    engine, key, fault = found.base.engine, found.adapter.key, None
    files = found.files.only(*TEMPLATE_FILES)
    try:
        # An adapter from elsewhere has the template of its base model, which is the one that was checked.
        template = (
            None if found.is_imported else _template(parts.blobs, files, key, found.base.path)
        )
        if not engine.is_own:  # another engine may know less than ours, which checks what it loads
            config = _adapter_config(parts.blobs, found.files.only(ADAPTER_CONFIG), key)
            fault = engine.fault_of_adapter(config, found.base.runtime_options)
    except ObjectDamaged as damage:
        raise _cannot_be_served(damage) from damage
    if fault is not None:
        raise DeploymentError(f"the model's adapter {fault}", param="model_name", status=409)
    return ServedModel(
        found.base, found.adapter, found.files, found.is_imported, own_template=template
    )


def _cannot_be_served(damage: ObjectDamaged) -> DeploymentError:
    return DeploymentError(f"the files of the model cannot be read: {damage}", status=409)


def job_of(connection: sa.Connection, client_id: str, identifier: str) -> JobRow | None:
    """The job that made a fine-tuned model; None for a base model and an imported one."""
    if not identifier.startswith(TUNED):
        return None
    model = rows.fetch(connection, tables.models, identifier, client_id=client_id)
    if model is None or model["job_id"] is None:
        return None
    return rows.fetch(connection, tables.jobs, model["job_id"], client_id=client_id)


@lru_cache(maxsize=256)
def _template(blobs: Blobs, files: ObjectRef, key: str, base: Path) -> PromptTemplate:
    """Load a stored model's template. Models never change, and compiling one takes longer than generating a token."""
    with blobs.fetched(files) as folder:
        return PromptTemplate.load(folder, key, base)


@lru_cache(maxsize=256)
def _with_template(base_format: ModelTextFormat, template: PromptTemplate) -> ModelTextFormat:
    """Reading the format off what the template renders takes as long as generating a token."""
    return base_format.with_template(template)


@lru_cache(maxsize=256)
def _adapter_config(blobs: Blobs, files: ObjectRef, key: str) -> dict[str, Any]:
    """Read a stored adapter's configuration, which was an object when it was stored. Models never change."""
    with blobs.fetched(files) as folder:
        return json.loads(read_plain(folder / ADAPTER_CONFIG, key))
