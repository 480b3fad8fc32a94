"""Models for deployments: looked up by rows, and complete with their prompt templates."""

import json
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.contract.errors import DeploymentError, ModelNotFound
from tuneship.host.weight_files import ADAPTER_CONFIG
from tuneship.prompts.template import TEMPLATE_FILES, PromptTemplate
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.replicas.replica_link import Adapter
from tuneship.security.sealed_files import ObjectDamaged, read_plain
from tuneship.service.access.data_keys import Keyring
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.service.context.context import Context
from tuneship.service.models.lookup import TUNED, base_of
from tuneship.store.database import rows, tables
from tuneship.store.files.blobs import Blobs, ObjectRef
from tuneship.store.files.stored_files import model_ref


@dataclass(frozen=True)
class FoundModel:
    """A model found by its rows: its base model, and its adapter if it is a fine-tuned one."""

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


@dataclass(frozen=True)
class ModelLookup:
    """Looks models up by rows, keys and files."""

    catalogue: Catalogue
    keyring: Keyring
    blobs: Blobs

    def find(self, connection: sa.Connection, client_id: str, identifier: str) -> FoundModel:
        """Look a model up without reading its files, so that a write transaction may call it.

        Raises `ModelNotFound`, for a missing one and for another tenant's alike, and `DeploymentError` where its key is
        damaged.
        """
        if not identifier.startswith(TUNED):
            return FoundModel(base_of(self.catalogue, identifier, "model_name"))
        row = rows.fetch(connection, tables.models, identifier, client_id=client_id)
        if row is None:
            raise ModelNotFound("model_name names a model that does not exist", param="model_name")
        base = base_of(self.catalogue, row["base_model"], "model_name")
        files = model_ref(row)
        try:
            key = self.keyring.find(connection, client_id, row["blob"])
        except ObjectDamaged as damage:
            raise _cannot_be_served(damage) from damage
        # Files in the data directory are where they are read; others must be here while a replica reads them. A hold is
        # entered in a thread, since it may download files: loading local ones does without both.
        hold = partial(self.blobs.fetched, files) if self.blobs.is_remote else None
        adapter = Adapter(identifier, self.blobs.path_of(files.prefix), key, hold)
        return FoundModel(base, adapter, files, row["job_id"] is None)

    def served(self, connection: sa.Connection, client_id: str, identifier: str) -> ServedModel:
        """Look a model up with its prompt template. Never call it inside a write transaction: it may read files.

        Raises as `find` does, `DeploymentError` also where the template is damaged, or the base model's engine cannot
        serve such an adapter; and `BlobsAway`.
        """
        found = self.find(connection, client_id, identifier)
        if found.adapter is None or found.files is None:
            return ServedModel(found.base)
        engine, key, fault = found.base.engine, found.adapter.key, None
        files = found.files.only(*TEMPLATE_FILES)
        try:
            # An adapter from elsewhere has the template of its base model, which is the one that was checked.
            template = (
                None if found.is_imported else _template(self.blobs, files, key, found.base.path)
            )
            # Another engine may know less than ours, which checks what it loads.
            if not engine.is_own:
                config = _adapter_config(self.blobs, found.files.only(ADAPTER_CONFIG), key)
                fault = engine.fault_of_adapter(config, found.base.runtime_options)
        except ObjectDamaged as damage:
            raise _cannot_be_served(damage) from damage
        if fault is not None:
            raise DeploymentError(f"the model's adapter {fault}", param="model_name", status=409)
        return ServedModel(
            found.base, found.adapter, found.files, found.is_imported, own_template=template
        )


def models_of(context: Context) -> ModelLookup:
    """The lookup of a request."""
    parts = context.parts
    return ModelLookup(parts.catalogue, parts.keyring, parts.blobs)


def _cannot_be_served(damage: ObjectDamaged) -> DeploymentError:
    return DeploymentError(f"the files of the model cannot be read: {damage}", status=409)


@lru_cache(maxsize=256)
def _template(blobs: Blobs, files: ObjectRef, key: str, base: Path) -> PromptTemplate:
    """Load a stored model's template. Models never change, and compiling one takes longer than generating a token."""
    with blobs.fetched(files) as folder:
        return PromptTemplate.load(folder, key, base)


@lru_cache(maxsize=256)
def _with_template(base_format: ModelTextFormat, template: PromptTemplate) -> ModelTextFormat:
    """Add the prompt format, which takes as long to derive from the template as generating a token."""
    return base_format.with_template(template)


@lru_cache(maxsize=256)
def _adapter_config(blobs: Blobs, files: ObjectRef, key: str) -> dict[str, Any]:
    """Read a stored adapter's configuration, which was an object when it was stored. Models never change."""
    with blobs.fetched(files) as folder:
        return json.loads(read_plain(folder / ADAPTER_CONFIG, key))
