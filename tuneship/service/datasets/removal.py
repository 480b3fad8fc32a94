"""Removes a dataset, for its own handler and for what has a dataset of its own."""

from tuneship.contract.errors import DatasetError
from tuneship.service.context.context import Context
from tuneship.service.datasets.lookup import object_of, own_dataset
from tuneship.store.database import rows, tables
from tuneship.store.records import evaluation_records, job_records


def remove_dataset(context: Context, dataset_id: str) -> None:
    """Remove row and key in the transaction, and the file after it. Raises `ResourceNotFound` and `DatasetError` (409).

    A file that a kill leaves behind is set aside later.
    """
    connection = context.transaction
    row = own_dataset(context, dataset_id)
    if job_records.is_dataset_needed(connection, dataset_id):
        raise DatasetError("a job that has not ended uses the dataset", status=409)
    if evaluation_records.is_dataset_needed(connection, dataset_id):
        raise DatasetError("an evaluation that has not ended uses the dataset", status=409)
    rows.remove(connection, tables.datasets, dataset_id)
    context.parts.keyring.destroy(connection, object_of(row))
    context.after_commit.append(lambda: context.parts.blobs.delete(object_of(row)))
