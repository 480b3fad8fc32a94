"""Adds a base model to an installation, checks and removes it, whether the service runs or not.

A model is made in a folder of its own beside the others (`.adding-…`), flushed, and renamed when all is right: a
running service sees it whole or not at all. Foreign files are read by a process of its own (`tuneship/conversion/`).
"""

import errno
import fcntl
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from tuneship.contract.common import render_time
from tuneship.contract.errors import InternalError
from tuneship.conversion.order import ALLOWED_DIFFERENCE, ReadingOrder, ReadingReport
from tuneship.conversion.running import ConversionFailed, convert_in_process
from tuneship.host import staging
from tuneship.host.disk_space import check_room
from tuneship.host.durable import flush, flush_open
from tuneship.host.file_digest import sha256_of
from tuneship.host.machine import GIB
from tuneship.service.answers.field_errors import abbreviated
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.service.catalogues.origins import MODEL_ID, ORIGIN_FILE, Origin, added_folder
from tuneship.service.catalogues.sources import AddingRefused, CheckpointSource, GgufSource
from tuneship.serving.weights import WEIGHTS
from tuneship.settings import ServiceSettings

ADDING, REMOVING = ".adding-", ".removing-"
# Holds the id of a model that is being removed, as long as it may have to be put back.
NAME = "name"
COPIED_AT_ONCE = 1 << 20
# The call of Linux that copies a file without its blocks, where the file system can.
FICLONE = 0x40049409

Note = Callable[[str], None]


@dataclass(frozen=True)
class CheckResult:
    """The faults of a base model, and how it was read."""

    faults: list[str]
    # None where the model was not read.
    report: ReadingReport | None = None


@dataclass(frozen=True)
class _Prepared:
    """A source that is ready to be read."""

    order: ReadingOrder
    readable: Path
    # SHA-256 of the source's files, by name.
    sha256: dict[str, str]


def add(  # noqa: PLR0913 (the options of a command)
    settings: ServiceSettings,
    source: CheckpointSource | GgufSource,
    identifier: str,
    now: datetime,
    note: Note,
    *,
    hard_links: bool = False,
    weights: str | None = None,
) -> Origin:
    """Add a base model under an id. Raises `AddingRefused`; then nothing has changed.

    `hard_links`: share the files of a checkpoint instead of copying them. `weights`: the number format in which it is
    served, one of `WEIGHTS`; `auto` is measured now. `note` is called with what happens.
    """
    if weights is not None and weights not in WEIGHTS:
        raise AddingRefused(f"--weights must be one of: {', '.join(WEIGHTS)}")
    folder = added_folder(settings.data_dir)
    _refuse_taken(Catalogue(settings.model_catalogue, folder), identifier)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with staged(folder, ADDING) as stage:
            (stage / "model").mkdir(mode=0o700)
            if isinstance(source, GgufSource):
                if hard_links:
                    raise AddingRefused("--hard-links: a GGUF file is converted, not shared")
                prepared = _linked(settings, source, stage)
                note("converting and comparing with transformers")
            else:
                note("copying")
                prepared = _copied(settings, source, stage, note, hard_links=hard_links)
                note("comparing with transformers")
            order = replace(prepared.order, weights=weights)
            report = read_in_process(order, stage, prepared.readable)
            refuse_unusable(source.name, report)
            for line in report.notes:
                note(line)
            origin = _finished(source, prepared, report, stage / "model", now)
            try:
                (stage / "model").rename(folder / identifier)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise AddingRefused(f"there is a base model {identifier} already") from None
                raise
        flush(folder)
    except OSError as error:
        raise AddingRefused(f"{source.name} cannot be added: {error.strerror}") from error
    return origin


def _refuse_taken(catalogue: Catalogue, identifier: str) -> None:
    if not MODEL_ID.fullmatch(identifier):
        raise AddingRefused(
            "the id must begin with a letter or digit and hold only these and . _ -, 64 at most: choose it with --id"
        )
    if catalogue.get(identifier) is not None:
        raise AddingRefused(
            f"there is a base model {identifier} already: choose another id with --id"
        )


def staged(folder: Path, prefix: str) -> AbstractContextManager[Path]:
    """A new folder beside the models, removed at the end; one left by a killed command is removed by the next."""
    return staging.staged(folder, prefix, _sweep)


def sweep(folder: Path) -> None:
    """Remove the remains of killed commands from the folder of added models, which may be missing."""
    if folder.is_dir():
        with staging.alone(folder):
            _sweep(folder)


def _sweep(folder: Path) -> None:
    for leftover in staging.abandoned(folder, REMOVING):
        # Killed before it knew that nobody uses the model.
        with suppress(OSError):
            (leftover / "model").rename(folder / (leftover / NAME).read_text())
        shutil.rmtree(leftover, ignore_errors=True)
    staging.remove_abandoned(folder, ADDING)


def _linked(settings: ServiceSettings, source: GgufSource, stage: Path) -> _Prepared:
    """Link the file alone into a folder, because transformers looks for others beside it."""
    if find_spec("gguf") is None:
        raise AddingRefused("a GGUF file needs `pip install 'tuneship[gguf]'`")
    _refuse_full(settings, source.bytes_needed)
    folder, name = stage / "source", "model.gguf"
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(source.file.resolve())
    order = ReadingOrder(str(folder), str(stage / "model"), gguf_file=name)
    return _Prepared(order, folder, {source.name: sha256_of(source.file)})


def _copied(
    settings: ServiceSettings,
    source: CheckpointSource,
    stage: Path,
    note: Note,
    *,
    hard_links: bool,
) -> _Prepared:
    """Copy or share the files that are needed, and nothing else."""
    names = source.files()
    files = {stage / "model" / name: (source.folder / name).resolve() for name in names}
    if hard_links:
        for target, file in list(files.items()):
            # Another file system, one without links, or a file of another user has it copied.
            with suppress(OSError):
                target.hardlink_to(file)
                del files[target]
        if files:
            note("the files cannot be shared from there, so they are copied")
    _refuse_full(settings, sum(file.stat().st_size for file in files.values()))
    for target, file in files.items():
        with file.open("rb") as read, target.open("xb") as written:
            # A file system that can share blocks until one copy changes needs no time and no room.
            try:
                fcntl.ioctl(written, FICLONE, read.fileno())
            except OSError:
                shutil.copyfileobj(read, written, COPIED_AT_ONCE)
            flush_open(written)
    order = ReadingOrder(str(source.folder.absolute()), str(stage / "model"))
    digests = {name: sha256_of(stage / "model" / name) for name in names}
    return _Prepared(order, source.folder.absolute(), digests)


def _refuse_full(settings: ServiceSettings, needed: int) -> None:
    """Keep as much of the disk free as the service does for uploads."""
    try:
        check_room(settings, needed)
    except InternalError:
        raise AddingRefused(
            f"the disk has no room for it: {needed / GIB:.1f} GiB are needed beside what the service keeps free"
        ) from None


def read_in_process(
    order: ReadingOrder, work: Path, readable: Path, module: str | None = None
) -> ReadingReport:
    """Have a process read the model that may write `work` alone. Raises `AddingRefused` without a report."""
    places = (readable, Path(order.target))
    try:
        return convert_in_process(order, ReadingReport, work, places, module=module)
    except ConversionFailed as failure:
        raise AddingRefused(str(failure)) from None


def refuse_unusable(name: str, report: ReadingReport) -> None:
    """Raises `AddingRefused` for a model that cannot be read, or that our engine reads otherwise."""
    if report.fault is not None:
        raise AddingRefused(f"{name} cannot be added: {report.fault}")
    if not report.is_alike:
        raise AddingRefused(f"{name} cannot be added: {difference_of(report)}")


def difference_of(report: ReadingReport) -> str:
    """Say by how much our engine and transformers differ."""
    return (
        f"the engine reads it differently from transformers: the loss of a reference text is {report.loss_after:.4f} "
        f"instead of {report.loss_before:.4f}, and single tokens differ by {report.difference:.2g}"
    )


def _finished(
    source: CheckpointSource | GgufSource,
    prepared: _Prepared,
    report: ReadingReport,
    model: Path,
    now: datetime,
) -> Origin:
    """Write the origin, and everything to the disk. Raises `AddingRefused` for a model that would not be offered."""
    fault = CataloguedModel(source.name, model, source.name, "", "").fault
    if fault is not None:
        raise AddingRefused(f"{source.name} cannot be added: {fault}")
    files = sorted(model.iterdir())
    origin = Origin(
        kind=source.kind,
        source=source.name,
        source_sha256=prepared.sha256,
        sha256={file.name: sha256_of(file) for file in files},
        versions=report.versions,
        added_at=render_time(now),
        licence=source.licence,
        loss_before=report.loss_before,
        loss_after=report.loss_after,
        weights=None if report.served_loss is None else report.served_format,
        served_loss=report.served_loss,
        tuning_fault=report.tuning_fault,
    )
    origin.write(model)
    for path in (*files, model):
        flush(path)
    return origin


def check(model: CataloguedModel) -> CheckResult:
    """Compare the files with their digests, and our engine with transformers; ask the engine a question.

    Raises `AddingRefused` for a model of another engine, and when the process that reads it crashes.
    """
    if not model.engine.is_own:
        raise AddingRefused(f"{model.id} is served by {model.runtime}, which is not compared")
    if model.fault is not None:
        return CheckResult([model.fault])
    origin, faults = _file_faults(model.path)
    folder = str(model.path.absolute())
    order = ReadingOrder(folder, folder, weights=model.weights, asks=True)
    with tempfile.TemporaryDirectory(prefix="tuneship-check-") as work:
        report = read_in_process(order, Path(work), model.path.absolute())
    if report.fault is not None:
        faults.append(report.fault)
    elif not report.is_alike:
        faults.append(difference_of(report))
    elif origin and abs(report.loss_after - origin.loss_after) > ALLOWED_DIFFERENCE:
        faults.append(
            f"the loss of a reference text is {report.loss_after:.4f}; it was {origin.loss_after:.4f} when it was added"
        )
    return CheckResult(faults, report)


def _file_faults(model: Path) -> tuple[Origin | None, list[str]]:
    """The origin of a model, and its files that differ from the added ones."""
    try:
        origin = Origin.read(model)
    except FileNotFoundError:
        return None, []  # a shipped model, or one of the operator's file
    except (OSError, ValueError):
        return None, [f"its {ORIGIN_FILE} cannot be read"]
    added = {*origin.sha256, ORIGIN_FILE}
    faults = [
        f"its {file.name} was not added" for file in model.iterdir() if file.name not in added
    ]
    for name, digest in origin.sha256.items():
        try:
            if sha256_of(model / name) != digest:
                faults.append(f"its {name} is not the file that was added")
        except OSError as error:
            faults.append(f"its {name} cannot be read: {error.strerror}")
    return origin, faults


def remove(folder: Path, identifier: str, users: Callable[[], Sequence[str]]) -> None:
    """Remove an added model that nobody uses. Raises `AddingRefused` and `OSError`; then it is still there.

    `users` lists the ids of what uses it now.
    """
    _refuse_used(identifier, users())
    with staged(folder, REMOVING) as stage:
        (stage / NAME).write_text(identifier)
        (folder / identifier).rename(stage / "model")
        try:
            # The service offers it no more, so one look shows nearly every user that came meanwhile. A job or a
            # deployment that found the model just before and is stored after this look fails by name.
            _refuse_used(identifier, users())
        except BaseException:
            (stage / "model").rename(folder / identifier)
            raise
        (stage / NAME).unlink()
        flush(folder)


def _refuse_used(identifier: str, users: Sequence[str]) -> None:
    if users:
        raise AddingRefused(f"{identifier} is in use: delete {abbreviated(users)} first")
