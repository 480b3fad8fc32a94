"""Lists the files that rows name, with their digests: files of datasets, tuned models and batches."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.store.database.tables import batch_files, datasets, models
from tuneship.store.files.blobs import Blobs, ObjectRef


@dataclass(frozen=True)
class StoredObject:
    """A dataset, a tuned model or a file of a batch."""

    # Its folder below `blobs`, which also names its data key: see `ObjectRef.prefix`.
    id: str
    client_id: str
    created_at: datetime
    # SHA-256 of each file, by path below `blobs`.
    files: Mapping[str, str]


@contextmanager
def dataset_file(
    blobs: Blobs, row: Mapping[str, Any], *, is_checked: bool = False
) -> Generator[Path]:
    """Yield the local file of the row of a dataset or of a batch's file, as `Blobs.fetched` does."""
    prefix, _, name = row["blob"].rpartition("/")
    with blobs.fetched(ObjectRef(prefix, {name: row["sha256"]}), is_checked=is_checked) as folder:
        yield folder / name


def model_ref(row: Mapping[str, Any]) -> ObjectRef:
    """The reference to a tuned model's stored files, from its row."""
    return ObjectRef(row["blob"], row["sha256"])


def stored_objects(connection: sa.Connection) -> Iterator[StoredObject]:
    """Iterate over the datasets, tuned models and files of batches of all tenants."""
    for kind, table in (("datasets", datasets), ("files", batch_files)):
        for row in connection.execute(sa.select(table)).mappings():
            files = {row["blob"]: row["sha256"]}
            yield StoredObject(f"{kind}/{row['id']}", row["client_id"], row["created_at"], files)
    for row in connection.execute(sa.select(models)).mappings():
        files = {f"{row['blob']}/{name}": digest for name, digest in row["sha256"].items()}
        yield StoredObject(row["blob"], row["client_id"], row["created_at"], files)
