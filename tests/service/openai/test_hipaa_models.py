"""A model that was trained in hipaa mode keeps its rules where it is asked by its name through OpenAI's API."""

from collections.abc import Callable
from typing import Any

from tests.support.service.in_process import ANSWER, Service

CHAT = "/openai/v1/chat/completions"
SECRET = "zq planted text 7731"


def test_it_is_served_in_that_mode_and_only_as_the_mode_allows(
    start: Callable[..., Service],
) -> None:
    service = start(private_networks=("10.0.0.0/8",))
    service.come_over_tls()
    settings = {"compliance_mode": "hipaa"}
    made: dict[str, Any] = {"security_settings": settings, "dataset_id": service.dataset()}
    job_id = service.job(**made)
    trainer = service.trainer_of(job_id)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    model = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["fine_tuned_model"]

    body = {"model": model, "messages": [{"role": "user", "content": SECRET}]}
    answer = service.call("POST", CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    (deployment,) = service.call("GET", "/v1/deployments").json()["deployments"]
    shown = service.call("GET", f"/v1/deployments/{deployment['id']}").json()
    assert shown["security_settings"]["compliance_mode"] == "hipaa"
    assert shown["security_settings"]["private_endpoints"]

    # The same over plain HTTP, and with a key that lasts too long.
    service.url = "http://service.test"
    job_path = f"/openai/v1/fine_tuning/jobs/{job_id.replace('ft_', 'ftjob-')}"
    for path in (job_path, f"{job_path}/events", "/openai/v1/fine_tuning/jobs"):
        assert service.call("GET", path).status_code == 400
    refused = service.call("POST", CHAT, json=body)
    assert refused.status_code == 400
    service.come_over_tls(days=None)
    too_long = service.call("POST", CHAT, json=body)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (403, "missing_scope")
    assert SECRET not in refused.text + too_long.text
    assert not [line for line in service.log.texts if SECRET in line]
