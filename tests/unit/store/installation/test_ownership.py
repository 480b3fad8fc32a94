"""Files of one database are never taken for leftovers of another. `test_wrong_database.py` tests this at a start."""

from pathlib import Path

import pytest

from tuneship.store.database.database import url_of
from tuneship.store.installation.installation import FoundDatabase
from tuneship.store.installation.ownership import (
    DatabaseIsEmpty,
    FilesOfAnotherDatabase,
    OwnershipRecord,
    check_name,
    check_ownership,
    name_of,
    read_record,
    record_ownership,
)

HERE = "postgresql+psycopg://someone:secret@db.example:5433/tuneship"
ID = "db_1"


def own(data_dir: Path) -> str:
    return url_of(None, data_dir)


def test_a_directory_whose_record_was_lost_belongs_to_its_sqlite_file(tmp_path: Path) -> None:
    check_name(tmp_path, HERE)
    (tmp_path / "tuneship.sqlite").touch()
    with pytest.raises(FilesOfAnotherDatabase) as refused:
        check_name(tmp_path, HERE)
    assert "secret" not in str(refused.value)
    assert f"move {tmp_path / 'tuneship.sqlite'} away" in str(refused.value)
    check_name(tmp_path, own(tmp_path))


@pytest.mark.parametrize("servers", ["host=a:1&host=b", "host=a:1,b"])
def test_a_database_on_several_servers_is_named_with_all(tmp_path: Path, servers: str) -> None:
    url = f"postgresql+psycopg://u:secret@/d?{servers}&target_session_attrs=read-write"
    assert name_of(url, tmp_path) == "postgresql://a:1,b/d"


def test_passwords_may_change_and_directories_may_move(tmp_path: Path) -> None:
    record_ownership(tmp_path, HERE, ID, 3)
    check_name(tmp_path, HERE.replace("someone:secret", "other:word"))
    assert "secret" not in (tmp_path / "database").read_text()
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    record_ownership(old, own(old), ID, 3)
    old.rename(new)
    check_name(new, own(new))
    check_ownership(new, own(new), FoundDatabase(is_used=True, id=ID, starts=3))


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("id db_1", OwnershipRecord("db_1")),
        ("  id db_1  \n\n", OwnershipRecord("db_1")),
        ("postgresql://h/d\nid db_1\nstarts 12\n", OwnershipRecord("db_1", 12)),
        ("sqlite in this directory\n", None),
        ("", None),
    ],
)
def test_the_record_is_read_as_services_and_people_write_it(
    tmp_path: Path, text: str, record: OwnershipRecord | None
) -> None:
    (tmp_path / "database").write_text(text)
    assert read_record(tmp_path) == record


@pytest.mark.parametrize(
    ("starts", "is_refused"), [(1, True), (2, True), (3, False), (4, False), (5, True)]
)
def test_the_starts_of_file_and_row_may_differ_by_a_start_that_was_killed(
    tmp_path: Path, starts: int, is_refused: bool
) -> None:
    record_ownership(tmp_path, HERE, ID, 4)
    found = FoundDatabase(is_used=True, id=ID, starts=starts)
    if not is_refused:
        check_ownership(tmp_path, HERE, found)
        return
    with pytest.raises(FilesOfAnotherDatabase) as refused:
        check_ownership(tmp_path, HERE, found)
    assert f"write only the line 'id {ID}' into {tmp_path / 'database'}" in str(refused.value)


def test_an_empty_database_is_refused_only_beside_what_it_should_name(tmp_path: Path) -> None:
    check_ownership(tmp_path, HERE, FoundDatabase())
    (tmp_path / "blobs" / "models" / "ft_1").mkdir(parents=True)
    with pytest.raises(DatabaseIsEmpty, match="files of 1 dataset, model or job"):
        check_ownership(tmp_path, HERE, FoundDatabase())
