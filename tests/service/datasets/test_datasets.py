"""The life of a dataset, from the first byte of its upload to its deletion."""

import asyncio
import json
import shutil
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import sqlalchemy as sa

from tests.support.objects.files import paths_below
from tests.support.service.in_process import LINES, Service, jsonl
from tests.support.service.processes import Serve
from tests.support.waiting import until
from tuneship.contract.datasets import DatasetUpload
from tuneship.host.file_digest import sha256_of
from tuneship.security.sealed_files import read_plain
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.service.context.request_slots import InFlightLimits, RequestSlots
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.store.database import tables

pytestmark = pytest.mark.both_databases(postgres="soak")
Start = Callable[..., Service]
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}
SECRET = "the patient's own words"


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def send(service: Service, *parts: bytes, end: bytes = b"--b--\r\n", **options: Any) -> Any:
    headers = {"Content-Type": "multipart/form-data; boundary=b"} | options
    body = b"".join(parts) + end
    return service.call("POST", "/v1/datasets", headers=headers, content=body)


def get(service: Service, dataset_id: str) -> dict[str, Any]:
    return service.call("GET", f"/v1/datasets/{dataset_id}").json()


def merge(service: Service, *sources: str) -> httpx.Response:
    body = {"dataset_ids": list(sources), "name": "merged"}
    return service.call("POST", "/v1/datasets/merge", json=body)


def blob(service: Service, dataset_id: str) -> Path:
    return service.parts.blobs.path_of(f"datasets/{dataset_id}") / "data.jsonl"


def stored(service: Service, dataset_id: str) -> bytes:
    """The content of the stored file, decrypted with its key."""
    with service.database.read() as connection:
        key = service.parts.keyring.find(connection, "alice", f"datasets/{dataset_id}")
    assert key is not None
    return read_plain(blob(service, dataset_id), key)


def kept_files(service: Service) -> list[Path]:
    roots = (service.settings.data_dir / name for name in ("blobs", "scratch"))
    return [path for root in roots for path in sorted(paths_below(root)) if path.is_file()]


def dataset_events(service: Service, dataset_id: str) -> list[str]:
    table = tables.events
    query = sa.select(table.c.type).where(table.c.resource_id == dataset_id)
    with service.database.read() as connection:
        return list(connection.scalars(query.order_by(table.c.sequence)))


def processed(service: Service, dataset_id: str) -> dict[str, Any]:
    service.until(lambda: get(service, dataset_id)["status"] != "processing")
    return get(service, dataset_id)


# Forms.


def test_the_parts_of_a_form_may_come_in_any_order(shared: Service) -> None:
    content = jsonl(*LINES)
    file = part("file", content, '; filename="../../x"')
    name, layout = part("name", b"n"), part("format", b"instruction")
    datasets = [
        send(shared, *order).json() for order in ([file, name, layout], [layout, name, file])
    ]
    assert [one["num_examples"] for one in datasets] == [len(LINES)] * 2
    assert [stored(shared, one["id"]) for one in datasets] == [content] * 2


def test_a_file_part_needs_no_file_name(shared: Service) -> None:
    answer = send(
        shared,
        part("file", jsonl(*LINES)),
        part("name", b"n"),
        part("format", b"instruction"),
    )
    assert answer.status_code == 201


@pytest.mark.parametrize(
    "media",
    [
        "application/jsonl",
        "Application/X-NDJSON",
        "application/octet-stream",
        "text/plain;charset=x",
    ],
)
def test_a_file_may_say_what_it_is_in_several_ways(shared: Service, media: str) -> None:
    form = {"name": "n", "format": "instruction"}
    files = {"file": ("x", jsonl(*LINES), media)}
    assert shared.call("POST", "/v1/datasets", data=form, files=files).status_code == 201


def test_a_boundary_within_the_file_does_not_end_it(shared: Service) -> None:
    line = {"instruction": "--b-- and \r\n--b and --b", "response": "--b"}
    content = jsonl(line, line)
    answer = send(shared, part("file", content), part("name", b"n"), part("format", b"instruction"))
    assert stored(shared, answer.json()["id"]) == content


def test_the_same_upload_with_another_boundary_is_a_replay(service: Service) -> None:
    def upload(boundary: str, content: bytes) -> httpx.Response:
        parts = (part("file", content), part("name", b"n"), part("format", b"instruction"))
        body = b"".join((*parts, b"--b--\r\n")).replace(b"--b", b"--" + boundary.encode())
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Idempotency-Key": "k",
        }
        return service.call("POST", "/v1/datasets", headers=headers, content=body)

    first, again = (upload(boundary, jsonl(*LINES)) for boundary in ("one", "another"))
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert upload("one", jsonl(*LINES[1:])).status_code == 422


def test_an_upload_that_breaks_off_leaves_nothing(service: Service) -> None:
    service.listen()
    before = kept_files(service)
    address = urlsplit(service.url)
    head = "".join(f"{name}: {value}\r\n" for name, value in service.headers["alice"].items())
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
        connection.sendall(
            f"POST /v1/datasets HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n{head}"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode()
            + part("name", b"n")
            + part("file", jsonl(*LINES) * 9000)[:-2]
        )
        service.until(lambda: len(kept_files(service)) > len(before))
    service.until(lambda: kept_files(service) == before)
    assert service.call("GET", "/v1/datasets").json()["datasets"] == []
    assert service.dataset()


def test_a_client_has_few_uploads_in_flight(service: Service) -> None:
    service.limit(slots=RequestSlots(uploads=InFlightLimits(each=1, together=2)))
    whole = part("name", b"n") + part("format", b"instruction") + part("file", jsonl(*LINES))
    form = {"data": {"format": "instruction"}, "files": {"file": ("x", jsonl(*LINES))}}

    async def upload() -> list[httpx.Response]:
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            has_begun.set()
            await may_end.wait()
            yield whole + b"--b--\r\n"

        media = {"Content-Type": "multipart/form-data; boundary=b"}
        slow = service.ask("POST", "/v1/datasets", headers=media, content=body())
        in_flight = asyncio.create_task(slow)
        await has_begun.wait()
        others = [
            await service.ask("POST", "/v1/datasets/validate", client, **form)
            for client in ("alice", "bob")
        ]
        may_end.set()
        return [*others, await in_flight]

    mine, theirs, slow = service.run(upload())
    assert [one.status_code for one in (mine, theirs, slow)] == [429, 200, 201]
    assert mine.json()["error"]["code"] == "rate_limit_exceeded"
    assert (mine.headers["retry-after"], mine.headers["x-should-retry"]) == ("1", "true")


def test_a_full_disk_is_503_for_whatever_would_fill_it(service: Service) -> None:
    sources = [service.dataset(), service.dataset()]
    before = kept_files(service)
    service.settings.minimum_free_disk_bytes = 1 << 60
    form = {"name": "n", "format": "instruction"}
    for path in ("/v1/datasets", "/v1/datasets/validate"):
        answer = service.call("POST", path, data=form, files={"file": ("x", jsonl(*LINES))})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "internal_error")
        assert int(answer.headers["retry-after"]) >= 1
    assert merge(service, *sources).status_code == 503
    assert kept_files(service) == before
    assert service.call("GET", "/v1/datasets").status_code == 200


# Big files.


def test_a_big_file_is_processed_after_the_answer(start: Start) -> None:
    service = start(inline_dataset_bytes=10)
    service.rest()
    content = jsonl({**LINES[0], "note": "x"}, *LINES[1:])
    dataset = service.dataset(content=content)
    record = get(service, dataset)
    assert (record["status"], record["num_examples"], record["total_tokens"]) == (
        "processing",
        0,
        0,
    )
    body = {"base_model": "tuneship-tiny", "model_name": "m", "dataset_id": dataset}
    refused = service.call("POST", "/v1/fine-tuning/jobs", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_error")
    assert merge(service, dataset, dataset).status_code == 422
    service.go_on()
    record = processed(service, dataset)
    report = service.validate(jsonl(*LINES))
    assert (record["status"], record["num_examples"]) == ("processed", len(LINES))
    assert record["token_distribution"] == report["token_distribution"]
    assert "error" not in record
    assert record["suggestions"] == ["`note` in 1 line is ignored."]
    assert dataset_events(service, dataset) == ["dataset.uploaded", "dataset.processed"]
    assert service.call("POST", "/v1/fine-tuning/jobs", json=body).status_code == 201


def test_tenants_take_turns_with_their_big_files(start: Start) -> None:
    service = start(inline_dataset_bytes=10)
    service.rest()
    owners = {service.dataset(client): client for client in ("alice", "alice", "alice", "bob")}
    parts, order = service.parts, list[str]()
    processing = DatasetProcessing(
        database=parts.database,
        blobs=parts.blobs,
        keyring=parts.keyring,
        catalogue=parts.catalogue,
        clock=parts.clock,
    )
    while processing._process_next():
        states = {
            one: service.call("GET", f"/v1/datasets/{one}", client).json()["status"]
            for one, client in owners.items()
        }
        order += [owners.pop(one) for one, status in states.items() if status == "processed"]
    assert order == ["alice", "bob", "alice", "alice"]


def test_a_big_bad_file_fails_with_the_report(start: Start) -> None:
    service = start(inline_dataset_bytes=10)
    dataset = service.dataset(content=jsonl(*LINES, {"instruction": SECRET}))
    record = processed(service, dataset)
    assert (record["status"], record["error"]["code"]) == ("failed", "dataset_error")
    problem = {"line": 5, "field": "response", "code": "missing_field", "message": "is required"}
    assert record["error"]["details"] == [problem]
    assert SECRET not in json.dumps(record)
    assert dataset_events(service, dataset) == ["dataset.uploaded", "dataset.failed"]
    assert "error" not in service.call("GET", "/v1/datasets").json()["datasets"][0]
    refused = merge(service, dataset, service.dataset())
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_error")


def test_a_dataset_that_is_processing_may_be_deleted(start: Start) -> None:
    service = start(inline_dataset_bytes=10)
    service.rest()
    deleted, kept = service.dataset(), service.dataset()
    assert service.call("DELETE", f"/v1/datasets/{deleted}").status_code == 200
    service.go_on()
    assert processed(service, kept)["status"] == "processed"
    assert dataset_events(service, deleted) == ["dataset.uploaded"]


def test_a_stored_file_that_is_gone_is_a_failure_of_the_service(start: Start) -> None:
    service = start(inline_dataset_bytes=10)
    service.rest()
    dataset = service.dataset()
    blob(service, dataset).unlink()
    service.go_on()
    assert processed(service, dataset)["error"]["code"] == "internal_error"


def test_a_dataset_that_is_processing_counts_against_the_quota(start: Start) -> None:
    service = start(inline_dataset_bytes=10, maximum_datasets=1)
    service.rest()
    service.dataset()
    before = kept_files(service)
    form = {"name": "n", "format": "instruction"}
    refused = service.call("POST", "/v1/datasets", data=form, files={"file": ("x", jsonl(*LINES))})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert kept_files(service) == before


# Merge and delete.


def test_a_merge_keeps_order_and_everything_and_counts_what_repeats(service: Service) -> None:
    one = service.dataset(content=b"\xef\xbb\xbf" + jsonl(*LINES))
    two = service.dataset(content=jsonl(LINES[2], {"instruction": "new", "response": "x"})[:-1])
    answer = merge(service, two, one)
    merged = answer.json()
    assert answer.status_code == 201
    assert merged["source_datasets"] == [two, one]
    assert (merged["num_examples"], merged["duplicate_examples"]) == (len(LINES) + 2, 1)
    new = {"instruction": "new", "response": "x"}
    assert stored(service, merged["id"]) == jsonl(LINES[2], new, *LINES)
    whole = [get(service, dataset_id) for dataset_id in (one, two, merged["id"])]
    assert whole[0]["total_tokens"] + whole[1]["total_tokens"] == whole[2]["total_tokens"]
    assert whole[2]["duplicate_examples"] == 1
    assert "duplicate_examples" not in whole[0]
    for source in (one, two):
        assert service.call("DELETE", f"/v1/datasets/{source}").status_code == 200
    assert merge(service, merged["id"], service.dataset()).status_code == 201


def test_a_big_merge_is_processed_after_the_answer_with_the_sums_of_its_sources(
    start: Start,
) -> None:
    service = start()
    sources = [service.dataset(), service.dataset()]
    service.settings.inline_dataset_bytes = 10
    service.rest()
    merged = merge(service, *sources).json()
    assert (merged["status"], merged["num_examples"]) == ("processing", 2 * len(LINES))
    assert "duplicate_examples" not in merged
    service.go_on()
    record = processed(service, merged["id"])
    assert (record["status"], record["duplicate_examples"]) == ("processed", len(LINES))
    assert record["total_tokens"] == merged["total_tokens"] > 0


def other_catalogue(service: Service, folder: Path) -> Path:
    """Add a second base model, whose tokenizer cuts between every two characters, and return its catalogue."""
    base = folder / "letters"
    base.mkdir()
    for file in service.parts.catalogue.default.path.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    catalogue = folder / "catalogue.yaml"
    catalogue.write_text(json.dumps({"models": [{"id": "letters", "path": "letters"}]}))
    return catalogue


def test_the_tokenizer_of_another_base_model_counts_where_it_is_named(
    shared: Service, start: Start, tmp_path: Path
) -> None:
    service = start(model_catalogue=other_catalogue(shared, tmp_path))
    usual = service.dataset()
    letters = service.dataset(base_model="letters")
    records = {name: get(service, name) for name in (usual, letters)}
    assert [records[name]["tokenizer"] for name in (usual, letters)] == ["tuneship-tiny", "letters"]
    assert records[letters]["total_tokens"] > records[usual]["total_tokens"]
    assert (
        service.validate(jsonl(*LINES), base_model="letters")["total_tokens"]
        == (records[letters]["total_tokens"])
    )
    merged = merge(service, letters, usual).json()
    assert merged["tokenizer"] == "letters"
    assert merged["total_tokens"] == 2 * records[letters]["total_tokens"]


def test_lines_that_the_template_of_a_named_base_model_refuses_are_errors(
    shared: Service, start: Start, tmp_path: Path
) -> None:
    catalogue = other_catalogue(shared, tmp_path)
    # As SmolLM2's it asks for the first turn, which an answer at the very beginning has not before it.
    strict = """{%- if messages[0]['role'] != 'system' -%}be kind{%- endif -%}
        {%- for message in messages -%}
        {%- if message.role == 'system' and not loop.first -%}{{ raise_exception(message.content) }}{%- endif -%}
        {{ message.content + '|' }}
        {%- endfor -%}"""
    (tmp_path / "letters" / "chat_template.jinja").write_text(strict)
    service = start(model_catalogue=catalogue)
    user, answer = TALK["messages"]
    lines = [
        TALK,
        {"messages": [answer, user, answer]},
        {"messages": [user, answer, {"role": "system", "content": SECRET}, user, answer]},
    ]
    report = service.validate(jsonl(*lines), format="conversation", base_model="letters")
    found = [(one["line"], one["field"], one["code"]) for one in report["errors"]]
    assert found == [(2, None, "template_refuses"), (3, None, "template_refuses")]
    reasons = [one["message"] for one in report["errors"]]
    assert "cannot ask for turn 1" in reasons[0]
    assert "TemplateError" in reasons[1]
    assert report["suggestions"] == ["The chat template of letters refuses 2 lines."]
    assert report["num_examples"] == 1
    assert SECRET not in json.dumps(report)
    assert service.validate(jsonl(*lines), format="conversation")["is_valid"]


def test_a_damaged_source_is_not_merged(service: Service) -> None:
    one, two = service.dataset(), service.dataset()
    content = blob(service, one).read_bytes()
    blob(service, one).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = merge(service, one, two)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_error")


def test_a_merged_dataset_outlives_its_sources(service: Service) -> None:
    sources = [service.dataset(), service.dataset()]
    merged = merge(service, *sources).json()["id"]
    for source in sources:
        assert service.call("DELETE", f"/v1/datasets/{source}").status_code == 200
    kept = get(service, merged)
    assert (kept["source_datasets"], kept["num_examples"]) == (sources, 2 * len(LINES))
    assert service.job(dataset_id=merged)
    again = merge(service, merged, service.dataset()).json()
    assert again["source_datasets"][0] == merged  # the direct source, not the sources of that one


def test_a_tokenizer_that_breaks_is_named_and_holds_up_no_other_dataset(
    start: Start, tmp_path: Path
) -> None:
    """The tokenizer fails on request, and also when the service resumes a big file after the model was damaged."""
    shutil.copytree(SHIPPED / "tuneship-tiny", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    listed = tmp_path / "models.yaml"
    listed.write_text(json.dumps({"models": [{"id": "broken", "path": "model"}]}))
    service = start(model_catalogue=listed, inline_dataset_bytes=1)
    named = {"name": "a", "format": "instruction", "base_model": "broken"}
    files = {"file": ("x.jsonl", jsonl(*LINES))}
    refused = service.call("POST", "/v1/datasets", data=named, files=files)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "tokenizer.json cannot be read" in refused.json()["error"]["message"]
    older = service.dataset()
    service.until(lambda: get(service, older)["status"] == "processed")
    with service.database.write() as connection:
        waits = {"status": "processing", "tokenizer": "broken", "num_examples": 0}
        connection.execute(sa.update(tables.datasets).values(**waits))
    newer = service.dataset()
    service.until(lambda: get(service, newer)["status"] == "processed")
    assert get(service, older)["status"] == "failed"


def test_a_deleted_dataset_is_gone_with_its_file(service: Service) -> None:
    before = kept_files(service)
    dataset = service.dataset()
    answer = service.call("DELETE", f"/v1/datasets/{dataset}")
    assert (answer.status_code, answer.json()) == (200, {"id": dataset, "deleted": True})
    assert kept_files(service) == before
    for method in ("GET", "DELETE"):
        assert service.call(method, f"/v1/datasets/{dataset}").status_code == 404
    assert service.call("GET", "/v1/datasets").json()["pagination"]["total"] == 0


def test_a_dataset_is_kept_while_a_job_that_has_not_ended_uses_it(service: Service) -> None:
    dataset, validation = service.dataset(), service.dataset()
    job = service.job(dataset_id=dataset, validation_dataset_id=validation)
    for used in (dataset, validation):
        refused = service.call("DELETE", f"/v1/datasets/{used}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "dataset_error")
    service.call("POST", f"/v1/fine-tuning/jobs/{job}/cancel")
    service.until(lambda: service.job_status(job) == "cancelled")
    for used in (dataset, validation):
        assert service.call("DELETE", f"/v1/datasets/{used}").status_code == 200


def test_a_dataset_holds_the_bytes_that_were_sent(service: Service) -> None:
    content = b"\xef\xbb\xbf" + jsonl(*LINES)
    dataset = service.dataset(content=content)
    with service.database.read() as connection:
        query = sa.select(tables.datasets).where(tables.datasets.c.id == dataset)
        row = connection.execute(query).mappings().one()
    assert (stored(service, dataset), row["bytes"]) == (content, len(content))
    assert row["sha256"] == sha256_of(blob(service, dataset))


# Real processes.


@pytest.mark.slow
def test_a_killed_service_takes_a_big_dataset_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_INLINE_DATASET_BYTES", "1000")
    file = tmp_path / "big.jsonl"
    file.write_bytes(
        jsonl(
            *(
                {"instruction": f"case {n}: " + "fracture " * 30, "response": "b"}
                for n in range(20_000)
            )
        )
    )
    serve = Serve(tmp_path / "data")
    try:
        with file.open("rb") as opened:
            upload = DatasetUpload(name="big", format="instruction")
            dataset = serve.client().datasets.upload(upload, opened)
        assert dataset.status == "processing"
        serve.kill()
        serve.start()
        client = serve.client()
        until(lambda: client.datasets.get(dataset.id).status != "processing")
        found = client.datasets.get(dataset.id)
        assert (found.status, found.num_examples) == ("processed", 20_000)
    finally:
        serve.stop()
    with sqlite3.connect(tmp_path / "data" / "tuneship.sqlite") as database:
        kinds = database.execute("select type from events order by position").fetchall()
    database.close()
    assert kinds == [("dataset.uploaded",), ("dataset.processed",)]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    line = {"instruction": "fracture of rib " * (1 << 17), "response": "rib " * (1 << 18)}
    file.write_bytes(jsonl(*({**line, "input": str(number)} for number in range(8))))
    serve = Serve(tmp_path / "data")

    def resident(name: str) -> int:
        lines = Path(f"/proc/{serve.process.pid}/status").read_text().splitlines()
        return next(int(one.split()[1]) for one in lines if one.startswith(name)) << 10

    try:
        client, before = serve.client(), resident("VmRSS")
        with file.open("rb") as opened:
            upload = DatasetUpload(name="big", format="instruction")
            assert client.datasets.upload(upload, opened).num_examples == 8
        assert resident("VmHWM") - before < 64 << 20
    finally:
        serve.stop()
