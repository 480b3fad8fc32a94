"""Checks what a job needs before a training is started for it: safeguards, base model, files and keys."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.access.capabilities import Capabilities
from tuneship.service.access.data_keys import Keyring
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.datasets.lookup import object_of
from tuneship.service.jobs.launcher import TrainingOrder
from tuneship.service.models.safeguards import check_kept
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.rows import Row
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.stored_files import dataset_file
from tuneship.training.spec import DataKeys


class DataDamaged(Exception):
    """A base model or dataset of the job is missing or has changed since the job was created."""


@dataclass(frozen=True)
class TrainingPreparation:
    """Checks jobs and makes the orders for their trainings."""

    database: Database
    blobs: Blobs
    keyring: Keyring
    catalogue: Catalogue
    capabilities: Capabilities

    def order(self, job: Row) -> TrainingOrder:
        """Check everything that the job refers to. Reads whole files, so it may take long.

        Raises `SafeguardLost`, `DataDamaged`, `ObjectDamaged`, and `BlobsAway`.
        """
        check_kept(self.capabilities, job["security_settings"])
        base = self.catalogue.get(job["base_model"])
        if base is None:
            raise DataDamaged("the base model is no longer offered here")

        keyring, client_id = self.keyring, job["client_id"]
        with self.database.read() as connection:
            training, validation = _dataset(connection, job, job["dataset_id"]), None
            validation_key = None
            if job["validation_dataset_id"] is not None:
                validation = _dataset(connection, job, job["validation_dataset_id"])
                validation_key = keyring.find(connection, client_id, object_of(validation))
            comparison: dict[str, Any] = job["comparison"] or {}
            compared = None
            if comparison.get("model"):  # it may be deleted meanwhile: the job goes on without it
                model_id = comparison["model"]
                compared = rows.fetch(connection, tables.models, model_id, client_id=client_id)
            compared_key = (
                keyring.find(connection, client_id, compared["blob"]) if compared else None
            )
            keys = DataKeys(
                training=keyring.find(connection, client_id, object_of(training)),
                validation=validation_key,
                checkpoints=keyring.find(connection, client_id, f"jobs/{job['id']}"),
                adapter=keyring.find(connection, client_id, f"models/{job['id']}"),
                compared=compared_key,
            )

        # After the read: files that come from another machine would keep its snapshot open for long.
        for dataset in (training, validation):
            if dataset is not None:
                self._check_file(dataset)
        return TrainingOrder(job, base.path, training, validation, keys, compared)

    def _check_file(self, dataset: Row) -> None:
        try:
            with dataset_file(self.blobs, dataset, is_checked=True):
                pass
        except ObjectDamaged:
            raise DataDamaged("a stored dataset is damaged") from None
        except FileNotFoundError:
            raise DataDamaged("a stored file is missing") from None


def _dataset(connection: sa.Connection, job: Row, dataset_id: str) -> Row:
    row = rows.fetch(connection, tables.datasets, dataset_id, client_id=job["client_id"])
    if row is None:
        raise DataDamaged("a dataset of the job no longer exists")
    return row
