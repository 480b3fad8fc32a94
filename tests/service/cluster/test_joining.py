"""A member that starts changes nothing of the others, and a start that would do harm is refused by name."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from tests.support.databases.postgres_cluster import Cluster
from tests.support.objects.object_server import ObjectServer
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.host.startup import StartupError
from tuneship.security.master_key import MasterKeyMissing, read_or_make_secret
from tuneship.service.access.api_keys import Keys
from tuneship.service.access.data_keys import AnotherMasterKey
from tuneship.service.open_installation import (
    FilesOfAnotherTime,
    OtherCluster,
    open_for_command,
    open_for_member,
    open_for_service,
)
from tuneship.settings import ServiceSettings
from tuneship.store.database import tables
from tuneship.store.database.database import Database, DatabaseInUse
from tuneship.store.files.blobs import StoreRefused
from tuneship.store.installation.ownership import FilesOfAnotherDatabase
from tuneship.store.records.audit import Chain

NOW = datetime(2026, 7, 1, tzinfo=UTC)
NEEDED = {
    "database_url": "postgresql+psycopg://h/d",
    "blob_url": "s3://bucket/1",
    "master_key_file": "/etc/tuneship/master.key",
    "public_url": "https://tuneship.test",
}


@pytest.mark.parametrize("missing", NEEDED)
def test_a_setting_that_a_cluster_needs_is_named(missing: str) -> None:
    given: dict[str, Any] = {name: value for name, value in NEEDED.items() if name != missing}
    with pytest.raises(ValidationError, match=f"TUNESHIP_CLUSTER needs TUNESHIP_{missing.upper()}"):
        ServiceSettings(cluster="one", **given)
    ServiceSettings(**given)


def test_a_cluster_needs_a_postgres_and_a_name_that_can_be_shown() -> None:
    given: dict[str, Any] = NEEDED | {"database_url": "sqlite:////tmp/secret.sqlite"}
    with pytest.raises(ValidationError, match="of a Postgres"):
        ServiceSettings(cluster="one", **given)
    with pytest.raises(ValidationError, match="cluster"):
        ServiceSettings(cluster="a\nb", **{**given, **NEEDED})


def test_members_may_share_agents() -> None:
    given: dict[str, Any] = NEEDED
    assert ServiceSettings(cluster="one", agents="local", **given).agents == "local"


@pytest.fixture
def given(tmp_path: Path, postgres: Cluster, bucket: str) -> dict[str, Any]:
    key = tmp_path / "keys" / "master.key"
    key.parent.mkdir()
    read_or_make_secret(key)
    return {
        "database_url": postgres.new_database(),
        "blob_url": bucket,
        "master_key_file": key,
        "public_url": "https://tuneship.test",
    }


def join(folder: Path, given: dict[str, Any], cluster: str | None = "one", **more: Any) -> Database:
    folder.mkdir(exist_ok=True)
    settings = ServiceSettings(data_dir=folder, cluster=cluster, **{**given, **more})
    if cluster is None:
        return open_for_service(settings, datetime.now(UTC)).database
    return open_for_member(settings, cluster).database


def content(database: Database) -> dict[str, list[Any]]:
    with database.read() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(sa.select(table))]
            for table in tables.METADATA.sorted_tables
        }


@pytest.mark.slow
@pytest.mark.postgres
def test_a_start_changes_no_row_and_no_file_of_others(
    tmp_path: Path, given: dict[str, Any], bucket: str, object_server: ObjectServer
) -> None:
    import obstore

    first = join(tmp_path / "a", given)
    Keys(first, b"pepper", lambda: NOW, Chain(b"audit")).issue("acme", SCOPES, None)
    with first.write() as connection:
        held = {
            "client_id": "alice",
            "key": "k",
            "fingerprint": "f",
            "created_at": NOW,
            "member": 0,
        }
        connection.execute(sa.insert(tables.idempotency).values(lease_until=NOW, **held))
        blank: dict[str, Any] = {
            column.name: {} if isinstance(column.type, sa.JSON) else "x"
            for column in tables.jobs.columns
            if isinstance(column.type, (sa.Text, sa.JSON))
        }
        job = blank | {"id": "ft_1", "status": "running", "attempt": 3, "owner": "a"}
        moments = {"created_at": NOW, "updated_at": NOW, "lease_until": NOW + timedelta(days=900)}
        numbers = dict.fromkeys(("attempts_without_progress", "epochs_told"), 0)
        connection.execute(sa.insert(tables.jobs).values(**job, **moments, **numbers))
    obstore.put(object_server.store(bucket), "datasets/ds_1/data.jsonl", b"of an upload under way")
    before, objects = content(first), object_server.objects(bucket)

    second = join(tmp_path / "b", given)
    assert (content(second), object_server.objects(bucket)) == (before, objects)
    second.close()
    # The commands of an operator work on the machine of any member, beside the others.
    settings = ServiceSettings(data_dir=tmp_path / "b", cluster="one", **given)
    open_for_command(settings).database.close()
    # A service that is not of the cluster starts neither beside a member nor after it.
    with pytest.raises(OtherCluster, match="cluster 'one', and TUNESHIP_CLUSTER is not set"):
        join(tmp_path / "c", given, None)
    first.close()


@pytest.mark.slow
@pytest.mark.postgres
def test_a_start_that_would_do_harm_is_refused_and_changes_nothing(
    tmp_path: Path, given: dict[str, Any], object_server: ObjectServer, postgres: Cluster
) -> None:
    alone = join(tmp_path / "alone", given, None)
    with pytest.raises(DatabaseInUse):
        join(tmp_path / "a", given)
    alone.close()

    other_key = tmp_path / "keys" / "other.key"
    other_database = postgres.new_database()
    # Copies of the migrated template have one id.
    postgres.run("truncate installation", other_database.partition("?")[0].rpartition("/")[2])
    first = join(tmp_path / "a", given)
    read_or_make_secret(other_key)
    before = content(first)
    refusals: list[tuple[type[StartupError], str, dict[str, Any]]] = [
        (OtherCluster, "two", {}),
        (AnotherMasterKey, "one", {"master_key_file": other_key}),
        (MasterKeyMissing, "one", {"master_key_file": tmp_path / "none"}),
        (StoreRefused, "one", {"blob_url": "s3://no-such-bucket/1"}),
        # The bucket of another installation, i.e. one of two clusters with the same name.
        (StoreRefused, "one", {"database_url": other_database}),
    ]
    for refusal, name, changed in refusals:
        with pytest.raises(refusal):
            join(tmp_path / "b", given, name, **changed)
    # A machine that was a member of another cluster.
    other = {"database_url": postgres.new_database(), "blob_url": object_server.place()}
    join(tmp_path / "elsewhere", given, "one", **other).close()
    with pytest.raises(FilesOfAnotherDatabase):
        join(tmp_path / "elsewhere", given)
    assert content(first) == before
    first.close()


@pytest.mark.slow
@pytest.mark.postgres
def test_a_bucket_without_the_files_of_the_rows_is_refused(
    tmp_path: Path, given: dict[str, Any], object_server: ObjectServer
) -> None:
    first = join(tmp_path / "a", given)
    blank: dict[str, Any] = {
        column.name: {} if isinstance(column.type, sa.JSON) else "x"
        for column in tables.datasets.columns
        if isinstance(column.type, (sa.Text, sa.JSON))
    }
    with first.write() as connection:
        row = blank | {"created_at": NOW, "updated_at": NOW}
        connection.execute(sa.insert(tables.datasets).values(**row))
    with pytest.raises(FilesOfAnotherTime, match="the database names 1 dataset or model"):
        join(tmp_path / "b", given)
    first.close()
