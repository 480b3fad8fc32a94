"""Finds the caller's datasets and their files."""

from tuneship.contract.errors import DatasetError, ResourceNotFound
from tuneship.service.access.hipaa import GOOD_KEY, GOOD_WAY
from tuneship.service.context.context import Context
from tuneship.store.database import rows, tables
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import BatchFileRow, DatasetRow


def object_of(row: Row) -> str:
    """The folder of a dataset's file, which is also the name of its data key."""
    return f"datasets/{row['id']}"


def own_dataset(context: Context, dataset_id: str, param: str | None = None) -> DatasetRow:
    """The caller's dataset. Raises `ResourceNotFound`, for a missing one and for another tenant's alike."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.datasets, dataset_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such dataset", param=param)
    return row


def refuse_unsafe(found: DatasetRow | BatchFileRow, param: str, what: str = "dataset") -> None:
    """Raises `DatasetError` (409) for one that was not uploaded by the rules of hipaa mode."""
    if not found["came_safely"]:
        text = f"the {what} did not come by {GOOD_WAY}, and with {GOOD_KEY}: upload it again"
        raise DatasetError(text, param=param, status=409)
