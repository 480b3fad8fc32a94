"""One `Idempotency-Key` makes at most one change, even if it is sent often (crashes: `test_crash_points.py`)."""

import asyncio
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.in_process import LINES, Service, jsonl, split
from tests.support.service.tenants import Tenants
from tests.support.service.whole_api import CREATING, OPERATIONS, options_of, path_of
from tuneship.contract.declaring.operation import Operation
from tuneship.service.all_handlers import SERVED
from tuneship.store.database import rows, tables
from tuneship.store.records import idempotency

pytestmark = pytest.mark.both_databases

JOBS = "/v1/fine-tuning/jobs"
PATCHES = tuple(one for one in OPERATIONS if one.method == "PATCH")
# Statuses of simultaneous uploads: only a few are accepted at a time, and the others are asked to retry.
LIMITED = (201, 409, 429)


def together(service: Service, number: int, *request: str, **options: Any) -> list[httpx.Response]:
    async def all_at_once() -> list[httpx.Response]:
        return await asyncio.gather(*(service.ask(*request, **options) for _ in range(number)))

    return service.run(all_at_once())


def ids_in(service: Service) -> set[str]:
    """The ids of all resources."""
    with service.database.read() as connection:
        return {
            identifier
            for table in tables.METADATA.tables.values()
            if "tags" in table.c
            for identifier in connection.scalars(sa.select(table.c.id))
        }


def job_body(service: Service) -> dict[str, Any]:
    return {"base_model": "tuneship-tiny", "dataset_id": service.dataset(), "model_name": "m"}


# Many at once


@pytest.mark.parametrize("operation", CREATING, ids=lambda one: one.name)
def test_sixty_four_creates_with_one_key_make_one(
    tenants: Tenants, operation: Operation[..., Any]
) -> None:
    service = tenants.world.service
    options = options_of(operation, replace(tenants.alice, name=f"once-{operation.name}"))
    headers = {"Idempotency-Key": operation.name}
    request = (operation.method, operation.path)
    before = ids_in(service)
    answers = together(service, 64, *request, **options, headers=headers)
    answers += [service.call(*request, **options, headers=headers)]
    created = [one for one in answers if one.status_code == 201]
    bound = SERVED[operation.name]
    is_limited = bound.is_long or bound.own_threads is not None
    assert {one.status_code for one in answers} <= set(LIMITED if is_limited else (201, 409))
    assert len({one.content for one in created}) == 1
    assert {one.headers["location"] for one in created} == {
        f"{_place(operation)}/{created[0].json()['id']}"
    }
    assert ids_in(service) - before == {created[0].json()["id"]}
    for one in answers:
        if one.status_code != 201:
            assert one.headers["x-should-retry"] == "true"
    assert answers[-1].headers["idempotent-replayed"] == "true"
    assert sum("idempotent-replayed" not in one.headers for one in created) == 1


def _place(operation: Operation[..., Any]) -> str:
    return operation.path.removesuffix("/merge")


@pytest.mark.parametrize("operation", PATCHES, ids=lambda one: one.name)
def test_a_patch_that_is_repeated_is_applied_once(
    tenants: Tenants, operation: Operation[..., Any]
) -> None:
    service = tenants.world.service
    options = options_of(operation, replace(tenants.alice, name=f"once-{operation.name}"))
    path, headers = path_of(operation, tenants.own), {"Idempotency-Key": f"p-{operation.name}"}
    answers = together(service, 16, "PATCH", path, **options, headers=headers)
    state = tenants.world.state()
    answers += [service.call("PATCH", path, **options, headers=headers)]
    assert {one.status_code for one in answers} <= {200, 409}
    applied = [one for one in answers if one.status_code == 200]
    assert len({one.content for one in applied}) == 1
    assert sum("idempotent-replayed" not in one.headers for one in applied) == 1
    assert tenants.world.state() == state


# One after another


def test_a_key_belongs_to_its_tenant(service: Service) -> None:
    body = {"model_name": "tuneship-tiny", "deployment_name": "same"}
    answers = [
        service.call(
            "POST", "/v1/deployments", tenant, json=body, headers={"Idempotency-Key": "one"}
        )
        for tenant in ("alice", "bob")
    ]
    assert len({one.json()["id"] for one in answers}) == 2


def test_a_key_is_for_one_method_path_and_body(service: Service) -> None:
    body, headers = job_body(service), {"Idempotency-Key": "one"}
    first = service.call("POST", JOBS, json=body, headers=headers)
    others = [
        service.call("POST", JOBS, json={**body, "model_name": "n"}, headers=headers),
        service.call("POST", f"{JOBS}/{first.json()['id']}/cancel", headers=headers),
        service.call("POST", "/v1/deployments", json=body, headers=headers),
    ]
    assert [one.status_code for one in others] == [422, 422, 400]
    assert [one.headers["x-should-retry"] for one in others] == ["false"] * 3


def test_a_replay_is_of_the_same_condition_too(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    path = f"/v1/canary-endpoints/{service.canary('shop', {one: 100, two: 0})}"

    def shift(**headers: str) -> httpx.Response:
        sent = {"Idempotency-Key": "shift", **headers}
        return service.call("PATCH", path, json=split({one: 50, two: 50}), headers=sent)

    assert shift(**{"If-Match": '"1"'}).status_code == 200
    assert shift(**{"If-Match": '"1"'}).headers["idempotent-replayed"] == "true"
    service.call("PATCH", path, json=split({one: 100, two: 0}))
    for headers in ({"If-Match": '"3"'}, {"If-Match": "*"}, {}):
        other = shift(**headers)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "validation_error")


def test_a_refusal_gives_the_key_back(service: Service) -> None:
    body, headers = job_body(service), {"Idempotency-Key": "one"}
    wrong = service.call("POST", JOBS, json={**body, "base_model": "no-such"}, headers=headers)
    right = service.call("POST", JOBS, json=body, headers=headers)
    assert (wrong.status_code, right.status_code) == (404, 201)


def test_a_key_is_forgotten_after_a_day(service: Service) -> None:
    body, headers = job_body(service), {"Idempotency-Key": "one"}
    first = service.call("POST", JOBS, json=body, headers=headers).json()["id"]
    service.clock.ahead = idempotency.KEPT - timedelta(minutes=1)
    assert service.call("POST", JOBS, json=body, headers=headers).json()["id"] == first
    service.clock.ahead = idempotency.KEPT + timedelta(minutes=1)
    assert service.call("POST", JOBS, json=body, headers=headers).json()["id"] != first
    service.clock.ahead = 3 * idempotency.KEPT

    def forgotten() -> bool:
        with service.database.read() as connection:
            return rows.count(connection, tables.idempotency) == 0

    service.until(forgotten)


def test_an_upload_is_repeated_with_another_boundary_and_makes_one_dataset(
    service: Service,
) -> None:
    def upload(boundary: str, lines: list[Any]) -> httpx.Response:
        media = f"multipart/form-data; boundary={boundary}"
        return service.call(
            "POST",
            "/v1/datasets",
            data={"name": "d", "format": "instruction"},
            files={"file": ("x", jsonl(*lines))},
            headers={"Idempotency-Key": "up", "Content-Type": media},
        )

    assert upload("one", LINES).json()["id"] == upload("two", LINES).json()["id"]
    assert upload("two", LINES[1:]).status_code == 422


def test_a_slow_holder_of_a_key_makes_nothing_after_another_took_it(service: Service) -> None:
    body, headers = job_body(service), {"Idempotency-Key": "slow"}
    entered, go_on = threading.Event(), threading.Event()
    answers: list[httpx.Response] = []

    look_up = service.parts.catalogue.get  # a create calls this first, before it holds any lock

    def slow_get(identifier: str) -> Any:
        if not entered.is_set():
            entered.set()
            go_on.wait(120)
        return look_up(identifier)

    service.parts.catalogue.get = slow_get  # type: ignore[method-assign]
    try:
        first = threading.Thread(
            target=lambda: answers.append(service.call("POST", JOBS, json=body, headers=headers))
        )
        first.start()
        assert entered.wait(60)
        service.clock.ahead = timedelta(seconds=61)  # the lock of the first request has expired
        second = service.call("POST", JOBS, json=body, headers=headers)
        go_on.set()
        first.join()
    finally:
        del service.parts.catalogue.get  # type: ignore[attr-defined]
    assert second.status_code == 201
    assert answers[0].status_code == 409
    with service.database.read() as connection:
        assert rows.count(connection, tables.jobs) == 1
