"""An upload counts against the bytes of its client while it arrives, through whichever door it comes."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.service.models.test_imports import send
from tests.support.models.conversion import ARCHIVE
from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.host import disk_space
from tuneship.service.context.context import Context
from tuneship.service.http import forms
from tuneship.store.files.blobs import STAGED

Start = Callable[..., Service]

QUOTA = 100_000
PIECE = 10_000


class Door(NamedTuple):
    """An operation that takes a file, the other fields of its form, and the answer to a good one."""

    path: str
    fields: dict[str, str]
    status: int


DATASETS = Door("/v1/datasets", {"name": "d", "format": "instruction"}, 201)
DOORS = {
    "datasets": DATASETS,
    "validations": Door("/v1/datasets/validate", {"format": "instruction"}, 200),
    "imports": Door("/v1/models", {"name": "m", "base_model": "tuneship-tiny"}, 201),
    "files": Door("/openai/v1/files", {"purpose": "batch"}, 200),
    "training files": Door("/openai/v1/files", {"purpose": "fine-tune"}, 200),
}
any_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


class Body:
    """The body of a form, which is made while it is read; it waits after `pause` bytes of its file until `may_end`."""

    def __init__(
        self, door: Door, content: bytes = b"", *, endless: bool = False, pause: int | None = None
    ) -> None:
        parts = [
            f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in door.fields.items()
        ]
        head = '--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
        self.head = ("".join(parts) + head).encode()
        self._content, self._endless = content, endless
        self._pause = len(content) if pause is None else pause
        self.sent = 0
        self.may_end = asyncio.Event()
        self.waits = False

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self.head
        while self._endless:
            self.sent += PIECE
            yield b"x" * PIECE
        first, rest = self._content[: self._pause], self._content[self._pause :]
        for start in range(0, len(first), PIECE):
            yield first[start : start + PIECE]
        self.waits = True
        await self.may_end.wait()
        yield rest + b"\r\n--b--\r\n"

    @property
    def length(self) -> int:
        return len(self.head) + len(self._content) + len(b"\r\n--b--\r\n")


def ask(
    service: Service, door: Door, body: Body, client: str = "alice", **headers: str
) -> Future[httpx.Response]:
    sent = {"Content-Type": "multipart/form-data; boundary=b", **headers}
    asking = service.ask("POST", door.path, client, content=body.pieces(), headers=sent)
    return asyncio.run_coroutine_threadsafe(asking, service.loop)


def end(service: Service, *bodies: Body) -> None:
    for body in bodies:
        service.loop.call_soon_threadsafe(body.may_end.set)


def upload(
    service: Service, door: Door, content: bytes, client: str = "alice", **headers: str
) -> httpx.Response:
    body = Body(door, content)
    body.may_end.set()
    return ask(service, door, body, client, **headers).result(60)


@contextlib.contextmanager
def opened(
    service: Service, content: bytes, door: Door = DATASETS, length: int | None = None
) -> Iterator[tuple[Body, Future[httpx.Response]]]:
    """An upload that has brought its whole file and does not end."""
    body = Body(door, content)
    headers = {} if length is None else {"Content-Length": str(length)}
    task = ask(service, door, body, **headers)
    service.until(lambda: body.waits)
    try:
        yield body, task
    finally:
        task.cancel()


def staged(service: Service) -> list[Path]:
    return list(service.settings.data_dir.rglob(f"{STAGED}*"))


def is_quota(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    assert answer.status_code == 429, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert error["message"] == f"the files of this client may hold {QUOTA} bytes in all"
    return error["code"] in ("quota_exceeded", "insufficient_quota")


def lines_of(size: int) -> bytes:
    """A dataset of exactly so many bytes."""
    line = json.dumps({"instruction": "a", "response": ""})
    return (
        json.dumps({"instruction": "a", "response": "b" * (size - len(line) - 1)}).encode() + b"\n"
    )


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each received block be parsed at once, so that small bodies do for large ones."""
    monkeypatch.setattr(forms, "BLOCK_BYTES", 1)


@any_door
def test_an_announced_length_beyond_the_quota_is_refused_before_the_body_is_read(
    start: Start, door: Door
) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    body = Body(door, endless=True)
    answer = ask(service, door, body, **{"Content-Length": "150000000"}).result(60)
    assert is_quota(answer)
    assert (body.sent, staged(service)) == (0, [])


@any_door
def test_an_upload_without_a_length_is_refused_as_soon_as_it_exceeds_the_quota(
    start: Start, door: Door
) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    body = Body(door, endless=True)
    assert is_quota(ask(service, door, body).result(60))
    assert body.sent <= QUOTA + 2 * PIECE
    assert staged(service) == []


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_file_that_fills_the_quota_exactly_is_stored(start: Start, is_announced: bool) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    for size, status in ((QUOTA + 1, 429), (QUOTA, 201), (40, 429)):
        body = Body(DATASETS, lines_of(size))
        body.may_end.set()
        headers = {"Content-Length": str(body.length)} if is_announced else {}
        answer = ask(service, DATASETS, body, **headers).result(60)
        assert answer.status_code == status, answer.text
    assert staged(service) == []


@any_door
def test_the_second_of_two_open_uploads_that_fit_only_singly_is_refused(
    start: Start, door: Door
) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    with opened(service, lines_of(60_000)) as (body, task):
        second = upload(service, door, lines_of(60_000))
        assert is_quota(second)
        assert len(staged(service)) == 1
        # Another tenant has a quota of its own.
        assert upload(service, DATASETS, lines_of(60_000), "bob").status_code == 201
        end(service, body)
        assert task.result(60).status_code == 201
    assert staged(service) == []


@any_door
def test_bytes_that_are_announced_count_before_they_come(
    start: Start, monkeypatch: pytest.MonkeyPatch, door: Door
) -> None:
    monkeypatch.setattr(forms, "FORM_BYTES", 1000)
    service = start(maximum_dataset_bytes=QUOTA)
    with opened(service, b"", door, 61_000):
        assert is_quota(upload(service, DATASETS, lines_of(60_000)))
        assert upload(service, DATASETS, lines_of(30_000)).status_code == 201
    service.until(lambda: staged(service) == [])
    assert upload(service, DATASETS, lines_of(70_000)).status_code == 201


def test_uploads_that_fill_the_quota_together_all_fit(start: Start) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    bodies = [Body(DATASETS, lines_of(QUOTA // 4)) for _ in range(4)]
    tasks = [ask(service, DATASETS, body) for body in bodies]
    end(service, *bodies)
    assert [task.result(60).status_code for task in tasks] == [201] * 4


@pytest.mark.parametrize("path", ["datasets", "files"])
def test_an_upload_that_was_just_stored_is_not_counted_twice(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    commit, second = Context.commit, list[httpx.Response]()

    def commit_and_go_on(context: Context) -> None:
        commit(context)
        monkeypatch.setattr(Context, "commit", commit)
        # The threads of uploads that are stored are all the first one's: a validation has others.
        second.append(upload(service, DOORS["validations"], lines_of(40_000)))

    monkeypatch.setattr(Context, "commit", commit_and_go_on)
    first = upload(service, DOORS[path], lines_of(40_000))
    assert (first.status_code, second[0].status_code) == (DOORS[path].status, 200)


def test_an_open_upload_sees_what_was_stored_since_it_began(start: Start) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    body = Body(DATASETS, lines_of(20_000), pause=10_000)
    task = ask(service, DATASETS, body)
    service.until(lambda: body.waits)
    assert upload(service, DATASETS, lines_of(85_000)).status_code == 201
    end(service, body)
    assert is_quota(task.result(60))
    assert staged(service) == []


@any_door
def test_a_caller_who_leaves_frees_the_room_of_the_upload(start: Start, door: Door) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    service.listen()
    with opened(service, b"x" * 60_000, door):
        # What the client has sent may still be on its way.
        counts = service.parts.staged_bytes
        service.until(lambda: sum(one.bytes for one in list(counts._open)) >= 60_000)
        assert is_quota(upload(service, DOORS["validations"], lines_of(60_000)))
    service.until(lambda: staged(service) == [])
    assert upload(service, DATASETS, lines_of(QUOTA)).status_code == 201


@any_door
def test_a_merge_that_open_uploads_leave_no_room_for_is_refused_before_it_copies(
    start: Start, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    sources = [service.dataset(content=lines_of(20_000)) for _ in range(2)]
    merge = {"dataset_ids": sources, "name": "m"}
    with opened(service, b"x" * 30_000, door), monkeypatch.context() as patched:
        patched.setattr("tuneship.service.datasets.merging._append", None)
        assert is_quota(service.call("POST", "/v1/datasets/merge", json=merge))
    service.until(lambda: staged(service) == [])
    assert service.call("POST", "/v1/datasets/merge", json=merge).status_code == 201


def test_an_import_counts_as_its_archive_while_it_arrives(start: Start) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    with opened(service, b"x" * (QUOTA - 1), DOORS["validations"]):
        assert is_quota(send(service))
    service.until(lambda: staged(service) == [])
    assert send(service, ARCHIVE).status_code == 201


def test_a_repeated_upload_gets_its_stored_answer_although_the_quota_is_used_up(
    start: Start,
) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    content = lines_of(QUOTA)
    key = {"Idempotency-Key": "up"}
    first = upload(service, DATASETS, content, **key)
    again = upload(service, DATASETS, content, **key)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json()["id"] == first.json()["id"]
    announced = {**key, "Content-Length": str(Body(DATASETS, content).length)}
    assert upload(service, DATASETS, content, **announced).json()["id"] == first.json()["id"]
    assert upload(service, DATASETS, lines_of(50_000), **key).status_code == 422
    assert is_quota(upload(service, DATASETS, content, **{"Idempotency-Key": "other"}))
    assert staged(service) == []


def test_a_numbered_try_gets_its_stored_answer_although_the_quota_is_used_up(start: Start) -> None:
    service = start(maximum_dataset_bytes=QUOTA)
    files, content = DOORS["files"], lines_of(QUOTA)
    tries = [{"x-stainless-retry-count": str(number)} for number in range(2)]
    made = [upload(service, files, content, **one) for one in tries]
    assert made[0].status_code == 200
    assert made[1].json()["id"] == made[0].json()["id"]
    assert is_quota(upload(service, files, content, **tries[0]))
    assert is_quota(upload(service, files, lines_of(QUOTA // 2), **tries[1]))
    assert staged(service) == []


class Disk:
    """A disk with so many free bytes above its floor."""

    def __init__(self, service: Service, free: int) -> None:
        self.total = 1 << 40
        self.free = free + service.settings.minimum_free_disk_bytes

    def usage(self, _: Any) -> Any:
        return shutil._ntuple_diskusage(self.total, 0, self.free)  # type: ignore[attr-defined]


@pytest.fixture
def disk(start: Start, monkeypatch: pytest.MonkeyPatch) -> tuple[Service, Disk]:
    service = start(minimum_free_disk_share=0)
    disk = Disk(service, 100 << 20)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", disk.usage)
    return service, disk


def test_the_disk_keeps_room_for_what_open_uploads_have_announced(
    disk: tuple[Service, Disk],
) -> None:
    service, _ = disk
    with opened(service, b"", length=60 << 20):
        refused, length = Body(DATASETS, endless=True), {"Content-Length": str(60 << 20)}
        answer = ask(service, DATASETS, refused, "bob", **length).result(60)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            503,
            "the disk is nearly full",
        )
        assert refused.sent == 0
        assert upload(service, DATASETS, jsonl(*LINES), "bob").status_code == 201


def test_an_announcement_alone_takes_no_more_of_the_disk_than_arrives_between_two_checks(
    disk: tuple[Service, Disk],
) -> None:
    service, room = disk
    room.free += 2 << 30
    with opened(service, b"", length=2 << 30):
        room.free -= 2 << 30
        assert upload(service, DATASETS, jsonl(*LINES), "bob").status_code == 201


def test_an_upload_that_meets_a_full_disk_ends_and_leaves_nothing(
    disk: tuple[Service, Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, room = disk
    monkeypatch.setattr(forms, "SPACE_CHECK_BYTES", 1)
    body = Body(DATASETS, b"x" * (3 * PIECE))
    task = ask(service, DATASETS, body)
    service.until(lambda: body.waits)
    room.free = 0
    end(service, body)
    assert task.result(60).status_code == 503
    endless = Body(DATASETS, endless=True)
    assert ask(service, DATASETS, endless).result(60).status_code == 503
    assert endless.sent == 0
    assert staged(service) == []
