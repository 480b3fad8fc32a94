"""A start is refused in one line if database, key or clock do not belong to the files, and every file stays."""

import re
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases.installations import Installed, Postgres, Sqlite
from tests.support.service.in_process import Service
from tests.support.service.processes import Serve
from tuneship.host.interpreter import known_fault
from tuneship.host.startup import StartupError
from tuneship.service.recovery import recover as recover_files
from tuneship.store.database import tables
from tuneship.store.database.database import HEAD, revision_of
from tuneship.store.files.quarantine import SET_ASIDE
from tuneship.store.installation.ownership import read_record

DAY = timedelta(days=1)


@pytest.fixture
def installed(tmp_path: Path, database: Sqlite | Postgres) -> Installed:
    """A stopped installation with two datasets and a model."""
    installation = Installed(tmp_path / "data", database_url=database.url)
    fill(installation)
    return installation


def fill(installation: Installed) -> None:
    with installation.started() as opened:
        installation.add_model(opened)
        installation.add_dataset(opened)
        installation.add_dataset(opened)
        installation.sign_head(opened)


def test_a_database_that_is_empty_beside_files_is_refused_and_everything_is_there_once_it_is_back(
    installed: Installed, database: Sqlite | Postgres
) -> None:
    database.keep()
    database.lose()
    for _ in range(2):  # the first refusal must leave nothing that lets the second start succeed
        assert "is missing or empty" in installed.refused()
    database.put_back()
    with installed.started() as opened, opened.database.read() as connection:
        assert len(connection.execute(sa.select(tables.datasets)).all()) == 2
    assert installed.run("check").exit_code == 0


@pytest.mark.parametrize("size", [None, 0])
def test_an_embedded_database_that_is_gone_or_cut_to_nothing_is_refused(
    tmp_path: Path, size: int | None
) -> None:
    installed = Installed(tmp_path)
    fill(installed)
    file = tmp_path / "tuneship.sqlite"
    shutil.copy(file, tmp_path / "kept")
    file.unlink()
    if size is not None:
        file.touch()
    assert "is missing or empty" in installed.refused()
    assert file.exists() == (size is not None)  # no new database stands in the way of a restore
    (tmp_path / "database").unlink()
    assert "holds the files of 3 datasets" in installed.refused()
    shutil.copy(tmp_path / "kept", file)
    with installed.started():
        pass


def test_a_lost_database_is_refused_also_where_there_are_no_files_yet(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    with installed.started():
        pass
    (tmp_path / "tuneship.sqlite").unlink()
    assert f"remove {tmp_path / 'database'} to begin again" in installed.refused()
    (tmp_path / "database").unlink()
    with installed.started():
        pass


def test_a_database_from_before_the_last_starts_is_refused(
    installed: Installed, database: Sqlite | Postgres
) -> None:
    database.keep()
    for _ in range(2):
        with installed.started() as opened:
            installed.add_dataset(opened)
    database.put_back()
    assert "is older than the files" in installed.refused()


def test_a_database_from_before_the_last_signed_head_is_refused_and_an_operator_can_go_on(
    installed: Installed, database: Sqlite | Postgres
) -> None:
    """No start happened in between, so only the audit chain shows the loss."""
    with installed.started() as opened:
        opened.database.close()
        database.keep()
        newer = installed.add_dataset(opened)
        installed.keys(opened)
        installed.sign_head(opened)
    database.put_back()
    message = installed.refused()
    assert "older than the files: its audit chain ends with row" in message
    line = re.search(r"only the line '(id \S+)' into (\S+)", message)
    assert line is not None
    Path(line[2]).write_text(line[1])
    with installed.started() as opened:
        recover(installed, opened)
    (set_aside,) = (installed.data_dir / SET_ASIDE).iterdir()
    assert [one.name for one in (set_aside / "datasets").iterdir()] == [newer]
    with installed.started():  # from now on the two belong together again
        pass
    record = read_record(installed.data_dir)
    assert record is not None
    assert record.starts is not None


def recover(installed: Installed, opened: Any) -> None:
    """Run the step of a start that deleted files in earlier versions."""
    service = Service(installed.data_dir, **installed.options)
    recover_files(service.parts, None)
    service.database.close()


def test_files_from_before_the_last_starts_of_the_database_are_refused(
    installed: Installed, tmp_path: Path
) -> None:
    shutil.copytree(installed.data_dir, tmp_path / "kept")
    for _ in range(2):
        with installed.started() as opened:
            installed.add_dataset(opened)
    shutil.rmtree(installed.data_dir)
    (tmp_path / "kept").rename(installed.data_dir)
    assert "are older than the database" in installed.refused()


def test_files_of_one_installation_are_refused_with_the_database_of_another(
    installed: Installed, tmp_path: Path, database: Sqlite | Postgres
) -> None:
    other = Installed(tmp_path / "other", database_url=f"sqlite:///{tmp_path / 'other.sqlite'}")
    fill(other)
    mixed = Installed(other.data_dir, database_url=database.url)
    assert re.search(r"belong to the database with the id \S+, and .* another one", mixed.refused())
    mixed = Installed(installed.data_dir, database_url=other.options["database_url"])
    assert "belong to the database with the id" in mixed.refused()
    for one in (installed, other):
        with one.started():
            pass


def test_a_database_file_of_another_installation_in_the_data_directory_is_refused(
    tmp_path: Path,
) -> None:
    one, other = Installed(tmp_path / "one"), Installed(tmp_path / "other")
    fill(one)
    fill(other)
    shutil.copy(other.data_dir / "tuneship.sqlite", one.data_dir / "tuneship.sqlite")
    assert "belong to the database with the id" in one.refused()


def test_a_second_data_directory_on_a_database_is_refused(
    installed: Installed, tmp_path: Path
) -> None:
    second = Installed(tmp_path / "second", **installed.options)
    assert "is used with another data directory" in second.refused()
    copied = Installed(tmp_path / "copied", **installed.options)
    shutil.rmtree(copied.data_dir)
    shutil.copytree(installed.data_dir, copied.data_dir)
    for _ in range(2):
        with copied.started():
            pass
    assert "was used with another data directory" in installed.refused()


def test_a_database_that_has_moved_is_known_by_its_id(
    installed: Installed, database: Sqlite | Postgres
) -> None:
    moved = Installed(installed.data_dir, database_url=database.move())
    with moved.started():
        pass
    assert "moved" in (installed.data_dir / "database").read_text()


def test_a_start_that_was_killed_between_file_and_row_is_followed_by_another(
    installed: Installed,
) -> None:
    file = installed.data_dir / "database"
    starts = int(file.read_text().split()[-1])
    for _ in range(2):
        file.write_text(file.read_text().replace(f"starts {starts}", f"starts {starts + 1}"))
        with installed.started():
            pass
        starts += 1


def test_files_that_are_not_mounted_are_missed_before_anything_fails_for_want_of_them(
    installed: Installed,
) -> None:
    blobs = installed.data_dir / "blobs"
    blobs.rename(installed.data_dir / "kept")
    blobs.mkdir(mode=0o700)
    assert "the database names 3 datasets and models, and " in installed.refused()
    blobs.rmdir()
    (installed.data_dir / "kept").rename(blobs)
    with installed.started():
        pass


# The master key


def test_a_lost_master_key_is_not_replaced_also_when_nothing_is_sealed_yet(
    tmp_path: Path, database: Sqlite | Postgres
) -> None:
    installed = Installed(
        tmp_path / "data", database_url=database.url, master_key_file=tmp_path / "mounted" / "key"
    )
    (tmp_path / "mounted").mkdir()
    with installed.started():
        pass
    (tmp_path / "mounted").rename(tmp_path / "unmounted")
    (tmp_path / "mounted").mkdir()
    message = installed.refused()
    assert "mounted/key is missing" in message
    assert "TUNESHIP_MASTER_KEY_FILE" in message
    assert not list((tmp_path / "mounted").iterdir())
    for arguments in (["keys", "list"], ["audit", "verify"], ["check"]):
        assert "mounted/key is missing" in installed.run(*arguments).stderr
    (tmp_path / "mounted").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "mounted")
    with installed.started():
        pass


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("ab" * 32, "is not the one that this database was made with"),
        ("", "does not hold 32 bytes"),
        ("00" * 31, "does not hold 32 bytes"),
    ],
)
def test_another_master_key_is_refused_also_when_nothing_is_sealed_yet(
    tmp_path: Path, content: str, says: str
) -> None:
    installed = Installed(tmp_path)
    with installed.started():
        pass
    (tmp_path / "master.key").write_text(content)
    assert says in installed.refused()
    assert says in installed.run("keys", "create", "--client-id", "a", "--scopes", "viewer").stderr


# The clock


def test_a_clock_a_day_behind_is_refused_until_an_operator_says_that_it_is_right(
    installed: Installed,
) -> None:
    with installed.started(later=timedelta(hours=23)):
        pass
    assert "set the clock, or" in installed.refused()
    with pytest.raises(StartupError), installed.started():
        pass
    with installed.started(accept_clock=True):
        pass
    with installed.started():
        pass


def test_one_start_on_a_clock_days_ahead_does_not_make_the_right_clock_look_behind(
    installed: Installed,
) -> None:
    for later in (2 * DAY, 400 * DAY, timedelta()):
        with installed.started(later=later):
            pass


def test_a_clock_that_ntp_has_set_back_by_minutes_is_taken(installed: Installed) -> None:
    with installed.started(later=timedelta(minutes=4)):
        pass
    with installed.started():
        pass


# The rest of a start


def set_schema(database: Sqlite | Postgres, schema: str, works_with: str | None) -> None:
    """Give the database the number of another version; None: of one that did not say what works with its schema."""
    engine = sa.create_engine(database.url)
    with engine.begin() as connection:
        statement = sa.text(
            "update alembic_version set version_num = :schema, works_with = :oldest"
        )
        connection.execute(statement, {"schema": schema, "oldest": works_with})
        if works_with is None:
            connection.exec_driver_sql("alter table alembic_version drop column works_with")
    engine.dispose()


def test_a_newer_schema_that_works_with_this_version_is_used_and_left_as_it_is(
    installed: Installed, database: Sqlite | Postgres
) -> None:
    set_schema(database, "0999", HEAD)
    with installed.started() as opened, opened.database.read() as connection:
        assert revision_of(connection) == "0999"
    assert installed.run("keys", "list").exit_code == 0


@pytest.mark.parametrize(
    ("schema", "works_with"), [("0999", "0998"), ("0024", "0018"), ("0019", None), ("0001", None)]
)
def test_a_schema_of_another_version_is_refused_in_one_line_and_nothing_is_touched(
    installed: Installed, database: Sqlite | Postgres, schema: str, works_with: str | None
) -> None:
    """Also those from before the first release, whose migrations have other numbers, or the same."""
    set_schema(database, schema, works_with)
    rows, kept = content(database), installed.files()
    message = installed.refused()
    assert f"the database has schema {schema}" in message
    assert "install the version" in message
    served = installed.serve()
    assert (served.exit_code, served.stderr.splitlines()[-1]) == (1, f"tuneship: {message}")
    assert installed.run("keys", "list").stderr == f"tuneship: {message}\n"
    assert (content(database), installed.files()) == (rows, kept)


def content(database: Sqlite | Postgres) -> dict[str, list[Any]]:
    """Every row, by table."""
    engine, metadata = sa.create_engine(database.url), sa.MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        found = {
            table.name: [tuple(row) for row in connection.execute(sa.select(table))]
            for table in metadata.sorted_tables
        }
    engine.dispose()
    return found


def test_files_without_a_row_are_set_aside_and_said_and_rows_without_a_file_are_said(
    installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = installed.data_dir / "blobs"
    kept = installed.files()
    for name in ("datasets/ds_lost", "models/ft_lost"):
        (blobs / name).mkdir()
        (blobs / name / "file").write_bytes(b"of somebody")
    checkpoint = installed.data_dir / "work" / "ft_unknown" / "checkpoints"
    checkpoint.mkdir(parents=True)
    (installed.data_dir / "scratch" / ".staged-x").write_bytes(b"half an upload")
    (model,) = [one for one in (blobs / "models").iterdir() if one.name != "ft_lost"]
    shutil.rmtree(model)
    with installed.started() as opened:
        recover(installed, opened)
    (set_aside,) = (installed.data_dir / SET_ASIDE).iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", set_aside.name)
    aside = {str(one.relative_to(set_aside)) for one in set_aside.glob("*/*")}
    assert aside == {"datasets/ds_lost", "models/ft_lost", "work/ft_unknown"}
    assert (set_aside / "models" / "ft_lost" / "file").read_bytes() == b"of somebody"
    assert not list((installed.data_dir / "scratch").iterdir())
    assert "files without a row were moved to" in caplog.text
    assert "until you remove them: 3 folders" in caplog.text
    assert "the files of 1 dataset or model are missing: `tuneship check` names" in caplog.text
    assert {path: kept[path] for path in installed.files()} == installed.files()


def test_a_data_directory_that_was_open_to_others_is_closed_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed = Installed(tmp_path / "data")
    fill(installed)
    (installed.data_dir / "blobs").chmod(0o755)
    installed.data_dir.chmod(0o755)
    (installed.data_dir / "tuneship.sqlite").unlink()  # so that the service ends at once
    assert installed.serve().exit_code == 1
    for folder in (installed.data_dir, installed.data_dir / "blobs"):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert f"{folder} was open to other users" in caplog.text


@pytest.mark.slow
@pytest.mark.soak
def test_the_log_of_a_start_is_one_line_of_the_service_and_a_fault_of_the_interpreter(
    tmp_path: Path,
) -> None:
    serve = Serve(tmp_path / "data")
    serve.stop()
    expected = 1 if known_fault() is None else 2
    assert len(serve.log.read_text().splitlines()) == expected
    for part in ("tuneship.service.serve", serve.url, str(serve.data_dir), "sqlite"):
        assert part in serve.log.read_text()
    serve.start()
    serve.stop()
    assert len(serve.log.read_text().splitlines()) == 2 * expected
