"""The audit chain gets its rows before a request is answered, and reveals any change of its table."""

import json
import resource
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases.sqlite_files import new_sqlite
from tests.support.service.in_process import ANSWER, Service
from tuneship.contract.audit import AuditHead
from tuneship.service.access.api_keys import new_key
from tuneship.service.http.rate_limits import AUDITED_FAILURES_PER_MINUTE
from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import AuditRow
from tuneship.store.records import audit
from tuneship.store.records.audit import Chain, Fault
from tuneship.store.records.audit_heads import Head, Heads, HeadsDamaged

pytestmark = pytest.mark.both_databases
AUDITED = {"security_settings": {"audit_logging": True}}
CHAIN = Chain(b"a" * 32)
SECRET = "Q7-planted-patient-text"
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def rows(service: Service, client: str = "alice") -> list[AuditRow]:
    service.parts.audit.link_all(service.database)
    with service.database.read() as connection:
        return list(audit.rows_of(connection, client_id=client))


def new_rows_of(service: Service) -> sa.Table:
    """The table that a request adds its row to."""
    return tables.audit if service.database.is_sqlite else tables.unlinked_audit


def rows_added(service: Service, ask: Callable[[], Any]) -> list[AuditRow]:
    """The rows that a request adds."""
    before = len(rows(service))
    ask()
    return rows(service)[before:]


def fault(service: Service) -> Fault | None:
    service.parts.audit.link_all(service.database)
    with service.database.read() as connection:
        return CHAIN.fault(audit.rows_of(connection))


def test_every_change_is_written_down_with_who_what_and_from_where(service: Service) -> None:
    (upload,) = rows_added(service, service.dataset)
    dataset = upload["resource_id"]
    answer = service.call("DELETE", f"/v1/datasets/{dataset}")
    key_id = service.headers["alice"]["Authorization"].removeprefix("Bearer tsk_")[:8]
    deletion = rows(service)[-1]
    assert (upload["action"], upload["status"]) == ("upload_dataset", 201)
    assert (deletion["action"], deletion["resource_id"], deletion["status"]) == (
        "delete_dataset",
        dataset,
        200,
    )
    assert deletion["key_id"] == key_id
    assert deletion["request_id"] == answer.headers["x-request-id"]
    assert deletion["address"].startswith("10.0.")
    assert fault(service) is None


def test_reads_and_refusals_are_not_unless_somebody_asks_for_it(service: Service) -> None:
    plain = service.deployment("plain")
    assert rows_added(service, lambda: service.call("GET", f"/v1/deployments/{plain}")) == []
    refused = lambda: service.call("PATCH", f"/v1/deployments/{plain}", json={"max_replicas": 0})  # noqa: E731
    assert rows_added(service, refused) == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "action"),
    [
        ("GET", "/v1/deployments/{id}", None, 200, "get_deployment"),
        ("GET", "/v1/deployments", None, 200, "list_deployments"),
        ("GET", "/v1/deployments/{id}/logs", None, 200, "get_deployment_logs"),
        ("GET", "/v1/deployments/{id}/metrics", None, 200, "get_deployment_metrics"),
        ("POST", "/v1/deployments/{id}/generate", {"prompt": SECRET}, 200, "generate"),
        ("POST", "/v1/endpoints/{endpoint}/generate", {"prompt": SECRET}, 200, "generate_by_endpoint"),
        ("POST", "/v1/deployments/{id}/embeddings", {"input": SECRET}, 200, "embed"),
        ("POST", "/v1/endpoints/{endpoint}/embeddings", {"input": SECRET}, 200, "embed_by_endpoint"),
        ("PATCH", "/v1/deployments/{id}", {"max_replicas": 64}, 200, "update_deployment"),
        ("PATCH", "/v1/deployments/{id}", {"min_replicas": 3, "max_replicas": 2}, 422, "update_deployment"),
    ],
)  # fmt: skip
def test_every_request_to_an_audited_deployment_leaves_one_row(
    service: Service, method: str, path: str, body: Any, status: int, action: str
) -> None:
    deployment = service.deployment("audited", **AUDITED)
    endpoint = service.canary("shop", {deployment: 100})
    own_path = path.format(id=deployment, endpoint=endpoint)

    def ask() -> None:
        answer = service.call(method, own_path, json=body)
        assert answer.status_code == status, answer.text

    (row,) = rows_added(service, ask)
    assert (row["action"], row["status"]) == (action, status)
    is_text, is_embedding = "generate" in action, "embed" in action
    assert (row["prompt_tokens"] is not None) is (is_text or is_embedding)
    written = row["completion_tokens"]
    assert (written or 0) > 0 if is_text else written == (0 if is_embedding else None)
    assert fault(service) is None


def test_a_generation_that_streams_leaves_its_start_and_its_end(service: Service) -> None:
    deployment = service.deployment("audited", **AUDITED)
    body = {"prompt": SECRET, "stream": True}
    written = rows_added(
        service, lambda: service.call("POST", f"/v1/deployments/{deployment}/generate", json=body)
    )
    start, end = sorted(written, key=lambda one: one["completion_tokens"] or 0)
    assert start["request_id"] == end["request_id"]
    assert (start["status"], end["status"]) == (200, 200)
    assert (end["completion_tokens"] or 0) > 0


def audited_model(service: Service) -> str:
    job_id = service.job(**AUDITED)
    trainer = service.trainer_of(job_id)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    return service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["fine_tuned_model"]


def test_every_request_to_the_model_of_an_audited_job_leaves_one_row(service: Service) -> None:
    """The deployment itself does not ask for audit logging."""
    model = audited_model(service)
    deployment = service.deployment("plain", model_name=model)
    endpoint = service.canary("shop", {deployment: 100})
    deployment_path = f"/v1/deployments/{deployment}"
    asked = [
        ("GET", f"/v1/models/{model}", None),
        ("GET", f"/v1/models/{model}/limits", None),
        ("GET", "/v1/models", None),
        ("GET", deployment_path, None),
        ("GET", "/v1/deployments", None),
        ("GET", f"{deployment_path}/metrics", None),
        ("GET", f"{deployment_path}/logs", None),
        ("POST", f"{deployment_path}/generate", {"prompt": SECRET}),
        ("POST", f"/v1/endpoints/{endpoint}/generate", {"prompt": SECRET}),
        ("POST", f"{deployment_path}/embeddings", {"input": SECRET}),
        ("PATCH", deployment_path, {"min_replicas": 3, "max_replicas": 2}),
        ("DELETE", f"/v1/models/{model}", None),
        ("DELETE", deployment_path, None),
    ]
    for method, path, body in asked:
        written = rows_added(service, lambda: service.call(method, path, json=body))  # noqa: B023
        assert len(written) == 1, (method, path)
    # The deployment is still being deleted.
    assert len(rows_added(service, lambda: service.call("GET", deployment_path))) == 1
    assert fault(service) is None


def test_the_tokens_of_a_stream_stand_in_one_row_however_short_it_is(service: Service) -> None:
    deployment = service.deployment("audited", **AUDITED)
    body = {"prompt": SECRET, "stream": True, "max_tokens": 1}
    path = f"/v1/deployments/{deployment}/generate"
    for _ in range(20):
        written = rows_added(service, lambda: service.call("POST", path, json=body))
        assert sorted(one["completion_tokens"] or 0 for one in written) == [0, 1]
        assert [one["prompt_tokens"] is None for one in written].count(True) == 1


def test_every_request_to_an_audited_job_leaves_one_row(service: Service) -> None:
    job = service.job(**AUDITED)
    path = f"/v1/fine-tuning/jobs/{job}"
    for place in (path, "/v1/fine-tuning/jobs", f"{path}/metrics", f"{path}/logs"):
        (row,) = rows_added(service, lambda place=place: service.call("GET", place))
        assert row["status"] == 200


def test_a_refusal_for_want_of_a_scope_is_always_written_down(service: Service) -> None:
    service.headers["reader"] = service.key_headers("alice", frozenset({"datasets:read"}))
    ask = lambda: service.call("DELETE", "/v1/models/ft:a:b:c", "reader")  # noqa: E731
    (row,) = rows_added(service, ask)
    assert (row["action"], row["status"]) == ("delete_model", 403)
    assert row["resource_id"] is None, "what somebody wrote into a path may be a name"


def nobodys(service: Service) -> list[AuditRow]:
    return rows(service, audit.NOBODY)


def test_a_refused_key_is_a_row_of_no_tenant_and_holds_nothing_of_the_key(service: Service) -> None:
    good = service.headers["alice"]
    key, guess = good["Authorization"], new_key()
    wrong: list[dict[str, str]] = [
        {**good, "X-Client-ID": SECRET},
        {**good, "Authorization": f"Bearer {guess}"},
        {**good, "Authorization": f"Bearer {SECRET}"},
        {"Authorization": key},
    ]
    for headers in wrong:
        answer = service.call("GET", "/v1/models", None, headers=headers)
        assert answer.status_code == 401
        row = nobodys(service)[-1]
        assert (row["action"], row["status"], row["key_id"]) == ("authenticate", 401, "")
        assert row["request_id"] == answer.headers["x-request-id"]
        assert row["address"].startswith("10.0.")
    assert len(nobodys(service)) == len(wrong)
    content = repr(nobodys(service))
    assert not [text for text in (SECRET, guess[4:12], key[11:19]) if text in content]
    mine = service.call("GET", "/v1/audit?limit=1000").json()["entries"]
    assert "authenticate" not in {one["action"] for one in mine}
    assert fault(service) is None


def test_a_request_without_a_key_is_no_failed_attempt(service: Service) -> None:
    assert service.call("GET", "/v1/models", None).status_code == 401
    assert nobodys(service) == []


def test_guesses_from_many_addresses_do_not_fill_the_chain(service: Service) -> None:
    wrong = {"Authorization": "Bearer x", "X-Client-ID": "alice"}
    now = service.clock()
    for _ in range(AUDITED_FAILURES_PER_MINUTE + 10):  # each from an address of its own
        service.clock.ahead = now - datetime.now(UTC)  # within one minute, however long this takes
        assert service.call("GET", "/v1/models", None, headers=wrong).status_code == 401
    assert len(nobodys(service)) == AUDITED_FAILURES_PER_MINUTE
    service.clock.ahead += timedelta(seconds=61)
    service.call("GET", "/v1/models", None, headers=wrong)
    assert len(nobodys(service)) == AUDITED_FAILURES_PER_MINUTE + 1
    assert fault(service) is None


def test_an_answer_from_memory_is_written_down_too(service: Service) -> None:
    body, key = {"name": "e", "deployment_id": service.deployment("d")}, {"Idempotency-Key": "k"}
    ask = lambda: service.call("POST", "/v1/endpoints", json=body, headers=key)  # noqa: E731
    (first,), (again,) = rows_added(service, ask), rows_added(service, ask)
    assert (first["status"], again["status"]) == (201, 201)
    assert again["request_id"] != first["request_id"]


def test_no_row_holds_a_text(service: Service) -> None:
    deployment = service.deployment("audited", **AUDITED)
    path = f"/v1/deployments/{deployment}/generate"
    service.call("POST", path, json={"prompt": SECRET, "stop": [SECRET]})
    service.call("POST", path, json={"prompt": SECRET, SECRET: 1})
    service.call("GET", f"/v1/deployments/{SECRET}")
    service.call("PATCH", f"/v1/deployments/{deployment}", json={"tags": {"k": SECRET}})
    content = repr(rows(service))
    assert "generate" in content
    assert SECRET not in content
    assert ANSWER not in content


def test_without_its_row_there_is_neither_an_answer_nor_a_change(service: Service) -> None:
    deployment = service.deployment("audited", **AUDITED)
    with service.database.write() as connection:
        new_rows_of(service).drop(connection)
    path = f"/v1/deployments/{deployment}"
    assert service.call("GET", path).status_code in (500, 503)
    assert service.call("POST", f"{path}/generate", json={"prompt": "a"}).status_code in (500, 503)
    assert service.call("PATCH", path, json={"tags": {"k": "v"}}).status_code in (500, 503)
    with service.database.write() as connection:
        new_rows_of(service).create(connection)
    assert service.call("GET", path).json()["tags"] == {}


def test_a_tenant_reads_its_own_rows_page_by_page(service: Service) -> None:
    mine = [service.dataset() for _ in range(3)]
    service.dataset("bob")
    seen: list[str] = []
    after = None
    for _ in range(6):
        query = "?limit=1" + (f"&after={after}" if after else "")
        page = service.call("GET", f"/v1/audit{query}").json()
        seen += [one["resource_id"] for one in page["entries"] if one["action"] == "upload_dataset"]
        after = page["pagination"]["after"]
    assert seen == mine
    service.headers["auditor"] = service.key_headers("alice", frozenset({"audit:read"}))
    assert service.call("GET", "/v1/audit", "auditor").status_code == 200
    service.headers["other"] = service.key_headers("alice", frozenset({"jobs:read"}))
    assert service.call("GET", "/v1/audit", "other").status_code == 403


def test_the_head_of_the_chain_is_signed_at_once(service: Service, tmp_path: Path) -> None:
    service.dataset()
    head = AuditHead.model_validate(service.call("GET", "/v1/audit/head").json())
    last = rows(service)[-1]
    assert (head.seq, head.mac) == (last["seq"], last["mac"].hex())
    # In the form of a kept copy, which `tuneship audit verify --heads` reads.
    kept = tmp_path / "kept.jsonl"
    kept.write_text(json.dumps(head.model_dump()) + "\n")
    assert list(Heads(kept, b"h" * 32).read()) == [Head(head.seq, last["mac"])]
    assert head.public_key == service.parts.audit_heads.public_key.public_bytes_raw().hex()
    service.dataset()
    again = service.call("GET", f"/v1/audit/head?seq={head.seq}").json()
    assert (again["seq"], again["mac"]) == (head.seq, head.mac)
    assert service.call("GET", "/v1/audit/head").json()["seq"] > head.seq
    assert service.call("GET", "/v1/audit/head?seq=9999").status_code == 404
    assert service.call("GET", "/v1/audit/head?seq=0").status_code == 422
    service.headers["reader"] = service.key_headers("alice", frozenset({"jobs:read"}))
    assert service.call("GET", "/v1/audit/head", "reader").status_code == 403


CHANGES: dict[str, Any] = {
    "at": NOW, "client_id": "bob", "key_id": "x", "action": "x", "resource_id": "x", "status": 404,
    "address": "x", "request_id": "x", "prompt_tokens": 1, "completion_tokens": 1,
    "person": {"issuer": "x", "subject": "x", "name": "x"}, "mac": bytes(32),
}  # fmt: skip


def test_a_change_of_any_column_is_found_at_its_row(service: Service) -> None:
    assert {*CHANGES, "seq"} == set(tables.audit.columns.keys())
    for _ in range(4):
        service.dataset()
    at = rows(service)[1]["seq"]
    for name, value in CHANGES.items():
        with service.database.write() as connection:
            kept = connection.execute(sa.select(tables.audit).where(tables.audit.c.seq == at)).one()
            change = sa.update(tables.audit).where(tables.audit.c.seq == at)
            connection.execute(change.values({name: value}))
        found = fault(service)
        assert found is not None, name
        assert found.seq == at, name
        with service.database.write() as connection:
            connection.execute(change.values({name: getattr(kept, name)}))
        assert fault(service) is None


def test_a_row_that_was_taken_out_is_found(service: Service) -> None:
    for _ in range(4):
        service.dataset()
    at = rows(service)[1]["seq"]
    with service.database.write() as connection:
        connection.execute(sa.delete(tables.audit).where(tables.audit.c.seq == at))
    assert fault(service) == Fault(at, "rows are missing")
    with service.database.write() as connection:  # and close the gap in the numbers
        last = sa.select(sa.func.max(tables.audit.c.seq)).scalar_subquery()
        connection.execute(sa.update(tables.audit).where(tables.audit.c.seq == last).values(seq=at))
    found = fault(service)
    assert found is not None
    assert found.seq == at


def test_heads_are_read_as_they_were_signed_and_a_line_that_a_crash_cut_is_dropped(
    tmp_path: Path,
) -> None:
    file, heads = tmp_path / "heads.jsonl", [Head(3, b"x" * 32), Head(9, b"y" * 32)]
    kept = Heads(file, b"k" * 32)
    kept.append(heads[0], NOW)
    kept.append(heads[0], NOW)
    with file.open("a") as stream:
        stream.write('{"seq": 4, "ma')
    assert list(kept.read()) == heads[:1]
    again = Heads(file, b"k" * 32)
    again.append(heads[1], NOW)
    assert list(again.read()) == heads
    assert file.stat().st_mode & 0o077 == 0


def test_a_head_that_a_full_disk_cut_is_dropped_before_the_next_one(tmp_path: Path) -> None:
    file, heads = tmp_path / "heads.jsonl", [Head(3, b"x" * 32), Head(9, b"y" * 32)]
    kept = Heads(file, b"k" * 32)
    kept.append(heads[0], NOW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            kept.append(heads[1], NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept.append(heads[1], NOW)
    assert list(kept.read()) == heads


@pytest.mark.parametrize("change", [("3,", "4,"), ("2026", "2025"), ("78", "79"), ("{", "")])
def test_a_line_that_this_service_did_not_sign_is_named(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    file = tmp_path / "heads.jsonl"
    heads = Heads(file, b"k" * 32)
    heads.append(Head(3, b"x" * 32), NOW)
    file.write_text(file.read_text().replace(*change, 1))
    with pytest.raises(HeadsDamaged, match="line 1 was not signed"):
        list(heads.read())
    with pytest.raises(HeadsDamaged):
        list(Heads(file, b"j" * 32).read())


def test_a_chain_of_another_key_is_not_this_one(tmp_path: Path) -> None:
    database = Database(new_sqlite(tmp_path / "db.sqlite"))
    entry = audit.AuditRecord(NOW, "alice", "k", "get_job", None, 200, "::1", "req")
    with database.write() as connection:
        Chain(b"b" * 32).add(connection, entry)
    with database.read() as connection:
        assert CHAIN.fault(audit.rows_of(connection)) == Fault(
            1, "the row was changed, or one before it was"
        )
    database.close()
