"""A security setting takes effect or is refused by name, and the service says what this host can enforce."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.service.in_process import Service
from tuneship.service.catalogues.base_models import SHIPPED

JOB = {"base_model": "tuneship-tiny", "model_name": "m"}
DEPLOYMENT = {"model_name": "tuneship-tiny", "deployment_name": "d"}


def asked(service: Service, kind: str, settings: dict[str, Any]) -> Any:
    if kind == "job":
        body = {**JOB, "dataset_id": service.dataset(), "security_settings": settings}
        return service.call("POST", "/v1/fine-tuning/jobs", json=body)
    return service.call(
        "POST", "/v1/deployments", json={**DEPLOYMENT, "security_settings": settings}
    )


@pytest.mark.parametrize("kind", ["job", "deployment"])
@pytest.mark.parametrize("name", ["audit_logging", "network_isolation"])
def test_enforced_settings_are_accepted_and_shown(service: Service, kind: str, name: str) -> None:
    created = asked(service, kind, {name: True})
    assert created.status_code == 201, created.text
    collection = "fine-tuning/jobs" if kind == "job" else "deployments"
    shown = service.call("GET", f"/v1/{collection}/{created.json()['id']}").json()[
        "security_settings"
    ]
    assert [key for key, value in shown.items() if value is True] == [name]


@pytest.mark.parametrize("kind", ["job", "deployment"])
def test_isolation_is_refused_where_the_host_cannot_isolate(
    start: Callable[..., Service], kind: str
) -> None:
    service = start(isolates=False)
    refused = asked(service, kind, {"network_isolation": True})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (422, "security_settings.network_isolation")
    assert error["details"][0]["code"] == "not_enforced"
    assert service.call("GET", "/healthz", None).json()["capabilities"] == {
        "encryption_level": True,
        "audit_logging": True,
        "compliance_mode": False,
        "network_isolation": False,
        "private_endpoints": True,
    }


@pytest.mark.parametrize(
    ("networks", "status"),
    [
        (("10.0.0.0/8",), 200),
        (("10.0.0.0/16", "::1/128"), 200),
        (("192.168.0.0/16",), 404),
        ((), 404),
    ],
)
def test_a_private_deployment_answers_only_to_the_listed_networks(
    start: Callable[..., Service], networks: tuple[str, ...], status: int
) -> None:
    service = start(private_networks=networks)
    settings = {"security_settings": {"private_endpoints": True}}
    private = service.deployment("private", **settings)
    public = service.deployment("public")
    endpoint = service.canary("shop", {private: 100})
    prompt = {"json": {"prompt": "a"}}
    places = f"/v1/deployments/{private}", f"/v1/endpoints/{endpoint}"
    for place, noun in zip(places, ("deployment", "endpoint"), strict=True):
        answer = service.call("POST", f"{place}/generate", **prompt)
        assert answer.status_code == status, answer.text
        if status == 404:
            missing = service.call("POST", f"{place[:-3]}xxx/generate", **prompt).json()["error"]
            hidden = answer.json()["error"]
            assert {**hidden, "request_id": ""} == {**missing, "request_id": ""}, noun
    assert service.call("GET", places[0]).status_code == 200, "its record is not hidden"
    assert service.call("POST", f"/v1/deployments/{public}/generate", **prompt).status_code == 200


@pytest.mark.parametrize(("proxies", "status"), [(("127.0.0.0/8",), 200), ((), 404)])
def test_an_address_that_was_forwarded_is_believed_from_a_declared_proxy_only(
    start: Callable[..., Service], proxies: tuple[str, ...], status: int
) -> None:
    service = start(private_networks=("10.9.0.0/16",), trusted_proxies=proxies)
    private = service.deployment("private", security_settings={"private_endpoints": True})
    service.listen()
    answer = service.call(
        "POST",
        f"/v1/deployments/{private}/generate",
        json={"prompt": "a"},
        headers={"X-Forwarded-For": "10.9.1.1"},
    )
    assert answer.status_code == status


# Headers that reveal a proxy.
OF_PROXIES = [
    "Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Proto",
    "X-Forwarded-Server", "X-Original-Forwarded-For", "X-Real-IP", "X-Client-IP", "Client-IP", "True-Client-IP",
    "CF-Connecting-IP", "CF-Connecting-IPv6", "Fastly-Client-IP", "Fly-Client-IP", "X-Cluster-Client-IP",
    "X-ProxyUser-IP", "WL-Proxy-Client-IP", "X-Azure-ClientIP", "X-NF-Client-Connection-IP", "X-Amzn-Trace-Id",
]  # fmt: skip


def generated(service: Service, deployment: str, headers: dict[str, str]) -> int:
    path = f"/v1/deployments/{deployment}/generate"
    return service.call("POST", path, json={"prompt": "a"}, headers=headers).status_code


def test_behind_a_proxy_that_nobody_declared_a_private_deployment_does_not_exist(
    start: Callable[..., Service],
) -> None:
    """The header counts by its presence, not by its value. The same rule holds for hipaa mode."""
    service = start()
    service.listen()
    service.headers["alice"] = service.key_headers("alice", lifetime=timedelta(days=90))
    private = service.deployment("private", security_settings={"private_endpoints": True})
    mode = service.deployment("mode", security_settings={"compliance_mode": "hipaa"})
    public = service.deployment("public")
    assert [generated(service, one, {}) for one in (private, mode)] == [200, 200]
    for name in OF_PROXIES:
        header = {name: "127.0.0.1"}
        statuses = [generated(service, one, header) for one in (private, mode, public)]
        assert statuses == [404, 400, 200], name


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ({"X-Forwarded-For": "10.9.1.1", "X-Forwarded-Proto": "https"}, [200, 200]),
        ({"X-Forwarded-For": "10.9.1.1", "X-Forwarded-Proto": "http"}, [200, 400]),
        ({"X-Forwarded-For": "10.9.1.1"}, [200, 400]),
        ({"X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "https"}, [404, 404]),
        ({"X-Forwarded-For": "10.9.1.1, "}, [404, 400]),
        ({"Forwarded": "for=10.9.1.1;proto=https"}, [404, 400]),
        ({"X-Real-IP": "10.9.1.1", "X-Forwarded-Proto": "https"}, [404, 404]),
    ],
)
def test_a_declared_proxy_has_to_say_the_address_and_the_scheme(
    start: Callable[..., Service], headers: dict[str, str], statuses: list[int]
) -> None:
    """It must use the headers that are read: otherwise the address would be the proxy's own, perhaps a private one."""
    service = start(trusted_proxies="127.0.0.0/8", private_networks="10.9.0.0/16,127.0.0.0/8")
    service.listen()
    service.headers["alice"] = service.key_headers("alice", lifetime=timedelta(days=90))
    private = service.deployment("private", security_settings={"private_endpoints": True})
    mode = service.deployment("mode", security_settings={"compliance_mode": "hipaa"})
    assert [generated(service, one, headers) for one in (private, mode)] == statuses


@pytest.mark.parametrize(
    ("name", "value"), [("network_isolation", True), ("encryption_level", "maximum")]
)
def test_safeguards_that_a_foreign_engine_cannot_keep_are_refused(
    start: Callable[..., Service], tmp_path: Path, name: str, value: Any
) -> None:
    file = tmp_path / "models.yaml"
    entry = {"id": "theirs", "path": str(SHIPPED / "tuneship-tiny"), "runtime": "vllm"}
    file.write_text(yaml.safe_dump({"models": [entry]}))
    service = start(model_catalogue=file)
    body = {**DEPLOYMENT, "model_name": "theirs", "security_settings": {name: value}}
    refused = service.call("POST", "/v1/deployments", json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["error"]["param"] == f"security_settings.{name}"
