"""Uploads of other things than JSON Lines: what is sent, kept while it is sent, and left behind."""

import asyncio
import json
import os
import random
import resource
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.waiting import until
from tests.unit.client.both_clients import SETTINGS, both
from tests.unit.client.test_uploads import CREATED, FORM, Drain
from tuneship.client import ApiError, AsyncClient, Client, SourceError, records
from tuneship.contract.datasets import DatasetValidate

ROWS = [{"instruction": f"What is {n}?", "response": f"Ärztin {n}"} for n in range(3)]


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def file_of(request: httpx.Request) -> bytes:
    header = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    for part in message_from_bytes(header + request.read()).walk():
        if part.get_param("name", header="content-disposition") == "file":
            content = part.get_payload(decode=True)
            assert isinstance(content, bytes)
            return content
    raise AssertionError("no file")


def unnamed_files(folder: Path) -> list[os.stat_result]:
    """The open files that once were, or might have been, in a folder."""
    found: list[os.stat_result] = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            if str(one.readlink()).startswith(str(folder)):
                found.append(one.stat())
        except FileNotFoundError:
            continue
    return found


def test_rows_are_sent_as_json_lines() -> None:
    sent: list[bytes] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(file_of(request))
        return httpx.Response(201, json=CREATED)

    both(handle, lambda client: client.datasets.upload(FORM, iter(ROWS)))
    both(handle, lambda client: client.datasets.upload(FORM, file=ROWS))
    assert [[json.loads(line) for line in one.splitlines()] for one in sent] == [ROWS] * 4
    assert all("Ärztin".encode() in one for one in sent)


def test_columns_hold_for_a_validation_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("q,a\nx,y\n")
    form = DatasetValidate(format="instruction")
    sent: list[bytes] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(file_of(request))
        return httpx.Response(422, json={})

    with Client(SETTINGS, httpx.MockTransport(handle)) as client, pytest.raises(ApiError) as raised:
        client.datasets.validate(form, file, columns={"instruction": "q", "response": "a"})
    assert raised.value.status == 422
    assert sent == [b'{"instruction": "x", "response": "y"}\n']


def test_json_lines_are_sent_as_they_are(tmp_path: Path, temporary_folder: Path) -> None:
    file, content = tmp_path / "rows.jsonl", b'{"instruction":"a" }\nnot JSON\n'
    file.write_bytes(content)
    sent: list[bytes] = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert unnamed_files(temporary_folder) == []
        sent.append(file_of(request))
        return httpx.Response(201, json=CREATED)

    both(handle, lambda client: client.datasets.upload(FORM, file))
    both(handle, lambda client: client.datasets.upload(FORM, str(file)))
    assert sent == [content] * 4


def test_input_through_a_pipe_is_sent_as_it_is_and_can_be_sent_again() -> None:
    content, sent = b'{"instruction":"a" }\n' * 5000, list[bytes]()

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(file_of(request))
        failed = httpx.Response(503, headers={"Retry-After": "0.01"})
        return failed if len(sent) == 1 else httpx.Response(201, json=CREATED)

    reads, writes = os.pipe()
    writer = threading.Thread(target=lambda: Path(f"/proc/self/fd/{writes}").write_bytes(content))
    writer.start()
    with os.fdopen(reads, "rb") as pipe, Client(SETTINGS, httpx.MockTransport(handle)) as client:
        threading.Thread(target=lambda: (writer.join(), os.close(writes))).start()
        client.datasets.upload(FORM, pipe)
    assert sent == [content] * 2


def test_a_repeated_upload_sends_the_same_bytes_and_key_and_reads_the_rows_once(
    temporary_folder: Path,
) -> None:
    sent: list[tuple[str, bytes]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append((request.headers["idempotency-key"], file_of(request)))
        if len(sent) % 3:
            return httpx.Response(503, headers={"Retry-After": "0.01"})
        return httpx.Response(201, json=CREATED)

    reported: list[tuple[int, int]] = []

    def upload(client: Any) -> Any:
        watched = client.with_options(progress=lambda *place: reported.append(place))
        return watched.datasets.upload(FORM, (row for row in ROWS))

    both(handle, upload)
    assert sent[:3] == [sent[0]] * 3
    assert sent[3:] == [sent[3]] * 3
    assert sent[0][1] == sent[3][1]
    assert reported == [(len(sent[0][1]), len(sent[0][1]))] * 6
    assert list(temporary_folder.iterdir()) == unnamed_files(temporary_folder) == []


def test_the_rows_wait_in_a_file_that_has_no_name_and_one_reader(temporary_folder: Path) -> None:
    modes: list[int] = []

    def rows() -> Iterator[dict[str, str]]:
        yield from ROWS
        assert list(temporary_folder.iterdir()) == []
        modes.extend(one.st_mode & 0o777 for one in unnamed_files(temporary_folder))

    handle = httpx.MockTransport(lambda _: httpx.Response(201, json=CREATED))
    with Client(SETTINGS, handle) as client:
        client.datasets.upload(FORM, rows())
    assert modes == [0o600]


def test_nothing_is_sent_and_nothing_stays_when_a_row_is_bad(temporary_folder: Path) -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        raise AssertionError("something was sent")

    bad = [*ROWS[:2], {"instruction": 1j}]
    with (
        Client(SETTINGS, httpx.MockTransport(handle)) as client,
        pytest.raises(SourceError, match="row 3, instruction: is of type complex"),
    ):
        client.datasets.upload(FORM, bad)

    async def upload() -> None:
        async with AsyncClient(SETTINGS, httpx.MockTransport(handle)) as client:
            await client.datasets.upload(FORM, bad)

    with pytest.raises(SourceError, match="row 3"):
        asyncio.run(upload())
    assert list(temporary_folder.iterdir()) == unnamed_files(temporary_folder) == []


@pytest.mark.parametrize("count", [100, 5000], ids=["at the end", "on the way"])
def test_a_full_temporary_folder_is_reported(count: int) -> None:
    """Files may grow to a page only, for which the system's answers are those of a full disk."""
    rows, before = ROWS * count, resource.getrlimit(resource.RLIMIT_FSIZE)
    with Client(SETTINGS, httpx.MockTransport(lambda _: httpx.Response(500))) as client:
        # Only for the upload: pytest's own log may already be longer.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(SourceError, match="cannot be copied to the temporary folder"):
                client.datasets.upload(FORM, rows)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_source_that_cannot_be_read_is_blamed_and_not_the_copy(tmp_path: Path) -> None:
    unreadable = tmp_path / "rows.csv"
    unreadable.symlink_to("/proc/self/mem")  # it can be opened, and reading its first byte fails
    with (
        Client(SETTINGS, httpx.MockTransport(lambda _: httpx.Response(500))) as client,
        pytest.raises(SourceError, match=r"rows\.csv: cannot be read \(Input/output error\)"),
    ):
        client.datasets.upload(FORM, unreadable)


def test_a_cancelled_upload_ends_the_reading_of_its_rows(temporary_folder: Path) -> None:
    has_begun, is_over = threading.Event(), threading.Event()

    def endless() -> Iterator[dict[str, str]]:
        try:
            while True:
                yield ROWS[0]
                has_begun.set()
        finally:
            is_over.set()

    async def upload() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(201, json=CREATED))
        async with AsyncClient(SETTINGS, transport) as client:
            task = asyncio.create_task(client.datasets.upload(FORM, endless()))  # type: ignore[arg-type]
            await asyncio.to_thread(has_begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(upload())
    until(is_over.is_set)
    assert unnamed_files(temporary_folder) == []


def big_rows() -> Iterator[dict[str, str]]:
    dice = random.Random(1)  # noqa: S311 - only for tests
    for _ in range(2500):
        yield {name: dice.randbytes(2000).hex() for name in ("instruction", "response")}


def big_csv(folder: Path) -> Path:
    with (folder / "rows.csv").open("w") as opened:
        opened.write("instruction,response\n")
        opened.writelines(",".join(row.values()) + "\n" for row in big_rows())
    return folder / "rows.csv"


def big_parquet(folder: Path) -> Path:
    # Such text does not shrink, and one group holds all rows.
    pq.write_table(pa.Table.from_pylist(list(big_rows())), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("make", [big_csv, big_parquet, lambda _: big_rows()])
def test_rows_take_the_memory_of_a_few_of_them(make: Callable[[Path], Any], tmp_path: Path) -> None:
    source, drain = make(tmp_path), Drain()
    list(records(make(tmp_path)))  # which loads what is loaded when it is needed
    with Client(SETTINGS, drain) as client:
        tracemalloc.start()
        try:
            client.datasets.upload(FORM, source)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert drain.sent > 20_000_000
    assert peak < 4 << 20
