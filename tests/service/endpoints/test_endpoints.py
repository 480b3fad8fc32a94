"""Endpoints of both kinds: their forms, versions, cut-overs and deletion, and which deployment answers a request."""

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service, split
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.endpoints import CanaryEndpoint, Endpoint, EndpointCreate, EndpointUpdate
from tuneship.service.context.context import Context
from tuneship.service.endpoints.lookup import own_endpoint
from tuneship.service.generation.routing import choose_by_split
from tuneship.store.database import tables
from tuneship.store.records import endpoint_records
from tuneship.traffic.split import DRAWS

pytestmark = pytest.mark.both_databases
ENDPOINT = {
    "id", "name", "deployment_id", "url", "created_at", "updated_at", "status", "version",
}  # fmt: skip
CANARY = ENDPOINT - {"deployment_id"} | {
    "deployments",
    "lease",
    "rollout_id",
    "large_keys",
    "paused",
    "reverted",
}
PAGINATION = {"total", "limit", "offset", "next_offset"}


def served_by(service: Service, endpoint: str, **headers: str) -> str:
    answer = service.call(
        "POST", f"/v1/endpoints/{endpoint}/generate", json={"prompt": "a"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-deployment-id"] == answer.json()["deployment_id"]
    return answer.json()["deployment_id"]


def test_an_endpoint_is_created_fetched_listed_and_deleted_in_its_forms(service: Service) -> None:
    target = service.deployment("one")
    body = {"name": "shop", "deployment_id": target}
    answer = service.call("POST", "/v1/endpoints", json=body)
    created = answer.json()
    path = f"/v1/endpoints/{created['id']}"
    assert (answer.status_code, answer.headers["location"]) == (201, path)
    assert set(created) == ENDPOINT
    assert created["id"].startswith("ep_")
    assert (created["deployment_id"], created["status"], created["version"]) == (
        target,
        "active",
        1,
    )
    assert created["url"] == f"http://service.test{path}/generate"
    got = service.call("GET", path)
    assert (got.json(), got.headers["etag"]) == (created, '"1"')
    page = service.call("GET", "/v1/endpoints?name=shop").json()
    assert page["endpoints"] == [created]
    assert set(page["pagination"]) == PAGINATION
    assert served_by(service, created["id"]) == target
    gone = service.call("DELETE", path)
    assert gone.json() == {"id": created["id"], "deleted": True, "status": "deleted"}
    assert service.call("GET", path).status_code == 404
    assert service.call("DELETE", path).status_code == 404
    assert service.call("POST", f"{path}/generate", json={"prompt": "a"}).status_code == 404
    assert service.call("GET", "/v1/endpoints").json()["pagination"]["total"] == 0
    assert service.deployment_status(target) == "running"


def test_the_lists_hold_their_own_kind_and_the_plain_route_finds_both(service: Service) -> None:
    target = service.deployment("one")
    plain, canary = service.endpoint("plain", target), service.canary("canary", {target: 100})
    lists = [
        [one["id"] for one in service.call("GET", f"/v1/{kind}").json()[key]]
        for kind, key in (("endpoints", "endpoints"), ("canary-endpoints", "canary_endpoints"))
    ]
    assert lists == [[plain], [canary]]
    found = service.call("GET", f"/v1/endpoints/{canary}")
    assert set(found.json()) == CANARY
    assert found.json() == service.call("GET", f"/v1/canary-endpoints/{canary}").json()
    assert found.headers["etag"] == '"1"'


def test_a_cut_over_reaches_the_next_request_and_raises_the_version(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    endpoint = service.endpoint("shop", one)
    path = f"/v1/endpoints/{endpoint}"
    assert served_by(service, endpoint) == one
    changed = service.call(
        "PATCH", path, json={"deployment_id": two}, headers={"If-Match": '"1"'}
    ).json()
    assert set(changed) == ENDPOINT
    assert (changed["deployment_id"], changed["version"]) == (two, 2)
    assert served_by(service, endpoint) == two
    stale = service.call("PATCH", path, json={"deployment_id": one}, headers={"If-Match": '"1"'})
    assert (stale.status_code, stale.json()["error"]["code"]) == (412, "invalid_request_error")
    assert served_by(service, endpoint) == two
    renamed = service.call("PATCH", path, json={"name": "store"}).json()
    assert (renamed["name"], renamed["deployment_id"], renamed["version"]) == ("store", two, 3)
    assert service.endpoint("shop", one)


def test_a_forced_delete_leaves_an_endpoint_inactive_until_it_has_a_target(
    service: Service,
) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    endpoint = service.endpoint("shop", one)
    path = f"/v1/endpoints/{endpoint}"
    refused = service.call("DELETE", f"/v1/deployments/{one}")
    assert (refused.status_code, endpoint in refused.text) == (409, True)
    assert service.call("DELETE", f"/v1/deployments/{one}?force=true").status_code == 200
    assert service.call("GET", path).json()["status"] == "inactive"
    answer = service.call("POST", f"{path}/generate", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "invalid_request_error")
    assert service.call("PATCH", path, json={"name": "store"}).json()["status"] == "inactive"
    again = service.call("PATCH", path, json={"deployment_id": two}).json()
    assert (again["status"], again["name"]) == ("active", "store")
    assert served_by(service, endpoint) == two


def test_a_deleted_canary_takes_its_lease_with_it_and_frees_its_name(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    endpoint = service.canary("shop", {two: 100}, lease=lease)
    gone = service.call("DELETE", f"/v1/canary-endpoints/{endpoint}", headers={"If-Match": '"1"'})
    assert gone.json() == {"id": endpoint, "deleted": True, "status": "deleted"}
    assert service.call("GET", f"/v1/canary-endpoints/{endpoint}").status_code == 404
    assert service.call("DELETE", f"/v1/deployments/{two}").status_code == 200
    assert service.canary("shop", {one: 100}) != endpoint
    query = sa.select(tables.endpoints).where(tables.endpoints.c.id == endpoint)
    with service.database.read() as connection:
        row = connection.execute(query).mappings().one()
    assert (row["status"], row["lease_until"]) == ("deleted", None)


def test_one_of_two_creates_of_one_name_is_refused(service: Service) -> None:
    target = service.deployment("one")

    async def both() -> list[httpx.Response]:
        plain = {"name": "shop", "deployment_id": target}
        return await asyncio.gather(
            service.ask("POST", "/v1/endpoints", json=plain),
            service.ask("POST", "/v1/canary-endpoints", json=split({target: 100}, name="shop")),
        )

    assert sorted(one.status_code for one in service.run(both())) == [201, 409]
    theirs = service.deployment("theirs", "bob")
    assert service.endpoint("shop", theirs, "bob")


def test_an_updating_deployment_can_take_traffic(service: Service) -> None:
    target = service.deployment("one")
    service.rest()
    service.call("PATCH", f"/v1/deployments/{target}", json={"tags": {"a": "1"}})
    assert service.deployment_status(target) == "updating"
    assert served_by(service, service.endpoint("shop", target)) == target


def test_ten_thousand_draws_fall_as_the_split_says(service: Service) -> None:
    """The routing gets every possible draw once, and then random draws, without the models."""
    one, two, three = (service.deployment(name) for name in ("one", "two", "three"))
    endpoint = service.canary("shop", {one: 57, two: 41, three: 2})
    context = Context(parts=service.parts, client_id="alice", request_id="req_x")
    row = own_endpoint(context, endpoint)

    def shares() -> dict[str, float]:
        counted = Counter(choose_by_split(context, row).deployment_id for _ in range(DRAWS))
        return {name: 100 * number / DRAWS for name, number in counted.items()}

    service.draws = iter(range(DRAWS)).__next__
    assert shares() == {one: 57, two: 41, three: 2}
    dice = random.Random(11)  # noqa: S311 - a draw of a test
    service.draws = lambda: dice.randrange(DRAWS)
    assert shares() == pytest.approx({one: 57, two: 41, three: 2}, abs=1)


def test_a_member_without_traffic_never_answers_and_leaves_without_force(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    endpoint = service.canary("shop", {one: 100, two: 0})
    service.draws = lambda: DRAWS - 1
    assert served_by(service, endpoint) == one
    assert service.call("DELETE", f"/v1/deployments/{two}").status_code == 200
    got = service.call("GET", f"/v1/canary-endpoints/{endpoint}").json()
    assert got["deployments"] == split({one: 100})["deployments"]
    assert got["version"] == 2


def test_a_delete_reads_the_endpoints_that_name_the_deployment_and_no_others(
    service: Service,
) -> None:
    one, other = service.deployment("one"), service.deployment("other")
    for number in range(5):
        service.endpoint(f"e{number}", other)
    idle = service.canary("idle", {one: 0, other: 100})
    with service.database.read() as connection:
        for deployment, named in ((one, 1), (other, 6)):
            found = endpoint_records.endpoints_naming(connection, "alice", deployment)
            assert len(found) == named
        assert endpoint_records.endpoints_naming(connection, "bob", other) == []
    assert service.call("DELETE", f"/v1/deployments/{one}").status_code == 200
    left = service.call("GET", f"/v1/canary-endpoints/{idle}").json()["deployments"]
    assert [member["id"] for member in left] == [other]


def test_a_dead_member_answers_its_errors_under_its_own_name(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    endpoint = service.canary("shop", {one: 50, two: 50})
    service.rest()
    with service.database.write() as connection:
        table = tables.deployments
        connection.execute(sa.update(table).where(table.c.id == two).values(status="failed"))
    answers = [
        service.call("POST", f"/v1/endpoints/{endpoint}/generate", json={"prompt": "a"})
        for _ in range(20)
    ]
    assert {(one.status_code, one.headers["x-deployment-id"]) for one in answers} == {
        (200, one),
        (409, two),
    }


def test_the_typed_client_has_a_verb_for_each_operation(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")

    async def talk() -> Any:
        client = service.client()
        canary = await client.endpoints.create(EndpointCreate(name="shop", deployment_id=one))
        assert isinstance(canary, Endpoint)
        assert isinstance(await client.endpoints.get(canary.id), Endpoint)
        await client.endpoints.update(canary.id, EndpointUpdate(deployment_id=two))
        page = await client.endpoints.list(name="shop")
        assert [item.deployment_id for item in page.endpoints] == [two]
        assert (await client.endpoints.delete(canary.id)).deleted
        listed = await client.deployments.list(status=DeploymentStatus.RUNNING)
        found = await client.deployments.logs(one, filter="level>=info", order="asc", limit=1)
        more = await client.deployments.logs(
            one,
            filter="level>=info",
            order="asc",
            limit=1,
            next_token=found.pagination.next_token,
        )
        await client.close()
        return listed, found, more

    listed, found, more = service.run(talk())
    assert [item.id for item in listed.deployments] == [two, one]
    assert found.logs[0] != more.logs[0]
    canary = service.canary("split", {one: 100})

    async def remove() -> Any:
        client = service.client()
        seen = await client.endpoints.get(canary)
        gone = await client.canary_endpoints.delete(canary)
        await client.close()
        return seen, gone

    seen, gone = service.run(remove())
    assert isinstance(seen, CanaryEndpoint)
    assert (gone.id, gone.status) == (canary, "deleted")


def test_a_lapsed_lease_that_cannot_be_ended_keeps_no_other_endpoint_shifted(
    service: Service,
) -> None:
    old, new = service.deployment("old"), service.deployment("new")
    lease = {"seconds": 60, "fallback": split({old: 100})["deployments"]}
    broken, sound = (service.canary(name, {new: 100}, lease=lease) for name in ("first", "second"))
    table = tables.endpoints
    with service.database.write() as connection:
        change = sa.update(table).where(table.c.id == broken).values(lease_fallback=sa.null())
        connection.execute(change)
    service.clock.ahead += timedelta(seconds=61)

    def members_of(endpoint_id: str) -> list[str]:
        with service.database.read() as connection:
            query = sa.select(table.c.members).where(table.c.id == endpoint_id)
            return [one["id"] for one in connection.execute(query).scalar_one()]

    service.until(lambda: members_of(sound) == [old])
    assert members_of(broken) == [new]
    assert any("could not be ended" in line and broken in line for line in service.log.texts)
