"""An operator moves the files of the data directory to a bucket, and mistakes on the way are reported."""

import sys
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from tests.support.databases.installations import Installed
from tests.support.objects.object_server import ObjectServer


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    installation = Installed(tmp_path / "data")
    with installation.started() as opened:
        installation.add_model(opened)
        installation.add_dataset(opened)
    return installation


@pytest.fixture
def copy(installed: Installed, bucket: str, object_server: ObjectServer) -> Callable[[], None]:
    """Copy the files of the data directory to the bucket as `aws s3 sync` does."""

    def run() -> None:
        root = installed.data_dir / "blobs"
        for file in root.glob("*/*/*"):
            key = file.relative_to(root).as_posix()
            obstore.put(object_server.store(bucket), key, file.read_bytes())

    return run


@pytest.mark.slow
def test_the_files_are_copied_first_and_then_the_bucket_is_the_installations(
    installed: Installed, bucket: str, copy: Callable[[], None], tmp_path: Path
) -> None:
    installed.options["blob_url"] = bucket
    message = installed.refused()
    assert f"the database names 2 datasets and models, and {bucket} has none of them" in message
    assert "copy the files of the data directory there" in message
    copy()
    for _ in range(2):
        with installed.started() as opened:
            assert opened.blobs.is_remote
            assert len(opened.blobs.names()) == 2
    done = installed.run("check")
    assert done.exit_code == 0, done.output

    other = Installed(tmp_path / "other", blob_url=bucket)
    assert "belong to the installation" in other.refused()
    assert not (other.data_dir / "master.key").exists()


@pytest.mark.slow
def test_a_backup_names_what_is_missing_and_what_is_damaged_in_the_bucket(
    installed: Installed,
    bucket: str,
    copy: Callable[[], None],
    object_server: ObjectServer,
    tmp_path: Path,
) -> None:
    installed.options["blob_url"] = bucket
    copy()
    with installed.started():
        pass
    done = installed.run("backup", str(tmp_path / "backup"))
    assert (done.exit_code, "2 files copied" in done.stdout) == (0, True), done.output
    done = installed.run("backup", str(tmp_path / "backup"))
    assert (done.exit_code, "0 files copied" in done.stdout) == (0, True), done.output
    (kept,) = (tmp_path / "backup" / "blobs" / "datasets").glob("*/data.jsonl")
    content = kept.read_bytes()
    kept.write_bytes(b"x" * len(content))  # a damage that the size does not show
    done = installed.run("backup", "--verify", str(tmp_path / "backup"))
    assert (done.exit_code, "1 file copied" in done.stdout) == (0, True), done.output
    assert kept.read_bytes() == content
    store = object_server.store(bucket)
    (model,) = [one for one in object_server.objects(bucket) if one.startswith("models/")]
    (dataset,) = [one for one in object_server.objects(bucket) if one.startswith("datasets/")]
    obstore.put(store, model, b"something else")
    obstore.delete(store, dataset)
    done = installed.run("backup", str(tmp_path / "another"))
    assert (done.exit_code, "2 files of datasets or models, missing" in done.stderr) == (
        4,
        True,
    )
    done = installed.run("check")
    assert done.exit_code == 4
    assert f"{model.rpartition('/')[0]}: adapter.bin is not the file that was stored" in done.stdout
    assert f"{dataset.rpartition('/')[0]}: data.jsonl is missing" in done.stdout


def test_without_the_library_the_extra_is_named(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tuneship.store.files.object_blobs", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    installed.options["blob_url"] = "s3://bucket/1"
    assert "pip install 'tuneship[objects]'" in installed.refused()
