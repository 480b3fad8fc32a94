"""A resource is neither trained nor served once a restart finds that one of its safeguards is gone."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.models.conversion import ADAPTER
from tests.support.objects.files import tar_of
from tests.support.service.in_process import Service
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start,
    start_job,
)
from tests.support.waiting import until
from tuneship.client import ApiError
from tuneship.contract.deployments import DeploymentUpdate
from tuneship.contract.generation import Generate
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.service.recovery import recover

ISOLATED = {"network_isolation": True}
HIPAA = {"compliance_mode": "hipaa"}
LOST = "security_settings.network_isolation cannot be enforced here any more (GET /healthz)"
LOST_MODE = (
    "security_settings.network_isolation, security_settings.compliance_mode cannot be enforced here any more "
    "(GET /healthz); security_settings.compliance_mode needs network_isolation, which is not enforced here"
)
LOST_WAY = (
    "security_settings.compliance_mode cannot be enforced here any more (GET /healthz); "
    "security_settings.compliance_mode needs a certificate, a declared proxy, or a service that listens on loopback"
)
CHANGES = pytest.mark.parametrize(
    ("settings", "change", "why"),
    [
        (ISOLATED, {"isolates": False}, LOST),
        (HIPAA, {"isolates": False}, LOST_MODE),
        (HIPAA, {"host": "0.0.0.0"}, LOST_WAY),  # noqa: S104 - such an address is what is refused
    ],
)
Restart = Callable[..., Service]


@pytest.fixture
def first(start: Callable[..., Service]) -> Callable[..., Service]:
    """Start a service that has everything the mode needs."""

    def make(**settings: Any) -> Service:
        service = start(private_networks=("10.0.0.0/8",), **settings)
        service.come_over_tls()
        return service

    return make


@pytest.fixture
def restart() -> Iterator[Restart]:
    """Restart a service on its folder with other settings."""
    with ExitStack() as opened:

        def again(ended: Service, **settings: Any) -> Service:
            ended.halt()
            kept = {
                name: getattr(ended.settings, name)
                for name in ("database_url", "private_networks", "concurrent_jobs")
            }
            service = Service(ended.settings.data_dir, **(kept | settings))
            recover(service.parts, None)
            service.come_over_tls()
            return opened.enter_context(service)

        yield again


def deployment(service: Service, deployment_id: str) -> dict[str, Any]:
    return service.call("GET", f"/v1/deployments/{deployment_id}").json()


def ask(service: Service, deployment_id: str) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 1}
    return service.call("POST", f"/v1/deployments/{deployment_id}/generate", json=body)


def touch(service: Service, deployment_id: str) -> None:
    """Send an update, which brings a failed deployment back where that is possible."""
    path = f"/v1/deployments/{deployment_id}"
    assert service.call("PATCH", path, json={"tags": {}}).json()["status"] == "updating"


def failed(service: Service, deployment_id: str) -> str:
    """Wait until the deployment has failed, and return the reason."""
    service.until(lambda: deployment(service, deployment_id)["status"] == "failed")
    error = deployment(service, deployment_id)["error"]
    assert error["code"] == "deployment_error"
    return error["message"].removeprefix("the model cannot be served: ")


@CHANGES
def test_a_deployment_fails_and_an_update_brings_it_back_where_its_safeguards_hold_again(
    first: Callable[..., Service], restart: Restart, settings: dict[str, Any], change: Any, why: str
) -> None:
    service = first()
    guarded = service.deployment("guarded", security_settings=settings)
    plain = service.deployment("plain")
    weaker = restart(service, **change)
    assert failed(weaker, guarded) == why
    weaker.until(lambda: ask(weaker, plain).status_code == 200)
    assert ask(weaker, guarded).status_code == 409
    touch(weaker, guarded)
    assert failed(weaker, guarded) == why
    mended = restart(weaker)
    assert failed(mended, guarded) == why, "nobody has asked for it"
    touch(mended, guarded)
    mended.until(lambda: deployment(mended, guarded)["status"] == "running")
    assert ask(mended, guarded).status_code == 200


def test_requests_before_the_keepers_judgement_are_refused(
    first: Callable[..., Service], restart: Restart
) -> None:
    service = first()
    tuned = service.model()
    guarded = service.deployment("guarded", model_name=tuned, security_settings=ISOLATED)
    weaker = restart(service, isolates=False)
    failed(weaker, guarded)
    weaker.halt()
    touch(weaker, guarded)  # it is updating from here on, and nobody judges it
    refused = ask(weaker, guarded)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "deployment_error")
    assert refused.json()["error"]["message"] == f"the model cannot be served: {LOST}"
    assert not any(one.adapters for one in weaker.engines.replicas)


def test_one_that_sleeps_fails_too_and_is_not_woken(
    first: Callable[..., Service], restart: Restart
) -> None:
    service = first(preload_base_models=False)
    options: dict[str, Any] = {"min_replicas": 0, "auto_scaling": True}
    sleeper = service.deployment("sleeper", security_settings=ISOLATED, **options)

    def is_asleep() -> bool:
        service.clock.ahead += timedelta(seconds=2 * service.settings.auto_scaling_idle_s)
        return deployment(service, sleeper)["current_replicas"] == 0

    service.until(is_asleep)
    assert deployment(service, sleeper)["status"] == "running"
    weaker = restart(service, isolates=False, preload_base_models=False)
    assert failed(weaker, sleeper) == LOST
    assert ask(weaker, sleeper).status_code == 409
    assert not weaker.engines.replicas


def test_a_base_model_that_moved_to_another_engine_is_not_served_with_what_that_lacks(
    first: Callable[..., Service], restart: Restart, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    entry = {"id": "theirs", "path": str(SHIPPED / "tuneship-tiny")}
    file.write_text(yaml.safe_dump({"models": [entry]}))
    service = first(model_catalogue=file)
    guarded = service.deployment("guarded", model_name="theirs", security_settings=ISOLATED)
    file.write_text(yaml.safe_dump({"models": [{**entry, "runtime": "vllm"}]}))
    why = "security_settings.network_isolation cannot be had with the base model, which vllm serves now"
    assert failed(restart(service, model_catalogue=file), guarded) == why


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"r": 128}, "has rank 128, and vllm serves this base model with --max-lora-rank 64"),
        ({"r": 8, "alpha_pattern": {"q_proj": 32}}, "has the option alpha_pattern, which vllm"),
        ({"r": 8, "rank_pattern": {"q_proj": 4}}, "has the option rank_pattern, which vllm"),
    ],
)
def test_a_model_is_not_deployed_once_its_base_moved_to_an_engine_that_cannot_serve_it(
    first: Callable[..., Service],
    restart: Restart,
    tmp_path: Path,
    config: dict[str, Any],
    why: str,
) -> None:
    named = {"base_model_name_or_path": "theirs", **config}
    files = {**ADAPTER, "adapter_config.json": json.dumps(named).encode()}
    file = tmp_path / "models.yaml"
    entry = {"id": "theirs", "path": str(SHIPPED / "tuneship-tiny")}
    file.write_text(yaml.safe_dump({"models": [entry]}))
    service = first(model_catalogue=file)
    archive = ("a.tar", tar_of(files), "application/x-tar")
    made = service.call("POST", "/v1/models", files={"file": archive})
    assert made.status_code == 201, made.text
    model = made.json()["id"]
    served = service.deployment("before", model_name=model)

    file.write_text(yaml.safe_dump({"models": [{**entry, "runtime": "vllm"}]}))
    again = restart(service, model_catalogue=file)
    body = {"model_name": model, "deployment_name": "after"}
    refused = again.call("POST", "/v1/deployments", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "model_name")
    assert why in refused.json()["error"]["message"]
    assert why in failed(again, served)


@CHANGES
def test_jobs_fail_before_they_have_a_process(
    first: Callable[..., Service], restart: Restart, settings: dict[str, Any], change: Any, why: str
) -> None:
    service = first(concurrent_jobs=1)
    begun = service.job(security_settings=settings)
    trainer = service.trainer_of(begun)
    trainer.start_of(8)
    trainer.step(1)
    path = "/v1/fine-tuning/jobs/{}"
    service.until(lambda: service.call("GET", path.format(begun)).json()["current_step"] == 1)
    queued = service.job(security_settings=settings)
    plain = service.job()
    weaker = restart(service, **change)
    for job in (begun, queued):
        weaker.until(lambda job=job: weaker.job_status(job) == "failed")
        error = weaker.call("GET", path.format(job)).json()["error"]
        assert (error["code"], error["reason"]) == ("fine_tuning_error", "not_enforced")
        assert error["message"].startswith(f"{why}; ")
        work = service.settings.data_dir / "work" / job
        weaker.until(lambda work=work: not work.exists())  # it goes after the row says so
    assert plain in str(weaker.trainer_of(plain).folder)
    assert len(weaker.engines.trainers) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing isolates")
def test_a_real_host_that_lost_its_filter_starts_no_process_for_what_asked_for_one(
    tmp_path: Path,
) -> None:
    serve = Serve(tmp_path / "data")
    try:
        client = serve.client()
        rows = rows_file(tmp_path / "rows.jsonl", 72)
        job = start_job(client, rows, epochs=1000, isolated=True)
        guarded = running_deployment(client, "guarded", "tuneship-tiny", isolated=True)
        plain = running_deployment(client, "plain", "tuneship-tiny")
        until(lambda: client.jobs.get(job).current_step > 0)
        serve.kill()

        serve.starter = partial(start, "tests.support.faults.weak_host", sys.executable, "-m")
        serve.start()
        client = serve.client()
        ended = ended_job(client, job)
        assert ended.error is not None
        assert (ended.status, ended.error.reason) == ("failed", "not_enforced")
        until(lambda: client.deployments.get(guarded).status == "failed")
        error = client.deployments.get(guarded).error
        assert error is not None
        assert LOST in error.message
        prompt = Generate(prompt="What is case 7?", max_tokens=2)
        with pytest.raises(ApiError) as refused:
            client.with_options(tries=1).deployments.generate(guarded, prompt)
        assert refused.value.status == 409
        assert client.deployments.generate(plain, prompt).deployment_id == plain
        assert serve.workers("tuneship.training") == []
        serve.kill()

        serve.starter = start
        serve.start()
        client = serve.client()
        assert client.deployments.get(guarded).status == "failed"
        client.deployments.update(guarded, DeploymentUpdate(tags={}))
        until(lambda: client.deployments.get(guarded).status == "running")
    finally:
        serve.stop()
