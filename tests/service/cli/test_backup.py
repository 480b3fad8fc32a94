"""`tuneship backup`, `restore` and `check` cope with deletions, damage, wrong folders and interrupted runs."""

import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import BOTH
from tests.support.databases.installations import Installed, Postgres, Sqlite
from tests.support.objects.files import contents_below
from tests.support.objects.small_disks import enlarge, fill, small_disk
from tests.support.service.in_process import Service
from tuneship.service.recovery import recover
from tuneship.service.serve import locked
from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.installation import backup as backup_module
from tuneship.store.installation import backup_format
from tuneship.store.installation import restore as restore_module
from tuneship.store.installation.backup import Backup
from tuneship.store.installation.backup_format import MANIFEST, read_manifest

CHECK = ("check", "--recheck-after", "0")
COMPLETE = {"audit-heads", "blobs", "rows", MANIFEST}


@pytest.fixture
def installed(tmp_path: Path, database: Sqlite | Postgres) -> Installed:
    return filled(Installed(tmp_path / "data", database_url=database.url))


@pytest.fixture
def embedded(tmp_path: Path) -> Installed:
    """An installation with its database in the data directory."""
    return filled(Installed(tmp_path / "data"))


def filled(installation: Installed) -> Installed:
    with installation.started() as opened:
        installation.add_model(opened)
        installation.add_dataset(opened)
        installation.add_dataset(opened, b"{}\n" * 1_000_000)
        installation.sign_head(opened)
    return installation


def done(installed: Installed, *arguments: str | Path) -> str:
    result = installed.run(*map(str, arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def failed(installed: Installed, *arguments: str | Path, code: int = 1) -> str:
    result = installed.run(*map(str, arguments))
    assert result.exit_code == code, result.output
    return result.stderr.splitlines()[-1].removeprefix("tuneship: ")


def names(folder: Path) -> set[str]:
    """The names of the files in a folder, without the times in them."""
    return {
        one.name if one.name == MANIFEST else one.name.partition("-2")[0]
        for one in folder.iterdir()
    }


def everything(url: str) -> dict[str, list[Any]]:
    database = Database(url)
    with database.read() as connection:
        found = {
            # As tuples: SQLAlchemy shortens long values when it prints a row of its own.
            table.name: sorted(repr(tuple(row)) for row in connection.execute(sa.select(table)))
            for table in tables.METADATA.sorted_tables
        }
    database.close()
    return found


@pytest.mark.parametrize("into", BOTH)
def test_a_backup_of_either_database_is_restored_into_either(
    installed: Installed, tmp_path: Path, into: str, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "backup"
    assert " and 1 model in " in done(installed, "backup", folder)
    assert names(folder) == COMPLETE
    assert {one.stat().st_mode & 0o077 for one in (folder, *folder.rglob("*"))} == {0}
    before, files = everything(installed.options["database_url"]), installed.files()
    shutil.move(installed.data_dir / "master.key", tmp_path / "master.key")
    shutil.rmtree(installed.data_dir)
    options = {"master_key_file": tmp_path / "master.key"}
    if into == "postgres":
        options["database_url"] = Postgres(request.getfixturevalue("postgres")).url
    new = Installed(tmp_path / "new", **options)
    done(new, "restore", folder)
    url = options.get("database_url", Sqlite(new.data_dir / "tuneship.sqlite").url)
    assert everything(str(url)) == before
    assert {path.relative_to(new.data_dir): file for path, file in new.files().items()} == {
        path.relative_to(installed.data_dir): file for path, file in files.items()
    }
    done(new, "check")
    done(new, "audit", "verify")
    with new.started() as opened:
        new.add_dataset(opened)
    with new.started():
        pass


def test_files_of_batches_are_restored_and_rows_about_running_processes_are_not(
    installed: Installed, tmp_path: Path
) -> None:
    agent = {"name": "a", "base": "b", "digest": "c", "number": 0, "state": "starting"}
    with installed.started() as opened:
        file_id = installed.add_batch_file(opened)
        with opened.database.write() as connection:
            connection.execute(sa.insert(tables.agents).values(**agent))
    done(installed, "backup", tmp_path / "backup")
    new = Installed(tmp_path / "new")
    shutil.copy(installed.data_dir / "master.key", new.data_dir)
    done(new, "restore", tmp_path / "backup")
    done(new, *CHECK)
    restored = everything(Sqlite(new.data_dir / "tuneship.sqlite").url)
    assert (len(restored["batch_files"]), restored["agents"]) == (1, [])
    assert [file.parent.name for file in new.data_dir.glob("blobs/files/*/*")] == [file_id]


def test_files_already_in_the_folder_are_not_copied_again_and_deleted_ones_leave_it(
    installed: Installed, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    assert "3 files copied" in done(installed, "backup", folder)
    times = {path: path.stat().st_mtime_ns for path in (folder / "blobs").glob("*/*/*")}
    with installed.started() as opened:
        new = installed.add_dataset(opened)
        with opened.database.write() as connection:
            others = tables.datasets.c.id != new
            gone = connection.scalar(sa.select(tables.datasets.c.id).where(others))
            connection.execute(sa.delete(tables.datasets).where(tables.datasets.c.id == gone))
        shutil.rmtree(installed.data_dir / "blobs" / "datasets" / str(gone))
    assert "1 file copied" in done(installed, "backup", folder)
    after = {path: path.stat().st_mtime_ns for path in (folder / "blobs").glob("*/*/*")}
    assert {path.parent.name for path in after.keys() - times.keys()} == {new}
    assert {path.parent.name for path in times.keys() - after.keys()} == {gone}
    assert all(after[path] == times[path] for path in after.keys() & times.keys())
    assert names(folder) == COMPLETE
    assert len(list(folder.iterdir())) == len(COMPLETE)


def test_a_file_of_the_backup_that_has_changed_is_found_and_copied_again_on_request(
    embedded: Installed, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    done(embedded, "backup", folder)
    file = next(iter(sorted((folder / "blobs").glob("models/*/*"))))
    file.write_bytes(b"x" * file.stat().st_size)
    new = Installed(tmp_path / "new")
    assert f"{file} is not the file that was backed up" in failed(new, "restore", folder)
    assert names(new.data_dir) <= {"blobs", "scratch", "work", "logs", "lock"}
    assert "1 file copied" in done(embedded, "backup", folder, "--verify")
    done(new, "restore", folder)


def test_the_master_key_is_in_the_backup_on_request_only(
    embedded: Installed, tmp_path: Path
) -> None:
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    result = embedded.run("backup", str(plain))
    assert "the master key is not in it: keep a copy" in result.stderr
    secret = (embedded.data_dir / "master.key").read_text().strip()
    assert not [
        path for path, content in contents_below(plain).items() if secret.encode() in content
    ]
    result = embedded.run("backup", str(whole), "--with-master-key")
    assert "whoever has it can read everything" in result.stderr
    first, second = Installed(tmp_path / "first"), Installed(tmp_path / "second")
    assert "put the master key into" in first.run("restore", str(plain)).stderr
    assert "master.key is missing" in first.refused()
    done(second, "restore", whole)
    assert (second.data_dir / "master.key").read_text().strip() == secret
    done(second, "check")
    wrong = Installed(tmp_path / "wrong")
    (wrong.data_dir / "master.key").write_text("0a" * 32)
    assert "is not the one that this database" in failed(wrong, "restore", whole)
    assert not (wrong.data_dir / "tuneship.sqlite").exists()


def test_a_restore_names_the_keys_that_are_in_force_again_and_revokes_them_on_request(
    installed: Installed, tmp_path: Path
) -> None:
    def create(client: str, *more: str) -> dict[str, str]:
        options = ("--client-id", client, "--scopes", "viewer", "--json", *more)
        return json.loads(done(installed, "keys", "create", *options))

    later, ended, short = create("clinic"), create("clinic"), create("other", "--expires", "1d")
    done(installed, "keys", "revoke", ended["key_id"])
    done(installed, "backup", tmp_path / "backup", "--with-master-key")
    done(installed, "keys", "revoke", later["key_id"])
    manifest = read_manifest(tmp_path / "backup")
    assert manifest is not None

    new = Installed(tmp_path / "new")
    said = new.run("restore", str(tmp_path / "backup")).stderr
    _, *named = re.findall(r"^  (\S+) of (\S+), created \d{4}-", said, flags=re.MULTILINE)
    assert named == [
        (later["key_id"], "clinic"),
        (short["key_id"], "other"),
    ]
    assert "3 API keys of the backup, in force, even if revoked since:" in said
    assert manifest.made_at in said
    states = {one["key_id"]: one["state"] for one in keys_of(new)}
    assert states[later["key_id"]] == "in force"

    clean = Installed(tmp_path / "clean")
    said = clean.run("restore", str(tmp_path / "backup"), "--revoke-keys").stderr
    assert "3 API keys of the backup, revoked:" in said
    assert {one["state"] for one in keys_of(clean)} == {"revoked"}
    rows = [json.loads(line) for line in done(clean, "audit", "export").splitlines()]
    assert [(row["action"], row["resource_id"]) for row in rows[-2:]] == [
        ("revoke_key", later["key_id"]),
        ("revoke_key", short["key_id"]),
    ]
    done(clean, "audit", "verify")
    done(clean, "check")


def test_keys_are_not_revoked_in_a_restore_without_the_master_key(
    embedded: Installed, tmp_path: Path
) -> None:
    done(embedded, "backup", tmp_path / "backup")
    new = Installed(tmp_path / "new")
    message = failed(new, "restore", tmp_path / "backup", "--revoke-keys")
    assert message.startswith("--revoke-keys needs the master key")
    done(new, "restore", tmp_path / "backup")


def keys_of(installed: Installed) -> list[dict[str, str]]:
    return json.loads(done(installed, "keys", "list", "--json"))["keys"]


def test_nothing_is_overwritten_by_a_restore(
    installed: Installed, database: Sqlite | Postgres, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    done(installed, "backup", folder)
    before, rows = contents_below(installed.data_dir), everything(database.url)
    assert "is not empty" in failed(installed, "restore", folder)
    other = Installed(tmp_path / "other", database_url=database.url)
    assert "the database is not empty" in failed(other, "restore", folder)
    assert contents_below(installed.data_dir) == before
    assert everything(database.url) == rows


def test_a_restore_leaves_base_models_that_were_added_before(
    embedded: Installed, tmp_path: Path
) -> None:
    folder, new = tmp_path / "backup", Installed(tmp_path / "new")
    done(embedded, "backup", folder, "--with-master-key")
    model = new.data_dir / "base_models" / "own" / "config.json"
    model.parent.mkdir(parents=True)
    model.write_text("{}")
    done(new, "restore", folder)
    assert model.read_text() == "{}"


def test_a_restore_beside_a_running_service_is_refused(embedded: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    done(embedded, "backup", folder)
    new = Installed(tmp_path / "new")
    with locked(new.data_dir):
        assert "a service or another restore runs" in failed(new, "restore", folder)


def test_a_folder_that_holds_something_else_is_refused(embedded: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "photo.jpg").write_bytes(b"of somebody")
    assert "holds something else" in failed(embedded, "backup", folder)
    assert contents_below(folder) == {folder / "photo.jpg": b"of somebody"}
    other = filled(Installed(tmp_path / "other"))
    done(other, "backup", tmp_path / "theirs")
    kept = contents_below(tmp_path / "theirs")
    assert "another installation" in failed(embedded, "backup", tmp_path / "theirs")
    assert contents_below(tmp_path / "theirs") == kept
    for inside in (embedded.data_dir / "backup", embedded.data_dir.parent):
        assert "lie in each other" in failed(embedded, "backup", inside)
    assert "holds no backup" in failed(Installed(tmp_path / "new"), "restore", tmp_path / "none")


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 1, "files": {}}'])
def test_a_damaged_manifest_is_no_backup(embedded: Installed, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "backup"
    done(embedded, "backup", folder)
    (folder / MANIFEST).write_text(text)
    message = failed(Installed(tmp_path / "new"), "restore", folder)
    assert "is damaged" in message or "newer version" in message


@pytest.mark.parametrize("path", ["../../x/y", "datasets/../x", "/etc/passwd", "datasets/a/../b"])
def test_a_manifest_does_not_lead_out_of_its_folder(
    embedded: Installed, tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "backup"
    done(embedded, "backup", folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][path] = {"sha256": "00", "bytes": 1}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "is damaged" in failed(Installed(tmp_path / "new"), "restore", folder)


@pytest.mark.parametrize("number", range(5))
def test_a_backup_that_is_broken_off_leaves_nothing_or_the_backup_before(
    embedded: Installed, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup copies five files: the heads, the rows, and three of datasets and models."""
    folder, copy, left = tmp_path / "backup", backup_format.copy_file, [number]

    def interrupted(source: Path, target: Path) -> str:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return copy(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(backup_module, "copy_file", interrupted)
        if number < 4:
            assert "broken off" in failed(embedded, "backup", folder, code=130)
            assert list(folder.iterdir()) == []
        else:
            done(embedded, "backup", folder)
    done(embedded, "backup", folder)
    kept = contents_below(folder)
    with embedded.started() as opened:
        embedded.add_dataset(opened)
    left[0] = number % 2
    with monkeypatch.context() as patched:
        patched.setattr(backup_module, "copy_file", interrupted)
        assert "broken off" in failed(embedded, "backup", folder, code=130)
    assert contents_below(folder) == kept
    assert not list((embedded.data_dir / "scratch").iterdir())


def test_a_backup_that_was_killed_is_no_backup_and_the_next_one_goes_on(
    embedded: Installed, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    done(embedded, "backup", folder)
    manifest = read_manifest(folder)
    assert manifest is not None
    (folder / MANIFEST).unlink()  # a kill just before it was written leaves the folder like this
    (folder / "tuneship-backup.unfinished").write_text(manifest.installation)
    (embedded.data_dir / "scratch" / "backup-killed" / "datasets").mkdir(parents=True)
    new = Installed(tmp_path / "new")
    assert "an unfinished backup" in failed(new, "restore", folder)
    done(embedded, "backup", folder)
    assert names(folder) == COMPLETE
    assert len(list(folder.iterdir())) == len(COMPLETE)
    assert not list((embedded.data_dir / "scratch").iterdir())
    done(new, "restore", folder)


@pytest.mark.parametrize(
    "room", [0, 100, *(pytest.param(one, marks=pytest.mark.slow) for one in (4, 800))]
)
def test_a_backup_without_room_on_its_disk_leaves_nothing_that_hinders_the_next_one(
    embedded: Installed, tmp_path: Path, room: int
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        folder = disk / "backup"
        fill(disk)
        os.truncate(disk / "filler", (1 << 20) - room * 1024)
        assert "No space left on device" in failed(embedded, "backup", folder)
        assert list(folder.iterdir()) == []
        enlarge(disk, "64m")
        done(embedded, "backup", folder)
        kept = contents_below(folder)
        with embedded.started() as opened:
            embedded.add_dataset(opened, b"{}\n" * 1_000_000)
        enlarge(disk, f"{sum(map(len, kept.values())) // 1024 + 1100}k")
        assert "No space left on device" in failed(embedded, "backup", folder)
        assert contents_below(folder) == kept
        enlarge(disk, "64m")
        done(embedded, "backup", folder)
        assert names(folder) == COMPLETE


@pytest.mark.parametrize("name", ["tuneship-backup.unfinished", MANIFEST, "master.key"])
def test_a_backup_that_was_killed_at_any_of_its_files_does_not_hinder_the_next_one(
    embedded: Installed, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "backup"
    folder.mkdir()
    (folder / f".tmp-{name}").touch()
    done(embedded, "backup", folder)
    assert names(folder) == COMPLETE


def test_a_restore_that_is_broken_off_leaves_an_empty_place(
    installed: Installed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    folder = tmp_path / "backup"
    done(installed, "backup", folder)

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("copy_file", "_write_record"):
        new = Installed(tmp_path / place)
        with monkeypatch.context() as patched:
            patched.setattr(restore_module, place, broken)
            assert "broken off" in failed(new, "restore", folder, code=130)
        assert not [path for path in contents_below(new.data_dir) if path.name != "lock"]
        done(new, "restore", folder)


def test_a_file_that_is_deleted_while_the_backup_runs_is_in_it_with_its_row(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and files are of one moment: what is deleted later is in the backup, what was deleted before is not."""
    folder, copy = tmp_path / "backup", backup_module.copy_rows

    def meanwhile(source: sa.Connection, target: sa.Connection) -> None:
        shutil.rmtree(installed.data_dir / "blobs")
        copy(source, target)

    monkeypatch.setattr(backup_module, "copy_rows", meanwhile)
    kept = {path.name: content for path, content in installed.files().items()}
    done(installed, "backup", folder)
    assert {path.name: one for path, one in contents_below(folder / "blobs").items()} == kept


def test_a_dataset_whose_row_and_file_go_while_the_backup_looks_is_not_in_it(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure: Callable[..., bool] = Backup._pin
    gone: list[str] = []

    def deleting(self: Backup, path: str, digest: str, pins: Path) -> bool:
        if not gone and path.startswith("datasets/"):
            gone.append(path)
            with self.source.database.write() as connection:
                table = tables.datasets
                connection.execute(sa.delete(table).where(table.c.blob == path))
            (self.source.data_dir / "blobs" / path).unlink()
        return secure(self, path, digest, pins)

    monkeypatch.setattr(Backup, "_pin", deleting)
    folder = tmp_path / "backup"
    done(installed, "backup", folder)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert gone[0] not in manifest.files
    assert not manifest.missing
    new = Installed(tmp_path / "new")
    shutil.copy(installed.data_dir / "master.key", new.data_dir)
    done(new, "restore", folder)
    done(new, "check")


def test_two_backups_at_the_same_time_are_refused(embedded: Installed, tmp_path: Path) -> None:
    with backup_format.only_one(embedded.data_dir / "blobs", "a test holds it"):
        assert "another backup" in failed(embedded, "backup", tmp_path / "backup")


def test_a_file_system_without_links_is_backed_up_too(
    embedded: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    assert "3 files copied" in done(embedded, "backup", tmp_path / "backup")


def test_check_names_what_is_missing_extra_changed_or_cannot_be_opened(
    installed: Installed, tmp_path: Path
) -> None:
    assert "3 datasets and models, " in done(installed, "check")
    blobs = installed.data_dir / "blobs"
    with installed.started() as opened:
        cut, lost, keyless, broken = (installed.add_dataset(opened) for _ in range(4))
        keys = tables.object_keys
        with opened.database.write() as connection:
            connection.execute(sa.delete(keys).where(keys.c.object_id == f"datasets/{keyless}"))
            change = sa.update(keys).where(keys.c.object_id == f"datasets/{broken}")
            connection.execute(change.values(wrapped=b"\0" * 60))
    (blobs / "datasets" / lost / "data.jsonl").unlink()
    file = blobs / "datasets" / cut / "data.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    (blobs / "models" / "ft_unknown").mkdir()
    result = installed.run(*CHECK)
    assert result.exit_code == 4
    assert result.stdout.splitlines() == sorted(
        [
            f"datasets/{cut}: data.jsonl is not the file that was stored",
            f"datasets/{lost}: data.jsonl is missing",
            f"datasets/{keyless}: its key is missing",
            f"datasets/{broken}: its key cannot be opened",
            "models/ft_unknown: there is no row that names it",
        ]
    )
    assert result.stderr == "tuneship: faults: 5\n"
    missing = failed(installed, "backup", tmp_path / "backup", code=4)
    assert "complete, except for 2 files of datasets or models, missing or damaged" in missing
    new = Installed(tmp_path / "new")
    shutil.copy(installed.data_dir / "master.key", new.data_dir)
    done(new, "restore", tmp_path / "backup")
    assert f"datasets/{lost}: data.jsonl is missing" in new.run(*CHECK).stdout


def test_a_stored_time_survives_the_way_through_a_backup(
    installed: Installed, tmp_path: Path
) -> None:
    with installed.started() as opened, opened.database.write() as connection:
        exact = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
        connection.execute(sa.update(tables.datasets).values(created_at=exact))
    done(installed, "backup", tmp_path / "backup")
    new = Installed(tmp_path / "new")
    done(new, "restore", tmp_path / "backup")
    database = Database(Sqlite(new.data_dir / "tuneship.sqlite").url)
    with database.read() as connection:
        assert set(connection.scalars(sa.select(tables.datasets.c.created_at))) == {exact}
    database.close()


def test_a_job_that_ran_when_the_backup_was_made_starts_over(tmp_path: Path) -> None:
    """No backup holds the checkpoints of a job."""
    with Service(tmp_path / "data") as service:
        job_id = service.job()
        trainer = service.trainer()
        trainer.start_of(3)
        trainer.step(1)
        trainer.step(2)
        path = f"/v1/fine-tuning/jobs/{job_id}"
        service.until(lambda: service.call("GET", path).json()["current_step"] == 2)
        service.halt()
    shutil.rmtree(tmp_path / "data" / "work")
    restored = Service(tmp_path / "data")
    recover(restored.parts, None)
    with restored:
        trainer = restored.trainer()
        trainer.start_of(3)
        for step in (1, 2, 3):
            trainer.step(step)
        trainer.complete()
        restored.until(lambda: restored.job_status(job_id) == "completed")
        assert restored.call("GET", f"{path}/metrics").json()["steps"] == [1, 2, 3]
