"""Handler of merges: datasets of one format are copied one after another into a new one; nothing is dropped."""

from collections.abc import Sequence

from tuneship.contract import datasets as contract
from tuneship.contract.datasets import DatasetCreated, DatasetMerge, DatasetStatus
from tuneship.contract.errors import DatasetError, ResourceNotFound
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK
from tuneship.security.sealed_files import ObjectDamaged, open_plain
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_disk, own_room, reserve, staging
from tuneship.service.datasets.lookup import object_of, own_dataset
from tuneship.service.datasets.new_datasets import (
    COUNTS,
    UNCOUNTED,
    counts,
    is_big,
    new_row,
    read_now,
    store,
    verdict,
)
from tuneship.service.datasets.reading import FILE_LIMIT, LINES_LIMIT
from tuneship.store.database.tables import DatasetRow
from tuneship.store.files.blobs import StagedFile
from tuneship.store.files.stored_files import dataset_file

BLOCK_BYTES = 1 << 20


@serves(contract.merge_datasets, is_long=True)
def merge_datasets(context: Context, merge: DatasetMerge) -> DatasetCreated:
    """Copy the datasets in the given order, so that they may be deleted, and count repeated examples."""
    sources = _sources(context, merge.dataset_ids)

    # The counts are the sums of the sources' where one tokenizer counted them all; else the new file is counted.
    catalogue, tokenizer = context.parts.catalogue, sources[0]["tokenizer"]
    known: dict[str, int]
    base, known = None, {name: sum(one[name] for one in sources) for name in COUNTS}
    if any(source["tokenizer"] != tokenizer for source in sources):
        base, known = catalogue.get(tokenizer) or catalogue.default, UNCOUNTED

    with staging(context) as staged:
        size = sum(source["bytes"] for source in sources)
        reserve(context, own_room(context), announced=size)
        check_disk(context)
        for source in sources:
            _append(context, source, staged)
        staged.finish()
        row = new_row(context, merge) | {
            "format": sources[0]["format"],
            "tokenizer": tokenizer,
            "source_datasets": merge.dataset_ids,
            "came_safely": all(source["came_safely"] for source in sources),
            **known,
        }
        if is_big(context, staged):
            row |= {"status": DatasetStatus.PROCESSING}
        else:
            reading = read_now(context, staged, sources[0]["format"], base)
            if reading.error_count:
                raise DatasetError(verdict(reading), param="dataset_ids")
            row |= {
                "status": DatasetStatus.PROCESSED,
                **(known if base is None else counts(reading)),
            }
            row["duplicate_examples"] = reading.codes["duplicate_example"]
        return DatasetCreated(**store(context, row, staged))


def _sources(context: Context, dataset_ids: Sequence[str]) -> list[DatasetRow]:
    """Read the rows: own, processed, of one format, and together no larger than a file may be."""
    if len(set(dataset_ids)) != len(dataset_ids):
        raise field_error("dataset_ids", "must name different datasets")
    sources = [own_dataset(context, one, "dataset_ids") for one in dataset_ids]
    if any(source["status"] != DatasetStatus.PROCESSED for source in sources):
        raise DatasetError("a dataset is not processed", param="dataset_ids", status=409)
    if len({source["format"] for source in sources}) > 1:
        raise DatasetError("the datasets have different formats", param="dataset_ids")
    if sum(source["bytes"] for source in sources) > FILE_LIMIT:
        text = f"the datasets together are larger than {FILE_LIMIT >> 20} MiB"
        raise DatasetError(text, param="dataset_ids")
    if sum(source["num_examples"] for source in sources) > LINES_LIMIT:
        text = f"the datasets together have over {LINES_LIMIT} examples"
        raise DatasetError(text, param="dataset_ids")
    return sources


def _append(context: Context, source: DatasetRow, staged: StagedFile) -> None:
    """Copy a dataset's lines, the last one with a line end."""
    last = b"\n"
    try:
        with context.read() as connection:
            key = context.parts.keyring.find(connection, context.client_id, object_of(source))
        with (
            dataset_file(context.parts.blobs, source, is_checked=True) as path,
            open_plain(path, key) as file,
        ):
            staged.write(file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK))
            while block := file.read(BLOCK_BYTES):
                staged.write(block)
                last = block[-1:]
    except FileNotFoundError:  # deleted since its row was read
        raise ResourceNotFound("there is no such dataset", param="dataset_ids") from None
    except ObjectDamaged:
        text = "a stored dataset is damaged"
        raise DatasetError(text, param="dataset_ids", status=409) from None
    if last != b"\n":
        staged.write(b"\n")
