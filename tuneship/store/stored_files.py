"""Lists the files that rows name, with their digests: those of every dataset and every tuned model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuneship.store.tables import datasets, models


@dataclass(frozen=True)
class StoredObject:
    """A dataset or a tuned model."""

    id: str
    """Its folder below `blobs`, which also names its data key: `datasets/<id>` or `models/<job id>`."""
    client_id: str
    created_at: datetime
    files: Mapping[str, str]
    """SHA-256 of each file, by path below `blobs`."""


def stored_objects(connection: sa.Connection) -> Iterator[StoredObject]:
    """Iterate over the datasets and tuned models of all tenants."""
    for row in connection.execute(sa.select(datasets)).mappings():
        files = {row["blob"]: row["sha256"]}
        yield StoredObject(f"datasets/{row['id']}", row["client_id"], row["created_at"], files)
    for row in connection.execute(sa.select(models)).mappings():
        files = {f"{row['blob']}/{name}": digest for name, digest in row["sha256"].items()}
        yield StoredObject(row["blob"], row["client_id"], row["created_at"], files)
