"""Handlers that hand a tuned model out and take one in: its content as an archive, and an adapter from elsewhere."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tuneship.contract import models as contract
from tuneship.contract.errors import InternalError, InvalidRequestError, PermissionDenied
from tuneship.contract.models import ExportFormat, GgufType, Model, ModelImport
from tuneship.conversion.order import ImportOrder, ImportReport
from tuneship.host.disk_space import check_room
from tuneship.host.staging import remove_abandoned, staged
from tuneship.security.sealed_files import new_key, write_sealed
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.common.conversion import ConversionFailed
from tuneship.service.common.tar_stream import TarStream
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context, Parts
from tuneship.service.models.exports import (
    EXPORTING,
    Exporter,
    ExportRefused,
    exportable,
    refuse_hipaa,
)
from tuneship.service.models.handlers import TUNED, base_of, model_id, own_model, tuned_item
from tuneship.service.models.received_adapter import (
    AdapterFault,
    named_base,
    settle_template,
    unpack,
)
from tuneship.store import queries as rows
from tuneship.store import tables
from tuneship.store.blobs import BlobsAway, StagedFile
from tuneship.store.identifiers import new_id

IMPORTING = ".importing-"
# Folders of unfinished work in the data directory's `scratch`.
UNFINISHED = (EXPORTING, IMPORTING)


def remove_unfinished(scratch: Path) -> None:
    """Remove what a killed service has left of exports and imports."""
    for prefix in UNFINISHED:
        remove_abandoned(scratch, prefix)


@contextmanager
def _work(parts: Parts, prefix: str) -> Generator[Path]:
    scratch = parts.settings.data_dir / "scratch"
    with staged(scratch, prefix, partial(remove_abandoned, prefix=prefix)) as stage:
        yield stage


@serves(contract.get_model_content, is_long=True)
async def get_model_content(
    context: Context,
    model_id: str,
    format: ExportFormat = "peft",  # noqa: A002 - the contract's name
    gguf_type: GgufType = "f16",
) -> TarStream:
    """Make an export while the caller waits, and hand it out as an archive; nothing of it stays here."""
    # Who takes a model away is recorded, whatever its settings are.
    context.audit_facts.is_required = True
    threads, left = context.parts.threads.files, threading.Event()
    work = partial(_exported, context, model_id, (format, gguf_type), left)
    making = asyncio.ensure_future(threads.run(context.client_id, work))
    try:
        return await making
    finally:
        # Nobody waits any more: the thread ends its process and removes its folder.
        left.set()


def _exported(
    context: Context, model_id: str, wanted: tuple[str, str], left: threading.Event
) -> TarStream:
    parts = context.parts
    if not model_id.startswith(TUNED):
        base_of(parts, model_id, "model_id")
        text = "a base model is not exported: its owner has it"
        raise InvalidRequestError(text, param="model_id", status=409)
    with context.read() as connection:
        row = own_model(context, connection, model_id)
        model = exportable(connection, parts.keyring, row)
    try:
        refuse_hipaa(model, is_allowed=parts.settings.export_hipaa_models)
    except ExportRefused as refusal:
        raise PermissionDenied(str(refusal), param="model_id") from None
    # The adapter, and at most the base model in 4 bytes a weight.
    base = parts.catalogue.get(model.row["base_model"])
    check_room(parts.settings, 0 if base is None or base.fault else base.parameters * 4)
    exporter = Exporter(parts.blobs, parts.catalogue, parts.convert)

    def is_stopped() -> bool:
        return left.is_set() or parts.halted.is_set()

    with _work(parts, EXPORTING) as stage:
        try:
            folder = exporter.make(model, stage, wanted, is_stopped)
        except ExportRefused as refusal:
            _refuse_stopped(parts)
            raise InvalidRequestError(str(refusal), param="model_id", status=409) from None
        archive = TarStream(folder, f"{model.row['name']}-{wanted[0]}")
        if left.is_set():
            archive.close()
        return archive


def _refuse_stopped(parts: Parts) -> None:
    if parts.halted.is_set():
        raise InternalError("the service is shutting down", status=503, retry_after=1)


@serves(contract.import_model, is_long=True)
def import_model(context: Context, form: ModelImport, file: BinaryIO) -> Model:
    """Check an adapter that was trained elsewhere as it will be served, then seal it like our own."""
    if not isinstance(file, StagedFile):
        raise TypeError("the HTTP boundary stages a form's file before its handler runs")
    parts = context.parts
    base = None if form.base_model is None else base_of(parts, form.base_model, "base_model")
    with _work(parts, IMPORTING) as stage:
        adapter = stage / "adapter"
        adapter.mkdir(mode=0o700)
        try:
            with file.open() as opened:
                unpack(opened, adapter)
            if base is None:
                known = {one.id: one for one in parts.catalogue}
                name = named_base(adapter)
                if name not in known:
                    text = (
                        "base_model is needed: the adapter names none of the base models, which are"
                    )
                    raise InvalidRequestError(f"{text} {', '.join(known)}", param="base_model")
                base = known[name]
            _check(parts, base, adapter, stage)
        except AdapterFault as fault:
            raise InvalidRequestError(f"the adapter {fault}", param="file") from None
        return _stored(context, form, base, adapter)


def _check(parts: Parts, base: CataloguedModel, adapter: Path, stage: Path) -> None:
    """Raises `AdapterFault` for an adapter that cannot be served with this base model."""
    named = named_base(adapter)
    if named != base.id and parts.catalogue.get(named) is not None:
        raise AdapterFault(f"was trained for the base model {named}")
    if not base.engine.is_own:
        raise AdapterFault(f"is for a base model that {base.runtime} serves, which is not checked")
    tokenizer = stage / "tokenizer"
    tokenizer.mkdir(mode=0o700)
    settle_template(adapter, base.path, base.text_format.template, tokenizer)
    order = ImportOrder(
        str(base.path.absolute()), str(adapter.absolute()), str(tokenizer.absolute())
    )
    try:
        report = parts.convert(
            order, ImportReport, stage, (base.path.absolute(),), parts.halted.is_set
        )
    except ConversionFailed as failure:
        _refuse_stopped(parts)
        raise AdapterFault(f"cannot be checked: {failure}") from None
    if report.refused is not None:
        raise AdapterFault(f"cannot be served: {report.refused}")


def _stored(context: Context, form: ModelImport, base: CataloguedModel, adapter: Path) -> Model:
    """Seal the files and store them, then the row. A kill between them leaves files that are set aside later."""
    parts, identifier, key = context.parts, new_id("ft"), new_key()
    blob, sealed = f"models/{identifier}", adapter.with_name("sealed")
    sealed.mkdir(mode=0o700)
    undo = partial(_remove_unless_stored, parts, context.client_id, blob)
    context.after_rollback.append(undo)
    digests: dict[str, str] = {}
    try:
        # Before the transaction, for which other writers would wait.
        for file in sorted(adapter.iterdir()):
            write_sealed(sealed / file.name, key, file.read_bytes())
            digests[file.name] = parts.blobs.put(sealed / file.name, f"{blob}/{file.name}")
    except BlobsAway:
        # The removal would wait for the same store; the supervisor finds what may be left.
        context.after_rollback.remove(undo)
        raise
    row: dict[str, Any] = {
        "id": model_id(base.id, form.name, identifier),
        "client_id": context.client_id,
        "created_at": context.now,
        "updated_at": context.now,
        "tags": form.tags,
        "base_model": base.id,
        "name": form.name,
        "job_id": None,
        "fine_tuning_method": "lora",
        "blob": blob,
        "sha256": digests,
        "ends_learnt": None,
        "appended_end": None,
    }
    stored = rows.insert(context.transaction, tables.models, row)
    parts.keyring.add(context.transaction, context.client_id, blob, key, context.now)
    return tuned_item(parts, stored)


def _remove_unless_stored(parts: Parts, client_id: str, blob: str) -> None:
    """Remove files without a row. A commit that failed may have succeeded, so the row is looked for."""
    with parts.database.write(client_id) as connection:
        is_stored = rows.count(connection, tables.models, tables.models.c.blob == blob) > 0
    if not is_stored:
        parts.blobs.delete(blob)
