"""`compliance_mode: hipaa`: the safeguards it turns on, its prerequisites, its refusals, and what others learn."""

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.objects.files import contents_below
from tests.support.service.in_process import ANSWER, Service, split
from tuneship.service.access.hipaa import GOOD_KEY, GOOD_WAY, MODE
from tuneship.store.database import tables

HIPAA = {"compliance_mode": "hipaa"}
UNION = {
    "audit_logging": True,
    "compliance_mode": "hipaa",
    "encryption_level": "maximum",
    "network_isolation": True,
}
PRIVATE = {"private_endpoints": True}
CERTIFICATE = "a certificate, a declared proxy, or a service that listens on loopback"
SECRET = "Q7-planted-patient-text"
Change = dict[str, Any]
KINDS = pytest.mark.parametrize("kind", ["job", "deployment"])


@pytest.fixture
def hospital(start: Callable[..., Service]) -> Callable[..., Service]:
    """Start a service whose tenant connects over TLS with a key of 90 days."""

    def make(days: int | None = 90, **settings: Any) -> Service:
        service = start(private_networks=("10.0.0.0/8", "127.0.0.0/8", "::1/128"), **settings)
        service.come_over_tls(days)
        return service

    return make


def asked(
    service: Service, kind: str, settings: Mapping[str, Any], **fields: Any
) -> httpx.Response:
    if kind == "job":
        body = {"base_model": "tuneship-tiny", "model_name": "m", "dataset_id": service.dataset()}
        path = "/v1/fine-tuning/jobs"
    else:
        body = {"model_name": "tuneship-tiny", "deployment_name": "d"}
        path = "/v1/deployments"
    return service.call("POST", path, json={**body, "security_settings": settings, **fields})


def missing(refused: httpx.Response) -> set[str]:
    """The prerequisites that a refusal names."""
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (422, MODE), refused.text
    assert {one["code"] for one in error["details"]} == {"missing_prerequisite"}
    return {one["message"].removeprefix("needs ") for one in error["details"]}


@KINDS
def test_the_mode_turns_its_safeguards_on_and_get_shows_them(
    hospital: Callable[..., Service], kind: str
) -> None:
    service = hospital()
    created = asked(service, kind, {**HIPAA, "audit_logging": True})
    assert created.status_code == 201, created.text
    collection = "fine-tuning/jobs" if kind == "job" else "deployments"
    shown = service.call("GET", f"/v1/{collection}/{created.json()['id']}").json()[
        "security_settings"
    ]
    assert shown == UNION | (PRIVATE if kind == "deployment" else {})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("job", "network_isolation", False),
        ("job", "encryption_level", "standard"),
        ("job", "audit_logging", False),
        ("deployment", "network_isolation", False),
        ("deployment", "private_endpoints", False),
        ("deployment", "encryption_level", "standard"),
        ("deployment", "audit_logging", False),
    ],
)
def test_a_field_that_says_otherwise_is_refused_by_its_name(
    hospital: Callable[..., Service], kind: str, field: str, value: Any
) -> None:
    error = asked(hospital(), kind, {**HIPAA, field: value}).json()["error"]
    assert (error["code"], error["param"]) == ("validation_error", f"security_settings.{field}")
    assert error["details"][0]["code"] == "contradiction"


@KINDS
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"isolates": False}, {"network_isolation, which is not enforced here"}),
        ({"host": "0.0.0.0"}, {CERTIFICATE}),  # noqa: S104 - such an address is what is refused
        ({"days": None}, {GOOD_KEY}),
        ({"days": 91}, {GOOD_KEY}),
        (
            {"isolates": False, "host": "::", "days": None},
            {"network_isolation, which is not enforced here", CERTIFICATE, GOOD_KEY},
        ),
    ],
)
def test_every_missing_prerequisite_is_named(
    hospital: Callable[..., Service], kind: str, change: Change, named: set[str]
) -> None:
    service = hospital(**change)
    assert missing(asked(service, kind, HIPAA)) == named
    assert not rows_of(service, tables.jobs) + rows_of(service, tables.deployments)


@KINDS
def test_a_create_over_plain_http_from_elsewhere_is_refused(
    hospital: Callable[..., Service], kind: str
) -> None:
    service = hospital()
    service.url = "http://service.test"
    assert missing(asked(service, kind, HIPAA)) == {GOOD_WAY}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "service.test"])  # noqa: S104
def test_a_declared_proxy_or_a_certificate_makes_up_for_an_open_address(
    hospital: Callable[..., Service], host: str
) -> None:
    assert missing(asked(hospital(host=host), "job", HIPAA)) == {CERTIFICATE}
    for more in ({"trusted_proxies": "10.1.1.1"}, {"tls_certificate": "c", "tls_key": "k"}):
        created = asked(hospital(host=host, **more), "job", HIPAA)
        assert created.status_code == 201, created.text


def rows_of(service: Service, table: sa.Table) -> list[dict[str, Any]]:
    with service.database.read() as connection:
        return [dict(row) for row in connection.execute(sa.select(table)).mappings()]


def audit_rows_of(service: Service) -> list[dict[str, Any]]:
    service.parts.audit.link_all(service.database)
    return rows_of(service, tables.audit)


def put_in_mode(service: Service, table: sa.Table, identifier: str) -> None:
    """Store the mode as an installation would that enforces all of it."""
    settings = UNION | (PRIVATE if table is tables.deployments else {})
    with service.database.write() as connection:
        change = sa.update(table).where(table.c.id == identifier)
        connection.execute(change.values(security_settings=settings))


def job_of(model: str) -> str:
    return "ft_" + model.rpartition(":")[2]


OPERATIONS = [
    ("GET", "/v1/fine-tuning/jobs/{job}", None),
    ("GET", "/v1/fine-tuning/jobs", None),
    ("GET", "/v1/fine-tuning/jobs/{job}/metrics", None),
    ("GET", "/v1/fine-tuning/jobs/{job}/logs", None),
    ("POST", "/v1/fine-tuning/jobs/{job}/cancel", {}),
    ("GET", "/v1/deployments/{deployment}", None),
    ("GET", "/v1/deployments", None),
    ("GET", "/v1/deployments/{deployment}/metrics", None),
    ("GET", "/v1/deployments/{deployment}/logs", None),
    ("POST", "/v1/deployments/{deployment}/generate", {"prompt": "a"}),
    ("POST", "/v1/endpoints/{endpoint}/generate", {"prompt": "a"}),
    ("PATCH", "/v1/deployments/{deployment}", {"max_replicas": 2}),
    ("DELETE", "/v1/deployments/{deployment}?force=true", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model}", None),
    ("GET", "/v1/models/{model}/limits", None),
    ("DELETE", "/v1/models/{model}", None),
]


def test_resources_in_the_mode_answer_only_good_keys_on_good_connections(
    hospital: Callable[..., Service],
) -> None:
    service = hospital(concurrent_jobs=1)
    model = service.model()
    job, deployment = service.job(), service.deployment("d")
    endpoint = service.canary("e", {deployment: 100})
    for one in (job, job_of(model)):
        put_in_mode(service, tables.jobs, one)
    put_in_mode(service, tables.deployments, deployment)
    service.headers["old"] = service.key_headers("alice")
    names = {"job": job, "deployment": deployment, "endpoint": endpoint, "model": model}
    for method, template, body in OPERATIONS:
        path = template.format(**names)
        service.url = "http://service.test"
        plain = service.call(method, path, json=body)
        assert (plain.status_code, plain.json()["error"]["code"]) == (400, "invalid_request_error")
        assert "over TLS" in plain.json()["error"]["message"], template
        service.url = "https://service.test"
        old = service.call(method, path, "old", json=body)
        assert (old.status_code, old.json()["error"]["code"]) == (403, "permission_denied"), (
            template
        )
        written = audit_rows_of(service)[-2:]
        assert [row["status"] for row in written] == [400, 403], "refusals are written down"
        answer = service.call(method, path, json=body)
        assert answer.status_code == 200, f"{template} {answer.text}"
        assert audit_rows_of(service)[-1]["status"] == 200, template


@pytest.mark.parametrize(
    ("scheme", "address", "headers", "status"),
    [
        ("https", "10.0.0.9", {}, 200),
        ("http", "10.0.0.9", {}, 400),
        ("http", "10.0.0.9", {"X-Forwarded-Proto": "https"}, 400),
        ("http", "127.0.0.1", {}, 200),
        ("http", "::1", {}, 200),
        ("http", "::ffff:127.0.0.1", {}, 200),
        ("http", "127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, 400),
        ("http", "127.0.0.1", {"Forwarded": "for=127.0.0.1"}, 400),
        ("http", "127.0.0.1", {"Via": "1.1 proxy"}, 400),
        ("http", "unknown", {}, 400),
    ],
)
def test_plain_http_is_for_this_machine_only_and_not_behind_an_unknown_proxy(
    hospital: Callable[..., Service], scheme: str, address: str, headers: Change, status: int
) -> None:
    service = hospital()
    deployment = service.deployment("d")
    put_in_mode(service, tables.deployments, deployment)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(service.app, client=(address, 1))
        url = f"{scheme}://service.test/v1/deployments/{deployment}"
        async with httpx.AsyncClient(transport=transport) as http:
            return await http.get(url, headers=service.headers["alice"] | headers)

    assert service.run(ask()).status_code == status


@pytest.mark.parametrize(
    ("proxies", "scheme", "status"),
    [("127.0.0.0/8", "https", 200), ("127.0.0.0/8", "http", 400), ("", "https", 400)],
)
def test_a_proxy_is_believed_when_it_is_declared_and_says_https(
    hospital: Callable[..., Service], proxies: str, scheme: str, status: int
) -> None:
    service = hospital(trusted_proxies=proxies)
    deployment = service.deployment("d")
    put_in_mode(service, tables.deployments, deployment)
    service.listen()
    said = {"X-Forwarded-For": "10.9.1.1", "X-Forwarded-Proto": scheme}
    answer = service.call("GET", f"/v1/deployments/{deployment}", headers=said)
    assert answer.status_code == status


def test_an_answer_from_memory_is_held_to_the_same(hospital: Callable[..., Service]) -> None:
    service = hospital()
    deployment = service.deployment("d")
    put_in_mode(service, tables.deployments, deployment)
    path, key = f"/v1/deployments/{deployment}", {"Idempotency-Key": "k"}
    patch = lambda: service.call("PATCH", path, json={"tags": {"a": "b"}}, headers=key)  # noqa: E731
    assert [patch().status_code, patch().headers["idempotent-replayed"]] == [200, "true"]
    service.url = "http://service.test"
    assert patch().status_code == 400


def test_no_update_weakens_the_mode(hospital: Callable[..., Service]) -> None:
    service = hospital()
    deployment = service.deployment("d")
    put_in_mode(service, tables.deployments, deployment)
    path = f"/v1/deployments/{deployment}"
    for settings in ({"compliance_mode": "none"}, {"audit_logging": False}, None):
        refused = service.call("PATCH", path, json={"security_settings": settings})
        assert refused.status_code == 422
        assert refused.json()["error"]["param"] == "security_settings"
    shown = service.call("GET", path).json()["security_settings"]
    assert shown == UNION | PRIVATE


@pytest.mark.parametrize("settings", [{}, {"audit_logging": True, "private_endpoints": True}])
def test_a_model_that_was_trained_in_the_mode_is_served_in_it_only(
    hospital: Callable[..., Service], settings: Change
) -> None:
    service = hospital()
    model = service.model()
    put_in_mode(service, tables.jobs, job_of(model))
    error = asked(service, "deployment", settings, model_name=model).json()["error"]
    assert (error["code"], error["param"]) == ("validation_error", MODE)
    assert error["details"][0]["code"] == "lesser_mode"
    created = asked(service, "deployment", HIPAA, model_name=model)
    assert created.status_code == 201, created.text
    other, name = service.model(), {"deployment_name": "other"}
    assert asked(service, "deployment", settings, model_name=other, **name).status_code == 201


def test_a_job_in_the_mode_learns_from_what_came_safely_only(
    hospital: Callable[..., Service],
) -> None:
    service = hospital()
    service.headers["old"] = service.key_headers("alice")
    safe, by_old_key = service.dataset(), service.dataset("old")
    service.url = "http://service.test"
    in_the_open = service.dataset()
    service.url = "https://service.test"

    def merged(*sources: str) -> str:
        body = {"dataset_ids": sources, "name": "both"}
        return service.call("POST", "/v1/datasets/merge", json=body).json()["id"]

    def refusal(**datasets: str) -> tuple[int, str | None]:
        answer = asked(service, "job", HIPAA, **datasets)
        error = answer.json().get("error", {})
        assert "did not come by" in error.get("message", "did not come by")
        return answer.status_code, error.get("param")

    for unsafe in (in_the_open, by_old_key, merged(safe, in_the_open)):
        assert refusal(dataset_id=unsafe) == (409, "dataset_id")
        assert refusal(dataset_id=safe, validation_dataset_id=unsafe) == (
            409, "validation_dataset_id",
        )  # fmt: skip
        assert asked(service, "job", {}, dataset_id=unsafe).status_code == 201
    for good in (safe, merged(safe, service.dataset())):
        assert refusal(dataset_id=good, validation_dataset_id=safe) == (201, None)


def test_networks_that_would_have_no_effect_are_refused_in_the_mode(
    hospital: Callable[..., Service],
) -> None:
    service, networks = hospital(), {"subnet_ids": ["subnet-1"]}
    refused = asked(service, "deployment", HIPAA, vpc_config=networks)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "vpc_config")
    assert asked(service, "deployment", {}, vpc_config=networks).status_code == 201


def test_an_address_keeps_the_mode_or_never_has_it(hospital: Callable[..., Service]) -> None:
    service = hospital()
    safe, other, plain = (service.deployment(name) for name in ("safe", "other", "plain"))
    for one in (safe, other):
        put_in_mode(service, tables.deployments, one)
    places = {
        mode: {
            "canary-endpoints": service.canary(f"canary {mode}", {member: 100}),
            "endpoints": service.endpoint(f"plain {mode}", member),
        }
        for mode, member in {"safe": safe, "plain": plain}.items()
    }

    def refused(method: str, path: str, body: Change) -> None:
        answer = service.call(method, f"/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "deployment_error")
        assert "all or none" in answer.json()["error"]["message"]

    refused("POST", "canary-endpoints", split({safe: 100, plain: 0}, name="mixed"))
    lease = {"seconds": 60, "fallback": split({plain: 100})["deployments"]}
    for mode, own, strange in (("safe", safe, plain), ("plain", plain, safe)):
        canary, single = (f"{kind}/{made}" for kind, made in places[mode].items())
        refused("PATCH", canary, split({own: 90, strange: 10}))
        refused("PATCH", canary, split({strange: 100}))
        refused("PATCH", single, {"deployment_id": strange})
    canary = f"canary-endpoints/{places['safe']['canary-endpoints']}"
    refused("PATCH", canary, split({safe: 90, other: 10}, lease=lease))
    allowed = service.call("PATCH", f"/v1/{canary}", json=split({safe: 90, other: 10}))
    assert allowed.status_code == 200, allowed.text
    service.url = "http://service.test"
    assert service.call("PATCH", f"/v1/{canary}", json=split({safe: 100})).status_code == 400


def test_an_address_that_an_earlier_version_mixed_can_go_back(
    hospital: Callable[..., Service],
) -> None:
    service = hospital()
    before, after = service.deployment("before"), service.deployment("after")
    path = f"/v1/canary-endpoints/{service.canary('c', {before: 90, after: 10})}"
    put_in_mode(service, tables.deployments, after)
    for shares in ({before: 50, after: 50}, {before: 100, after: 0}, {before: 100}):
        assert service.call("PATCH", path, json=split(shares)).status_code == 200
    assert service.call("PATCH", path, json=split({after: 100})).status_code == 409


def test_events_tell_ids_states_and_numbers_only(hospital: Callable[..., Service]) -> None:
    service = hospital()
    job = service.job(model_name=SECRET, tags={"ward": SECRET})
    deployment = service.deployment(SECRET, tags={"ward": SECRET})
    put_in_mode(service, tables.jobs, job)
    put_in_mode(service, tables.deployments, deployment)
    before = len(rows_of(service, tables.events))
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job) == "completed")
    path = f"/v1/deployments/{deployment}"
    assert service.call("PATCH", path, json={"tags": {"floor": SECRET}}).status_code == 200
    service.until(lambda: service.deployment_status(deployment) == "running")
    service.call("DELETE", path)
    service.until(lambda: service.deployment_status(deployment) == "deleted")
    events = rows_of(service, tables.events)[before:]
    kinds = {row["type"] for row in events}
    assert {"fine_tuning.job.succeeded", "deployment.updated", "deployment.deleted"} <= kinds
    assert SECRET not in repr(events)
    for row in events:
        texts = {name for name, value in row["data"].items() if isinstance(value, str)}
        assert texts <= {"status", "from", "to", "reason", "code"}, row["data"]


def test_prompts_and_completions_are_never_stored(hospital: Callable[..., Service]) -> None:
    service = hospital()
    deployment = service.deployment("d")
    put_in_mode(service, tables.deployments, deployment)
    path = f"/v1/deployments/{deployment}/generate"
    for stream in (False, True):
        body = {"prompt": SECRET, "stop": [SECRET], "stream": stream}
        answer = service.call("POST", path, json=body, headers={"Idempotency-Key": f"k{stream}"})
        assert answer.status_code == 200, answer.text
        assert "idempotent-replayed" not in answer.headers
    service.supervisor.records.store_metrics()
    service.supervisor.records.store_logs()
    stored = "".join(repr(rows_of(service, table)) for table in tables.METADATA.sorted_tables)
    stored += "".join(service.log.texts)
    stored += repr(list(contents_below(service.settings.data_dir).values()))
    assert deployment in stored
    assert not rows_of(service, tables.idempotency)
    assert SECRET not in stored
    assert ANSWER not in stored
