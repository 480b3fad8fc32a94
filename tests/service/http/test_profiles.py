"""A strict client gets exactly the fields of its reference, although the service has more."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import Service
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.errors import InvalidRequestError
from tuneship.service.context import context
from tuneship.service.context.profiles import chosen
from tuneship.service.openai import models as openai_models
from tuneship.settings import ServiceSettings
from tuneship.store.database import rows, tables

Start = Callable[..., Service]
# §2.4
ITEM = {
    "id", "model_name", "deployment_name", "status", "endpoint", "created_at", "updated_at",
    "compute_type", "instance_type", "tags",
}  # fmt: skip
CREATED = ITEM | {"min_replicas", "max_replicas", "auto_scaling", "region"}
RECORD = CREATED | {"current_replicas", "model_config", "security_settings"}
UPDATED = CREATED - {"region"} | {"model_config"}
# §4.9
SHORT = {"deployment_id", "status", "model_id", "deployment_name", "created_at"}
SHORT_RECORD = SHORT | {
    "endpoint", "compute_type", "instance_type", "min_replicas", "max_replicas",
    "current_replicas", "auto_scaling", "updated_at", "tags",
}  # fmt: skip
# §2.3
TUNED = {
    "id", "base_model", "name", "fine_tuning_job_id", "created_at", "fine_tuning_method", "tags",
}  # fmt: skip
AVAILABLE = {
    "id", "name", "version", "description", "parameters", "context_length",
    "supported_fine_tuning",
}  # fmt: skip


def asked(service: Service, profile: str | None, method: str, path: str, **options: Any) -> Any:
    headers = {} if profile is None else {"X-API-Profile": profile}
    answer = service.call(method, path, headers=headers, **options)
    assert answer.is_success, answer.text
    assert answer.headers["x-api-profile"] == (profile or "auto")
    return answer.json()


def life(service: Service, profile: str | None) -> dict[str, Any]:
    """The answers about a deployment in the course of its life, by operation."""
    body = {
        "model_name": "tuneship-tiny", "deployment_name": f"of {profile}", "tags": {"a": "1"},
        "vpc_config": {"subnet_ids": ["s"]},
    }  # fmt: skip
    answers = {"create": asked(service, profile, "POST", "/v1/deployments", json=body)}
    deployment = answers["create"].get("id") or answers["create"]["deployment_id"]
    path = f"/v1/deployments/{deployment}"
    service.until(lambda: service.call("GET", path).json()["status"] == "running")
    answers["get"] = asked(service, profile, "GET", path)
    answers["list"] = asked(service, profile, "GET", "/v1/deployments")
    answers["update"] = asked(service, profile, "PATCH", path, json={"tags": {"b": "2"}})
    answers["delete"] = asked(service, profile, "DELETE", path)
    return answers


def test_full_answers_hold_exactly_the_fields_of_the_full_reference(service: Service) -> None:
    answers = life(service, "full")
    assert set(answers["create"]) == CREATED
    assert set(answers["get"]) == RECORD
    assert set(answers["list"]) == {"deployments", "pagination"}
    assert [set(one) for one in answers["list"]["deployments"]] == [ITEM]
    assert set(answers["update"]) == UPDATED
    assert answers["update"]["tags"] == {"a": "1", "b": "2"}
    assert set(answers["delete"]) == {"id", "status"}


def test_short_answers_hold_exactly_the_fields_of_the_short_reference(service: Service) -> None:
    answers = life(service, "simplified")
    assert set(answers["create"]) == SHORT
    assert set(answers["get"]) == SHORT_RECORD
    assert set(answers["list"]) == {"deployments"}
    assert [set(one) for one in answers["list"]["deployments"]] == [SHORT]
    assert set(answers["update"]) == SHORT_RECORD - {"current_replicas"}
    assert set(answers["delete"]) == {"deployment_id", "status"}


@pytest.mark.parametrize("profile", [None, "auto"])
def test_by_default_the_answers_hold_the_names_of_both(
    service: Service, profile: str | None
) -> None:
    answers = life(service, profile)
    both = {"deployment_id", "model_id"}
    assert set(answers["create"]) == CREATED | both
    assert set(answers["get"]) == RECORD | both | {"vpc_config", "health"}
    assert [set(one) for one in answers["list"]["deployments"]] == [ITEM | both]
    assert set(answers["update"]) == UPDATED | both
    assert set(answers["delete"]) == {"id", "deployment_id", "status"}


def test_models_are_shown_in_the_shape_of_the_profile(service: Service) -> None:
    tuned = service.model()
    full = asked(service, "full", "GET", "/v1/models?fine_tuned_only=true")
    assert set(full) == {"models", "pagination"}
    assert [set(one) for one in full["models"]] == [TUNED]
    short = asked(service, "simplified", "GET", "/v1/models")
    assert set(short) == {"models"}
    assert {frozenset(one) for one in short["models"]} == {frozenset(AVAILABLE)}
    assert [one["id"] for one in short["models"]][-1] == tuned
    assert set(asked(service, "full", "GET", f"/v1/models/{tuned}")) == TUNED
    assert set(asked(service, "simplified", "GET", f"/v1/models/{tuned}")) == AVAILABLE


def values_of(answer: Any) -> list[Any]:
    entries = answer.get("models", [answer])
    return [value for entry in entries for value in entry.values()]


def test_the_short_lists_hold_every_entry_unless_a_page_is_asked_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.rest()
    body = {"model_name": "tuneship-tiny"}
    deployments = [
        service.call("POST", "/v1/deployments", json={**body, "deployment_name": f"d{number}"})
        for number in range(27)
    ]
    assert {one.status_code for one in deployments} == {201}
    short = asked(service, "simplified", "GET", "/v1/deployments")["deployments"]
    assert [one["deployment_id"] for one in short] == [one.json()["id"] for one in deployments][
        ::-1
    ]
    page = asked(service, "simplified", "GET", "/v1/deployments?limit=5&offset=20")["deployments"]
    assert page == short[20:25]
    assert len(asked(service, "full", "GET", "/v1/deployments")["deployments"]) == 20
    tuned = [
        {
            "id": f"ft:tuneship-tiny:m:{number:024}", "client_id": "alice", "tags": {},
            "created_at": service.clock(), "updated_at": service.clock(), "name": "m",
            "base_model": "tuneship-tiny", "job_id": f"ft_{number:024}", "blob": f"b{number}",
            "fine_tuning_method": "lora", "sha256": {},
        }
        for number in range(30)
    ]  # fmt: skip
    with service.database.write() as connection:
        for row in tuned:
            rows.insert(connection, tables.models, row)
    every = asked(service, "simplified", "GET", "/v1/models")["models"]
    assert {one["id"] for one in tuned} <= {one["id"] for one in every}
    # Beyond a thousand, the newest: each answer has a bound.
    for module in (context, openai_models):
        monkeypatch.setattr(module, "WHOLE_LIST", 20)
    for path, name in (("/v1/models", "models"), ("/v1/deployments", "deployments")):
        assert len(asked(service, "simplified", "GET", path)[name]) == 20
        assert len(asked(service, "simplified", "GET", f"{path}?offset=20")[name]) > 0
    assert len(service.call("GET", "/openai/v1/models").json()["data"]) == 20


def test_a_strict_profile_leaves_out_what_a_base_model_does_not_have(service: Service) -> None:
    (base,) = asked(service, "full", "GET", "/v1/models?limit=1")["models"]
    assert set(base) == {"id", "name", "tags"}
    assert asked(service, "full", "GET", f"/v1/models/{base['id']}") == base
    for path in ("/v1/models", f"/v1/models/{base['id']}"):
        assert None not in values_of(asked(service, "simplified", "GET", path))
    both = asked(service, "auto", "GET", f"/v1/models/{base['id']}")
    assert both["base_model"] is both["created_at"] is None


def test_the_header_wins_over_the_clients_profile_and_that_over_the_services(start: Start) -> None:
    service = start(api_profile="full", client_profiles={"bob": "simplified"})

    def shown(client: str, **headers: str) -> tuple[str, bool]:
        answer = service.call("GET", "/v1/models", client, headers=headers)
        return answer.headers["x-api-profile"], "pagination" in answer.json()

    assert shown("alice") == ("full", True)
    assert shown("bob") == ("simplified", False)
    assert shown("bob", **{"X-API-Profile": "auto"}) == ("auto", True)
    assert "x-api-profile" not in service.call("GET", "/v1/datasets").headers
    refusal = service.call("GET", "/v1/models/none", headers={"X-API-Profile": "full"})
    assert refusal.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("sent", [[""], ["Full"], ["full", "full"], ["full, auto"]])
def test_any_other_header_is_refused(sent: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chosen(sent, "alice", ServiceSettings())
    assert refused.value.status == 400


def test_an_unknown_profile_makes_nothing(service: Service) -> None:
    body = {"model_name": "tuneship-tiny", "deployment_name": "one"}
    answer = service.call("POST", "/v1/deployments", json=body, headers={"X-API-Profile": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request_error")
    assert service.call("GET", "/v1/deployments").json()["deployments"] == []


def test_a_replayed_create_keeps_the_shape_of_its_first_answer(service: Service) -> None:
    body = {"model_name": "tuneship-tiny", "deployment_name": "one"}
    answers = [
        service.call(
            "POST",
            "/v1/deployments",
            json=body,
            headers={"Idempotency-Key": "one", "X-API-Profile": profile},
        )
        for profile in ("simplified", "full")
    ]
    assert answers[1].content == answers[0].content
    assert answers[1].headers["idempotent-replayed"] == "true"


def test_every_create_answers_200_for_clients_that_test_for_it(start: Start) -> None:
    service = start(created_status=200)
    body = {"model_name": "tuneship-tiny", "deployment_name": "one"}
    created = service.call("POST", "/v1/deployments", json=body, headers={"Idempotency-Key": "one"})
    assert (created.status_code, created.headers["location"]) == (
        200,
        f"/v1/deployments/{created.json()['id']}",
    )
    again = service.call("POST", "/v1/deployments", json=body, headers={"Idempotency-Key": "one"})
    assert again.status_code == 200
    service.until(lambda: service.deployment_status(created.json()["id"]) == "running")
    endpoint = {"name": "e", "deployment_id": created.json()["id"]}
    assert service.call("POST", "/v1/endpoints", json=endpoint).status_code == 200
    files = {"file": ("x", b'{"instruction":"a","response":"b"}\n')}
    form = {"name": "d", "format": "instruction"}
    assert service.call("POST", "/v1/datasets", data=form, files=files).status_code == 200
    paths = service.call("GET", "/openapi.json").json()["paths"]
    described = {
        status for path in paths.values() for one in path.values() for status in one["responses"]
    }
    assert "200" in paths["/v1/deployments"]["post"]["responses"]
    assert "201" not in described


def test_the_short_references_paths_are_reached_from_a_base_with_the_version(
    service: Service,
) -> None:
    async def talk() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=service.transport(),
            base_url="http://service.test/v1",
            headers={**service.headers["alice"], "X-API-Profile": "simplified"},
        ) as http:
            body = {"model_id": "tuneship-tiny", "deployment_name": "short"}
            created = await http.post("/deployments", json=body)
            path = f"/deployments/{created.json()['deployment_id']}"
            return [
                await http.get("/models"),
                created,
                await http.get(path),
                await http.get("/deployments"),
                await http.delete(path),
            ]

    answers = service.run(talk())
    assert [one.status_code for one in answers] == [200, 201, 200, 200, 200]


def test_the_typed_client_always_gets_both_shapes(start: Start) -> None:
    service = start(api_profile="simplified")

    async def talk() -> bool:
        client = service.client()
        wanted = DeploymentCreate(model_name="tuneship-tiny", deployment_name="typed")
        created = await client.deployments.create(wanted)
        got = await client.deployments.get(created.id)
        assert (got.id, got.model_name, got.region) == (created.id, "tuneship-tiny", "local")
        page = await client.deployments.list()
        assert (page.pagination is None, (await client.models.list()).pagination is None) == (
            False,
            False,
        )
        await client.deployments.delete(created.id)
        await client.close()
        return page.deployments[0].id == created.id

    assert service.run(talk())
