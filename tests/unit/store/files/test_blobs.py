"""The promises of both stores of files, and what a bucket adds: a mark, local copies, failures without addresses."""

import hashlib
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import obstore
import pytest

from tests.support.objects.object_server import READER, ObjectServer
from tests.support.waiting import until
from tuneship.host.file_digest import sha256_of
from tuneship.security.sealed_files import read_plain
from tuneship.settings import ServiceSettings
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.files.blob_cache import BlobCache
from tuneship.store.files.blobs import (
    STAGED,
    Blobs,
    BlobsAway,
    FileDamaged,
    ObjectRef,
    StoreRefused,
)
from tuneship.store.files.local_blobs import LocalBlobs
from tuneship.store.files.open_blobs import blobs_of

REAL = (pytest.mark.slow, pytest.mark.essential)
FORMS = ("local", pytest.param("objects", marks=REAL))
Store = Callable[..., Blobs]
# Bytes for an upload in several parts.
PARTS = b"0123456789abcdef" * (1 << 20)


@pytest.fixture(params=FORMS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ServiceSettings:
    url = "" if request.param == "local" else request.getfixturevalue("bucket")
    return ServiceSettings(data_dir=tmp_path / "data", blob_url=url)


@pytest.fixture
def blobs(settings: ServiceSettings) -> Blobs:
    return blobs_of(settings)


def put(blobs: Blobs, folder: Path, key: str = "models/ft_1/weights", content: bytes = b"w") -> str:
    """Store a plain file, and return its digest."""
    file = folder / "file"
    file.write_bytes(content)
    return blobs.put(file, key)


def test_a_file_is_at_its_key_only_when_it_is_whole(
    blobs: Blobs, settings: ServiceSettings
) -> None:
    with blobs.staged() as staged:
        staged.write(b"half")
        assert blobs.names() == set()
        staged.write(b" and half")
        blobs.keep(staged, "datasets/ds_1/data.jsonl")
    ref = ObjectRef("datasets/ds_1", {"data.jsonl": staged.sha256})
    with blobs.fetched(ref, is_checked=True) as folder:
        path = folder / "data.jsonl"
        assert folder == blobs.path_of(ref.prefix)
        assert b"half" not in path.read_bytes()
        assert read_plain(path, staged.key) == b"half and half"
    assert blobs.digest_of("datasets/ds_1/data.jsonl") == staged.sha256
    assert staged.content_sha256 == hashlib.sha256(b"half and half").hexdigest()
    assert list(settings.data_dir.rglob(f"{STAGED}*")) == []
    assert blobs.names() == {"datasets/ds_1"}
    assert blobs.has_any(["datasets/ds_1", "datasets/ds_2"])
    blobs.delete("datasets/ds_1")
    blobs.delete("datasets/ds_1")
    assert blobs.names() == set()
    assert not blobs.has_any(["datasets/ds_1"])
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"small", PARTS], ids=["empty", "small", "in parts"])
def test_a_stored_blob_comes_back(blobs: Blobs, tmp_path: Path, content: bytes) -> None:
    digest = put(blobs, tmp_path, content=content)
    assert digest == hashlib.sha256(content).hexdigest() == blobs.digest_of("models/ft_1/weights")
    for _ in range(2):
        with blobs.fetched(ObjectRef("models/ft_1", {"weights": digest})) as folder:
            assert sha256_of(folder / "weights") == digest
    target = tmp_path / "copy"
    assert blobs.copy_out("models/ft_1/weights", target)
    assert sha256_of(target) == digest
    assert not blobs.copy_out("models/ft_1/nothing", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        blobs.digest_of("models/ft_1/nothing")


def test_a_missing_file_and_a_damaged_one_are_distinguished(blobs: Blobs, tmp_path: Path) -> None:
    digest = put(blobs, tmp_path)
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(FileDamaged) as caught, blobs.fetched(
        ObjectRef("models/ft_1", {"weights": other}), is_checked=True
    ):  # fmt: skip
        pass
    assert caught.value.name == "weights"
    with pytest.raises(FileNotFoundError), blobs.fetched(
        ObjectRef("models/ft_2", {"weights": digest}), is_checked=True
    ):  # fmt: skip
        pass


def test_no_file_is_fetched_inside_a_write_transaction(blobs: Blobs, tmp_path: Path) -> None:
    ref = ObjectRef("models/ft_1", {"weights": put(blobs, tmp_path)})
    database = Database(sqlite_url(tmp_path / "db.sqlite"))
    with database.write(), pytest.raises(AssertionError, match="before"), blobs.fetched(ref):
        pass
    with database.read(), blobs.fetched(ref):
        pass
    database.close()


def test_old_blobs_are_set_aside_and_young_ones_are_not(
    blobs: Blobs, stored_files: Callable[[], set[str]], tmp_path: Path
) -> None:
    put(blobs, tmp_path, "models/ft_1/weights")
    put(blobs, tmp_path, "datasets/ds_1/data.jsonl")
    now = datetime.now(UTC)
    assert blobs.older_than(now - timedelta(hours=24)) == set()
    assert blobs.older_than(now + timedelta(hours=1)) == {"models/ft_1", "datasets/ds_1"}
    assert blobs.set_aside([], now) is None
    place = blobs.set_aside(["models/ft_1"], now)
    assert place is not None
    assert "set-aside/" in place
    assert blobs.names() == {"datasets/ds_1"}
    assert any(
        one.startswith("set-aside/") and one.endswith("/ft_1/weights") for one in stored_files()
    )


@pytest.fixture
def stored_files(
    settings: ServiceSettings, request: pytest.FixtureRequest
) -> Callable[[], set[str]]:
    """Return a function that names every file of the store, including those that are set aside."""
    if settings.blob_url:
        server = request.getfixturevalue("object_server")
        return lambda: server.objects(settings.blob_url)
    root = settings.data_dir
    return lambda: {str(one.relative_to(root)) for one in root.rglob("*") if one.is_file()}


def test_a_killed_upload_leaves_nothing_that_anybody_sees(
    blobs: Blobs, settings: ServiceSettings, tmp_path: Path
) -> None:
    """The process dies in the middle of reading the file, when some parts of it are stored already."""
    file = tmp_path / "file"
    file.write_bytes(PARTS)
    program = f"""
import hashlib, os, signal
from pathlib import Path
from tuneship.settings import ServiceSettings
from tuneship.store.files.open_blobs import blobs_of
blobs = blobs_of(ServiceSettings(data_dir=Path({str(settings.data_dir)!r}), blob_url={settings.blob_url!r}))
class Deadly:
    left = 12 << 20
    def update(self, block):
        Deadly.left -= len(block)
        if Deadly.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
hashlib.sha256 = Deadly
blobs.put(Path({str(file)!r}), "models/ft_1/weights")
"""
    run = subprocess.run([sys.executable, "-c", program], check=False)
    assert run.returncode == -9
    assert blobs.names() == set()
    blobs.sweep()
    assert list(settings.data_dir.rglob(f"{STAGED}*")) == []


def test_a_killed_writer_leaves_no_final_name_and_its_rest_is_swept(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tuneship.store.files.local_blobs import LocalBlobs
blobs = LocalBlobs(Path({str(tmp_path)!r}))
with blobs.staged() as staged:
    staged.write(b"x" * 100000)
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    blobs.keep(staged, "datasets/ds_1/data")
"""
    run = subprocess.run([sys.executable, "-c", program], check=False)
    assert run.returncode == -9
    blobs = LocalBlobs(tmp_path)
    assert blobs.names() == set()
    assert list((tmp_path / "scratch").iterdir()) != []
    blobs.sweep()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_disk_that_takes_a_part_of_a_block_keeps_no_part_of_a_file(tmp_path: Path) -> None:
    """Only half of the file's last block fits, which the system call does not report as an error."""
    blobs = LocalBlobs(tmp_path)
    file = tmp_path / "adapter"
    file.write_bytes(b"x" * 70_000)
    cache = BlobCache(tmp_path, 1 << 30)
    ref = ObjectRef("models/ft_1", {"adapter": sha256_of(file)})
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def stage() -> None:
        with blobs.staged() as staged:
            staged.write(file.read_bytes())
            blobs.keep(staged, "datasets/ds_1/data.jsonl")

    def copy() -> None:
        with cache.held(ref, lambda _, target: target.write(file.read_bytes()), is_checked=False):  # type: ignore[arg-type, return-value]
            pass

    resource.setrlimit(resource.RLIMIT_FSIZE, (68_000, most[1]))
    try:
        for work in (lambda: blobs.put(file, "models/ft_1/adapter"), stage, copy):
            with pytest.raises(OSError, match="large"):
                work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert blobs.names() == set()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert blobs.put(file, "models/ft_1/adapter") == sha256_of(file)


class Downloads:
    """Counts downloads, and holds them back while `may_end` is cleared."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.asked: list[str] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def ref(self, name: str) -> ObjectRef:
        return ObjectRef(f"models/{name}", {"w": hashlib.sha256(self.files[name]).hexdigest()})

    def __call__(self, key: str, file: object) -> None:
        self.asked.append(key.split("/")[1])
        self.may_end.wait(60)
        file.write(self.files[key.split("/")[1]])  # type: ignore[attr-defined]


def use(cache: BlobCache, downloads: Downloads, name: str, *, is_checked: bool = False) -> bytes:
    with cache.held(downloads.ref(name), downloads, is_checked=is_checked) as folder:
        return (folder / "w").read_bytes()


def test_the_cache_keeps_to_its_bound_and_forgets_what_was_used_the_longest_ago(
    tmp_path: Path,
) -> None:
    downloads = Downloads(**{name: name.encode() * 40 for name in "abcd"})
    cache = BlobCache(tmp_path, 120)
    for name in "abcabdab":
        assert use(cache, downloads, name) == downloads.files[name]
        kept = [one.stat().st_size for one in cache.root.glob("*/*/*")]
        assert sum(kept) <= 120
    assert downloads.asked == ["a", "b", "c", "d"]
    assert use(cache, downloads, "c")
    assert downloads.asked[4:] == ["c"], "c was used the longest ago when d came"
    assert sorted(one.name for one in (cache.root / "models").iterdir()) == ["a", "b", "c"]


def test_a_file_in_use_stays_even_beyond_the_bound(tmp_path: Path) -> None:
    downloads = Downloads(a=b"a" * 40, b=b"b" * 40)
    cache, other = BlobCache(tmp_path, 50), BlobCache(tmp_path, 50)
    with cache.held(downloads.ref("a"), downloads, is_checked=False) as folder:
        assert use(other, downloads, "b") == b"b" * 40
        assert (folder / "w").read_bytes() == b"a" * 40
    other.sweep()
    assert use(cache, downloads, "b") == b"b" * 40
    assert downloads.asked == ["a", "b"]


def test_threads_that_want_the_same_file_download_it_once(tmp_path: Path) -> None:
    downloads, cache = Downloads(a=b"a" * 40), BlobCache(tmp_path, 1000)
    downloads.may_end.clear()
    with ThreadPoolExecutor(4) as pool:
        wanted = [pool.submit(use, cache, downloads, "a") for _ in range(4)]
        threading.Timer(0.2, downloads.may_end.set).start()
        assert {one.result(60) for one in wanted} == {b"a" * 40}
    assert downloads.asked == ["a"]


def test_a_damaged_copy_is_found_where_it_matters_and_downloaded_again(tmp_path: Path) -> None:
    downloads, cache = Downloads(a=b"a" * 40), BlobCache(tmp_path, 1000)
    use(cache, downloads, "a")
    (cache.root / "models" / "a" / "w").write_bytes(b"b" * 40)
    assert use(cache, downloads, "a", is_checked=True) == b"a" * 40
    assert downloads.asked == ["a", "a"]


def test_a_killed_download_is_swept_and_a_running_one_is_not(tmp_path: Path) -> None:
    downloads, cache = Downloads(a=b"a" * 40), BlobCache(tmp_path, 1000)
    left = tmp_path / "cache" / "incoming" / ".staged-left"
    left.write_bytes(b"half")
    downloads.may_end.clear()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(use, cache, downloads, "a")
        until(lambda: downloads.asked)
        BlobCache(tmp_path, 1000).sweep()
        downloads.may_end.set()
        assert running.result(60) == b"a" * 40
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.essential
class TestBucket:
    """Tests of faults that only a bucket can have."""

    def test_an_object_that_somebody_changed_is_damaged_and_not_kept(
        self, bucket: str, object_server: ObjectServer, tmp_path: Path
    ) -> None:
        blobs = blobs_of(ServiceSettings(data_dir=tmp_path / "data", blob_url=bucket))
        ref = ObjectRef("models/ft_1", {"weights": put(blobs, tmp_path)})
        obstore.put(object_server.store(bucket), "models/ft_1/weights", b"x")
        for _ in range(2):
            with pytest.raises(FileDamaged), blobs.fetched(ref):
                pass
        assert list(blobs.path_of("models").rglob("*/*")) == []

    def test_it_belongs_to_one_installation(self, bucket: str, tmp_path: Path) -> None:
        one, two = (
            blobs_of(ServiceSettings(data_dir=tmp_path / name, blob_url=bucket))
            for name in ("one", "two")
        )
        for _ in range(2):
            one.check("db_one")
            one.claim("db_one", [])
        for refused in (lambda: two.check("db_two"), lambda: two.check(None),
                        lambda: two.claim("db_two", [])):  # fmt: skip
            with pytest.raises(StoreRefused, match=f"{bucket} belong to the installation db_one"):
                refused()

    def test_files_of_nobody_known_are_not_taken_over(
        self, bucket: str, object_server: ObjectServer, tmp_path: Path
    ) -> None:
        obstore.put(object_server.store(bucket), "datasets/cats/data.jsonl", b"somebody's")
        blobs = blobs_of(ServiceSettings(data_dir=tmp_path, blob_url=bucket))
        with pytest.raises(StoreRefused, match="holds 1 dataset or model"):
            blobs.claim("db_one", [])
        blobs.claim("db_one", ["datasets/cats"])
        assert "tuneship-installation" in object_server.objects(bucket)

    def test_one_that_cannot_be_written_is_refused_and_nothing_is_left(
        self,
        bucket: str,
        object_server: ObjectServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
        blobs = blobs_of(ServiceSettings(data_dir=tmp_path, blob_url=bucket))
        with pytest.raises(StoreRefused, match="cannot be kept") as caught:
            blobs.check("db_one")
        assert "AccessDenied" in str(caught.value)
        assert object_server.address not in str(caught.value)
        assert object_server.objects(bucket) == set()

    @pytest.mark.usefixtures("bucket")
    def test_a_bucket_that_is_gone_is_no_missing_file(self, tmp_path: Path) -> None:
        url = "s3://never-made/1"
        blobs = blobs_of(ServiceSettings(data_dir=tmp_path, blob_url=url))
        with pytest.raises(BlobsAway, match="NoSuchBucket"), blobs.fetched(
            ObjectRef("models/ft_1", {"weights": "0"})
        ):  # fmt: skip
            pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "still"])
def test_one_that_does_not_answer_is_away_soon_and_its_address_is_not_said(
    bucket: str,
    object_server: ObjectServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    blobs = blobs_of(ServiceSettings(data_dir=tmp_path / "data", blob_url=bucket))
    digest = put(blobs, tmp_path)
    end, go_on = (
        (object_server.stop, object_server.start)
        if how == "gone"
        else (object_server.hold_still, object_server.go_on)
    )
    end()
    try:
        begun = datetime.now(UTC)
        with caplog.at_level(logging.DEBUG), pytest.raises(BlobsAway) as caught:
            blobs.digest_of("models/ft_1/weights")
        # The library would try for three minutes by itself.
        assert datetime.now(UTC) - begun < timedelta(seconds=60)
        with pytest.raises(StoreRefused, match="cannot be kept"):
            blobs.check("db_one")
    finally:
        go_on()
    assert object_server.address not in caplog.text + repr(caught.value)
    assert caught.value.__cause__ is None
    with blobs.fetched(ObjectRef("models/ft_1", {"weights": digest})) as folder:
        assert (folder / "weights").read_bytes() == b"w"


@pytest.mark.parametrize(
    "url",
    ["s3://key:word@bucket/p", "s3://bucket/p?secret=word", "s3://", "bucket", "file:///word", "http://word"],
)  # fmt: skip
def test_a_url_with_a_password_or_of_another_kind_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="blob_url must") as caught:
        ServiceSettings(blob_url=url)
    assert "word" not in str(caught.value).split("[type=")[0]


def test_workers_read_below_the_folder_that_is_kept(
    settings: ServiceSettings, blobs: Blobs
) -> None:
    from tuneship.service.access.isolation import worker_folder

    folder = worker_folder(settings, "models")
    assert blobs.path_of("models/ft_1").parent == folder
    assert os.access(folder, os.R_OK)
