"""Files of one database are never taken for leftovers of another."""

from pathlib import Path

import pytest

from tuneship.store.belonging import FilesOfAnotherDatabase, check_belonging, record_belonging
from tuneship.store.database import url_of

HERE = "postgresql+psycopg://someone:secret@db.example:5433/tuneship"


def own(data_dir: Path) -> str:
    return url_of(None, data_dir)


@pytest.mark.parametrize("known", [None, HERE])
def test_a_directory_keeps_to_its_first_database(tmp_path: Path, known: str | None) -> None:
    first = known or own(tmp_path)
    check_belonging(tmp_path, first)
    record_belonging(tmp_path, first)
    check_belonging(tmp_path, first)
    for other in {own(tmp_path), HERE, HERE.replace("5433", "5432"), f"{HERE}2"} - {first}:
        with pytest.raises(FilesOfAnotherDatabase):
            check_belonging(tmp_path, other)
    check_belonging(tmp_path, first)


def test_a_directory_of_an_older_version_belongs_to_its_sqlite_file(tmp_path: Path) -> None:
    (tmp_path / "tuneship.sqlite").touch()
    with pytest.raises(FilesOfAnotherDatabase) as refused:
        check_belonging(tmp_path, HERE)
    assert "secret" not in str(refused.value)
    assert str(tmp_path / "database") in str(refused.value)  # the way out
    check_belonging(tmp_path, own(tmp_path))


def test_a_mistyped_first_url_binds_nothing(tmp_path: Path) -> None:
    check_belonging(tmp_path, f"{HERE}x")  # its database never opens, so nothing is written down
    check_belonging(tmp_path, HERE)


def test_passwords_may_change_and_directories_may_move(tmp_path: Path) -> None:
    record_belonging(tmp_path, HERE)
    check_belonging(tmp_path, HERE.replace("someone:secret", "other:word"))
    assert "secret" not in (tmp_path / "database").read_text()
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    record_belonging(old, own(old))
    old.rename(new)
    check_belonging(new, own(new))
