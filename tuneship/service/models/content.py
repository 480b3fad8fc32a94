"""Handlers that hand a tuned model out and take one in: its content as an archive, and an adapter from elsewhere."""

import asyncio
import shutil
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tuneship.contract import models as contract
from tuneship.contract.declaring.limits import MAX_LORA_RANK
from tuneship.contract.errors import InternalError, InvalidRequestError, PermissionDenied
from tuneship.contract.models import ExportFormat, GgufType, Model, ModelImport
from tuneship.conversion.order import ImportOrder, ImportReport
from tuneship.conversion.running import ConversionFailed, ConversionLimits
from tuneship.host.disk_space import check_room
from tuneship.host.staging import remove_abandoned, staged
from tuneship.host.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneship.prompts.parity import PARITY_FILE
from tuneship.security.sealed_files import BLOCK_BYTES, new_key, seal_file
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_bytes
from tuneship.service.models.exports import (
    EXPORTING,
    Exporter,
    ExportRefused,
    exportable,
    refuse_hipaa,
)
from tuneship.service.models.lookup import TUNED, base_of, model_id, own_model, tuned_item
from tuneship.service.models.tar_stream import TarStream
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.files.blobs import BlobsAway, StagedFile

IMPORTING = ".importing-"
# Folders of unfinished work in the data directory's `scratch`.
UNFINISHED = (EXPORTING, IMPORTING)
# The files of an adapter that its check has written.
WRITTEN = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, PARITY_FILE)
# The time limit of an import or export: measured ones took a tenth of it, on a busy machine.
CONVERSION_S, PARAMETERS_A_SECOND = 300.0, 1_000_000
# What an import may allocate beside its base model: libraries and threads, and copies of the archive.
IMPORT_MEMORY_BYTES, COPIES_IN_MEMORY = 4 << 30, 8
# Room in an archive for a tokenizer and what else lies beside the weights.
OTHER_FILES_BYTES = 256 << 20


def remove_unfinished(scratch: Path) -> None:
    """Remove the remains of a killed service's exports and imports."""
    for prefix in UNFINISHED:
        remove_abandoned(scratch, prefix)


@contextmanager
def _work(context: Context, prefix: str) -> Generator[Path]:
    scratch = context.parts.settings.data_dir / "scratch"
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
    threads, left = context.parts.threads.conversions, threading.Event()
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
        base_of(parts.catalogue, model_id, "model_id")
        text = "a base model is not exported: its owner has it"
        raise InvalidRequestError(text, param="model_id", status=409)
    with context.read() as connection:
        row = own_model(context, connection, model_id)
        model = exportable(connection, parts.keyring, row)
    try:
        refuse_hipaa(model, is_allowed=parts.settings.export_hipaa_models)
    except ExportRefused as error:
        raise PermissionDenied(str(error), param="model_id") from None
    # The adapter, and at most the base model in 4 bytes a weight.
    base = parts.catalogue.get(model.row["base_model"])
    parameters = 0 if base is None or base.fault else base.parameters
    check_room(parts.settings, parameters * 4)
    exporter = Exporter(parts.blobs, parts.catalogue, parts.convert)
    limits = _limits_of(context, left, parameters)
    with _work(context, EXPORTING) as stage:
        try:
            folder = exporter.make(model, stage, wanted, limits)
        except ExportRefused as error:
            _refuse_stopped(context)
            raise InvalidRequestError(str(error), param="model_id", status=409) from None
        archive = TarStream(folder, f"{model.row['name']}-{wanted[0]}")
        if left.is_set():
            archive.close()
        return archive


def _refuse_stopped(context: Context) -> None:
    if context.parts.halted.is_set():
        raise InternalError("the service is shutting down", status=503, retry_after=1)


@serves(contract.import_model, own_threads="conversions")
def import_model(context: Context, form: ModelImport, file: BinaryIO) -> Model:
    """Check an adapter that was trained elsewhere and rewrite it like a tuned one, in another process; then seal it.

    Nothing of the archive is read here: it is foreign, and this process serves all tenants.
    """
    if not isinstance(file, StagedFile):
        raise TypeError("the HTTP boundary stages a form's file before its handler runs")
    parts, base = context.parts, None
    if form.base_model is not None:
        base = base_of(parts.catalogue, form.base_model, "base_model")
    if base is not None and not base.engine.is_own:
        text = f"the adapter is for a base model that {base.runtime} serves, which is not checked"
        raise InvalidRequestError(text, param="base_model")
    usable = {one.id: one for one in parts.catalogue if one.engine.is_own and one.fault is None}
    possible = list(usable.values()) if base is None else [base]
    most = max(map(_largest_archive, possible), default=0)
    if file.size > most:
        text = f"the adapter is larger than one of rank {MAX_LORA_RANK} can be with its files: {most >> 20} MiB"
        raise InvalidRequestError(text, param="file", status=413)
    # The archive in plain, then its files, their plain copies, and the sealed ones.
    check_room(parts.settings, 4 * file.size + parts.staged_bytes.coming(context.staged))
    with _work(context, IMPORTING) as stage:
        archive, adapter = stage / "archive.tar", stage / "adapter"
        adapter.mkdir(mode=0o700)
        with file.open() as opened, archive.open("xb") as plain:
            shutil.copyfileobj(opened, plain, BLOCK_BYTES)
        # The others' names, too: an adapter may say that it was trained for one of them.
        order = ImportOrder(
            str(archive.absolute()),
            str(adapter.absolute()),
            {name: str(one.path.absolute()) for name, one in usable.items()},
            None if base is None else base.id,
        )
        base = usable[_checked(context, order, possible)]
        return _stored(context, form, base, adapter)


def _largest_archive(base: CataloguedModel) -> int:
    widths = sum(sum(shape) for shape in base.tensors.values() if len(shape) == 2)
    # In 4 bytes a number, beside checkpoints of the optimizer, which some folders have.
    return OTHER_FILES_BYTES + 4 * 4 * MAX_LORA_RANK * widths


def _checked(context: Context, order: ImportOrder, possible: Sequence[CataloguedModel]) -> str:
    """Have the adapter checked and written, for one of the possible base models; returns that one's id."""
    parts, archive = context.parts, Path(order.archive)
    largest = max((one.parameters for one in possible), default=0)
    memory = IMPORT_MEMORY_BYTES + COPIES_IN_MEMORY * archive.stat().st_size
    limits = _limits_of(context, context.left, largest, memory)
    readable = tuple(one.path.absolute() for one in possible)
    try:
        report = parts.convert(order, ImportReport, archive.parent, readable, limits)
    except ConversionFailed as failure:
        _refuse_stopped(context)
        text = f"the adapter cannot be checked: {failure}"
        raise InvalidRequestError(text, param="file") from None
    if report.fault is not None:
        raise InvalidRequestError(f"the adapter {report.fault}", param="file")
    if report.base_model is None:
        known = ", ".join(one.id for one in parts.catalogue)
        text = f"base_model is needed: the adapter names none of the base models, which are {known}"
        raise InvalidRequestError(text, param="base_model")
    return report.base_model


def _limits_of(
    context: Context, left: threading.Event, parameters: int, memory_bytes: int = 0
) -> ConversionLimits:
    """The limits of a conversion, by the base model's parameters; `memory_bytes`: in addition to the model."""
    if memory_bytes:
        # Two copies of the base model, in 4 bytes a weight.
        memory_bytes += 8 * parameters
    return ConversionLimits(
        CONVERSION_S + parameters / PARAMETERS_A_SECOND,
        memory_bytes,
        lambda: left.is_set() or context.parts.halted.is_set(),
    )


def _stored(context: Context, form: ModelImport, base: CataloguedModel, adapter: Path) -> Model:
    """Seal and store the files, then insert the row. After a kill in between, the files are set aside later."""
    parts, identifier, key = context.parts, new_id("ft"), new_key()
    blob, sealed = f"models/{identifier}", adapter.with_name("sealed")
    sealed.mkdir(mode=0o700)
    for name in WRITTEN:
        seal_file(adapter / name, sealed / name, key)
    # The base model's, with which the adapter's was compared.
    base.text_format.template.save(sealed, key)
    files = sorted(sealed.iterdir())
    size = sum(file.stat().st_size for file in files)
    undo = partial(_remove_unless_stored, context, blob)
    context.after_rollback.append(undo)
    try:
        # Before the transaction, for which other writers would wait.
        digests = {file.name: parts.blobs.put(file, f"{blob}/{file.name}") for file in files}
    except BlobsAway:
        # The removal would wait for the same store; the supervisor finds what may be left.
        context.after_rollback.remove(undo)
        raise
    check_bytes(context, size)
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
        "appended_end": base.text_format.appended_end,
        "imported_bytes": size,
    }
    stored = rows.insert(context.transaction, tables.models, row)
    parts.keyring.add(context.transaction, context.client_id, blob, key, context.now)
    return tuned_item(parts.catalogue, stored)


def _remove_unless_stored(context: Context, blob: str) -> None:
    """Remove files without a row. A commit that failed may have succeeded, so the row is looked for."""
    with context.parts.database.write(context.client_id) as connection:
        is_stored = rows.count(connection, tables.models, tables.models.c.blob == blob) > 0
    if not is_stored:
        context.parts.blobs.delete(blob)
