"""Handlers of datasets: validate, upload, show, list, delete. Merging is in `merging.py`.

A file is read by `reading.py`, a big one later by `processing.py`. It is accepted whole or not at all.
"""

from typing import BinaryIO

from tuneship.contract import datasets as contract
from tuneship.contract.common import Deleted
from tuneship.contract.datasets import (
    Dataset,
    DatasetCreated,
    DatasetPage,
    DatasetStatus,
    DatasetSummary,
    DatasetUpload,
    DatasetValidate,
    DatasetValidation,
    FormatDetails,
    TokenDistribution,
)
from tuneship.contract.errors import ModelNotFound
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.service.catalogues.base_models import CataloguedModel, CatalogueFault
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.service.datasets.advice import suggestions
from tuneship.service.datasets.lookup import own_dataset
from tuneship.service.datasets.new_datasets import (
    UNCOUNTED,
    counts,
    fields,
    is_big,
    new_row,
    read_now,
    refuse_errors,
    store,
)
from tuneship.service.datasets.removal import remove_dataset
from tuneship.service.models.lookup import base_of
from tuneship.store.database import rows, tables
from tuneship.store.database.listings import DATASETS
from tuneship.store.files.blobs import StagedFile


@serves(contract.validate_dataset, own_threads="validations")
def validate_dataset(context: Context, form: DatasetValidate, file: BinaryIO) -> DatasetValidation:
    """Read the file and report its problems; nothing is stored."""
    base = _counting_model(context, form.base_model)
    is_rendered = form.base_model is not None
    reading = read_now(context, _staged(file), form.format, base, is_rendered=is_rendered)
    return DatasetValidation(
        is_valid=reading.error_count == 0,
        num_examples=reading.num_examples,
        total_tokens=reading.prompt_tokens + reading.response_tokens,
        token_distribution=TokenDistribution(
            prompt_tokens=reading.prompt_tokens, response_tokens=reading.response_tokens
        ),
        format_details=FormatDetails(
            format=form.format,
            has_instructions=reading.has_instructions,
            has_responses=reading.num_examples > 0,  # every good example has one
        ),
        suggestions=suggestions(reading),
        errors=reading.errors,
        warnings=reading.warnings,
        error_count=reading.error_count,
        errors_truncated=reading.error_count > len(reading.errors),
        warning_count=reading.warning_count,
        tokenizer=base.id,
    )


@serves(contract.upload_dataset, is_long=True)
def upload_dataset(context: Context, form: DatasetUpload, file: BinaryIO) -> DatasetCreated:
    """Check a small file now and a big one later; a bad line refuses the whole file."""
    staged = _staged(file)
    base = _counting_model(context, form.base_model)
    row = new_row(context, form) | {"format": form.format, "tokenizer": base.id}
    if is_big(context, staged):
        row |= {"status": DatasetStatus.PROCESSING, **UNCOUNTED}
    else:
        reading = read_now(context, staged, form.format, base)
        refuse_errors(reading)
        row |= {"status": DatasetStatus.PROCESSED, **counts(reading)}
        row["suggestions"] = suggestions(reading) or None
    return DatasetCreated(**store(context, row, staged))


def _counting_model(context: Context, identifier: str | None) -> CataloguedModel:
    if identifier is None:
        return context.parts.catalogue.default
    base = base_of(context.parts.catalogue, identifier, "base_model")
    try:
        _ = base.tokenizer, base.text_format.template
    except CatalogueFault as fault:
        text = f"base_model names a base model whose files cannot be used: {fault}"
        raise ModelNotFound(text, param="base_model") from None
    return base


def _staged(file: BinaryIO) -> StagedFile:
    if not isinstance(file, StagedFile):
        raise TypeError("the HTTP boundary stages a form's file before its handler runs")
    return file


@serves(contract.get_dataset)
def get_dataset(context: Context, dataset_id: str) -> Dataset:
    """Return the dataset with its token distribution."""
    row = own_dataset(context, dataset_id)
    return Dataset(
        **fields(row),
        token_distribution=TokenDistribution(
            prompt_tokens=row["prompt_tokens"], response_tokens=row["response_tokens"]
        ),
    )


@serves(contract.list_datasets)
def list_datasets(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    format: DatasetFormat | None = None,  # noqa: A002 - the description's name
    tags: dict[str, str] | None = None,
) -> DatasetPage:
    """Return a page of the caller's datasets, newest first."""
    filters = rows.filters_of(tables.datasets, tags, format=format)
    page = own_page(context, DATASETS, filters, limit, offset)
    datasets = [DatasetSummary(**fields(row)) for row in page.rows]
    return DatasetPage(datasets=datasets, pagination=page.pagination)


@serves(contract.delete_dataset)
def delete_dataset(context: Context, dataset_id: str) -> Deleted:
    """Remove the dataset unless it is used."""
    remove_dataset(context, dataset_id)
    return Deleted(id=dataset_id)
