"""A model can be asked by its name without a deployment step: one is made, sleeps, and is deleted after a day."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import openai
import pytest

from tests.support.openai.batches import batch, ended, lines_of, request, upload
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import ANSWER, Service

pytestmark = pytest.mark.both_databases(postgres="soak")

MESSAGES: Any = [{"role": "user", "content": "senile cataract"}]


def ask(service: Service, model: str, client: str = "alice") -> str | None:
    with blocking(service, client) as made:
        answer = made.chat.completions.create(model=model, messages=MESSAGES)
    return answer.choices[0].message.content


def deployments(service: Service, client: str = "alice") -> list[dict[str, Any]]:
    return service.call("GET", "/v1/deployments", client).json()["deployments"]


def test_requests_that_come_together_make_one_deployment_that_sleeps(service: Service) -> None:
    model = service.model()
    service.listen()
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: ask(service, model), range(4))) == {ANSWER}
    assert ask(service, f"{model}:ckpt-step-2") == ANSWER
    (made,) = deployments(service)
    shown = service.call("GET", f"/v1/deployments/{made['id']}").json()
    assert (shown["min_replicas"], shown["auto_scaling"]) == (0, True)
    assert shown["model_config"]["default_temperature"] == 1
    assert shown["model_config"]["max_output_tokens"] == shown["model_config"]["context_length"]
    entries = service.call("GET", "/v1/audit", params={"limit": 1000}).json()["entries"]
    actions = [one["action"] for one in entries if one["resource_id"] == made["id"]]
    assert actions == ["create_implicit_deployment"]

    with blocking(service, "bob") as bob, pytest.raises(openai.NotFoundError) as caught:
        bob.chat.completions.create(model=model, messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert deployments(service, "bob") == []
    with blocking(service) as client:
        assert client.models.delete(model).deleted
    assert deployments(service) == []


def test_an_explicit_deployment_is_used_before_one_is_made(service: Service) -> None:
    own = service.deployment("own")
    service.listen()
    assert ask(service, "tuneship-tiny") == ANSWER
    assert [one["id"] for one in deployments(service)] == [own]


def test_an_idle_one_is_deleted_after_a_day_unless_it_is_used_or_routed_to(
    service: Service,
) -> None:
    service.listen()
    for client in ("alice", "bob"):
        assert ask(service, "tuneship-tiny", client) == ANSWER
    (kept,) = deployments(service, "bob")
    service.endpoint("wanted", kept["id"], "bob")
    service.supervisor.records.store_metrics()
    service.clock.ahead += timedelta(hours=20)
    forget = service.supervisor.leader_work.retention.forget_old
    forget(service.parts.clock())
    assert len(deployments(service)) == 1
    service.clock.ahead += timedelta(hours=6)
    forget(service.parts.clock())
    service.until(lambda: deployments(service) == [])
    assert [one["id"] for one in deployments(service, "bob")] == [kept["id"]]
    # Asked again, it is there again.
    assert ask(service, "tuneship-tiny") == ANSWER


def test_an_idle_one_sleeps_and_the_next_request_wakes_it(start: Callable[..., Service]) -> None:
    service = start(auto_scaling_idle_s=0.1)
    service.listen()
    assert ask(service, "tuneship-tiny") == ANSWER
    (made,) = deployments(service)

    def replicas() -> int:
        return service.call("GET", f"/v1/deployments/{made['id']}").json()["current_replicas"]

    service.until(lambda: replicas() == 0)
    assert ask(service, "tuneship-tiny") == ANSWER
    assert [one["id"] for one in deployments(service)] == [made["id"]]


def test_an_operator_can_switch_it_off(start: Callable[..., Service]) -> None:
    service = start(openai_serve="never")
    service.listen()
    with pytest.raises(openai.NotFoundError):
        ask(service, "tuneship-tiny")
    assert deployments(service) == []


def test_a_model_of_a_job_with_audit_logging_is_served_with_it(service: Service) -> None:
    job_id = service.job(security_settings={"audit_logging": True})
    trainer = service.trainer_of(job_id)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    model = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["fine_tuned_model"]
    service.listen()
    assert ask(service, model) == ANSWER
    (made,) = deployments(service)
    shown = service.call("GET", f"/v1/deployments/{made['id']}").json()
    assert shown["security_settings"]["audit_logging"]
    entries = service.call("GET", "/v1/audit", params={"limit": 1000}).json()["entries"]
    answered = [one for one in entries if one["action"] == "openai_create_chat_completion"]
    assert answered[-1]["completion_tokens"] > 0


GENERATE = frozenset({"generate"})


def status_of(service: Service, model: str, **options: Any) -> tuple[int, str | None]:
    """Ask with a key of `generate` alone; returns the status and the code of the error."""
    headers = service.key_headers("alice", GENERATE)
    body = {"model": model, "messages": MESSAGES}
    path = "/openai/v1/chat/completions"
    answer = service.call("POST", path, None, headers=headers, json=body, **options)
    return answer.status_code, answer.json().get("error", {}).get("code")


def test_a_key_that_may_only_generate_makes_none_and_reads_what_it_lacks(service: Service) -> None:
    body = {"model": "tuneship-tiny", "messages": MESSAGES}
    headers = service.key_headers("alice", GENERATE)
    for more in ({}, {"stream": True}):
        answer = service.call(
            "POST", "/openai/v1/chat/completions", None, headers=headers, json=body | more
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "missing_scope")
        assert "ask its operator to deploy it" in error["message"]
        assert "deployments:write" in error["message"]
        assert answer.headers["x-should-retry"] == "false"
    assert deployments(service) == []
    entry = service.call("GET", "/v1/audit", params={"limit": 1000}).json()["entries"][-2]
    assert (entry["action"], entry["status"]) == ("openai_create_chat_completion", 403)
    # A name that nothing has is said to be unknown, as to every other key.
    assert status_of(service, "gpt-unknown") == (404, "model_not_found")
    assert status_of(service, f"ft:tuneship-tiny:m:{'a' * 24}") == (404, "model_not_found")


def test_a_key_that_may_only_generate_uses_those_that_are_there(
    start: Callable[..., Service],
) -> None:
    service = start(auto_scaling_idle_s=0.1)
    service.listen()
    assert ask(service, "tuneship-tiny") == ANSWER
    (made,) = deployments(service)
    path = f"/v1/deployments/{made['id']}"
    service.until(lambda: service.call("GET", path).json()["current_replicas"] == 0)
    assert status_of(service, "tuneship-tiny") == (200, None)


@pytest.mark.parametrize("scopes", [GENERATE, GENERATE | {"deployments:write"}])
def test_a_batch_makes_one_only_where_its_key_may(service: Service, scopes: frozenset[str]) -> None:
    file_id = upload(service, [request("a", "tuneship-tiny")])
    service.headers["alice"] = service.key_headers("alice", scopes)
    made = batch(service, file_id=file_id)
    service.headers["alice"] = service.key_headers("alice")
    done = ended(service, made)
    if scopes != GENERATE:
        assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        return
    (line,) = lines_of(service, done["error_file_id"])
    assert line["response"]["status_code"] == 403
    assert line["response"]["body"]["error"]["code"] == "missing_scope"
    assert deployments(service) == []
