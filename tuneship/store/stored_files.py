"""Which files the rows name, with their digests: those of every dataset and every tuned model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuneship.store.tables import datasets, models


@dataclass(frozen=True)
class StoredObject:
    """A dataset or a tuned model."""

    id: str
    """Its folder below `blobs`, and the name of its key: `datasets/<id>` or `models/<job id>`."""
    client_id: str
    created_at: datetime
    files: Mapping[str, str]
    """Path below `blobs`, and SHA-256."""


def stored_objects(connection: sa.Connection) -> Iterator[StoredObject]:
    """Every one, of every tenant."""
    for row in connection.execute(sa.select(datasets)).mappings():
        files = {row["blob"]: row["sha256"]}
        yield StoredObject(f"datasets/{row['id']}", row["client_id"], row["created_at"], files)
    for row in connection.execute(sa.select(models)).mappings():
        files = {f"{row['blob']}/{name}": digest for name, digest in row["sha256"].items()}
        yield StoredObject(row["blob"], row["client_id"], row["created_at"], files)
