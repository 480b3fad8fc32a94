"""An evaluation of a deployment in hipaa mode keeps the rules of the mode, from the request that makes it on."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.service.evaluations import PLANTED, PlayedAnswers, rows
from tests.support.service.in_process import Service, jsonl

HIPAA = {"security_settings": {"compliance_mode": "hipaa"}}


@pytest.fixture
def hospital(start: Callable[..., Service]) -> PlayedAnswers:
    """Two deployments in the mode, and a tenant who connects over TLS with a key of 90 days."""
    service = start(private_networks=("10.0.0.0/8",))
    service.come_over_tls()
    return PlayedAnswers(service).set_up(**HIPAA)


def operations(made: str) -> list[tuple[str, str]]:
    path = f"/v1/evaluations/{made}"
    return [
        ("GET", path),
        ("GET", f"{path}/results"),
        ("GET", f"{path}/comparison/{made}"),
        ("GET", "/v1/evaluations"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ]


def statuses(service: Service, made: str) -> set[int]:
    return {service.call(method, path).status_code for method, path in operations(made)}


def entries(service: Service) -> list[dict[str, Any]]:
    return service.call("GET", "/v1/audit?limit=1000").json()["entries"]


def test_it_is_made_read_and_ended_only_as_the_mode_wants(hospital: PlayedAnswers) -> None:
    service = hospital.service
    good = service.headers["alice"]
    # None of its answers has come yet.
    service.engines.may_answer.clear()
    begun = hospital.create(max_examples=10)
    for days, url, status in ((90, "http", 400), (None, "https", 403)):
        service.come_over_tls(days)
        service.url = f"{url}://service.test"
        refused = service.call("POST", "/v1/evaluations", json=hospital.body())
        assert refused.status_code == status, refused.text
        assert statuses(service, begun) == {status}
    service.headers["alice"], service.url = good, "https://service.test"
    assert hospital.shown(begun)["status"] in ("queued", "running")
    assert len(service.call("GET", "/v1/evaluations").json()["evaluations"]) == 1
    service.engines.may_answer.set()
    assert hospital.ended(begun)["examples"]["scored"] == 10
    assert service.call("DELETE", f"/v1/evaluations/{begun}").status_code == 200


def test_each_request_and_each_look_is_in_the_audit_trail(hospital: PlayedAnswers) -> None:
    service = hospital.service
    made = hospital.create(max_examples=10, tags={"ward": PLANTED})
    hospital.ended(made)
    hospital.results(made)

    found = [one for one in entries(service) if one["resource_id"] == made]
    answered = [one for one in found if one["action"] == "create_evaluation"]
    # The request that made it, and those of each example to both deployments.
    assert len(answered) == 1 + 2 * 10
    assert sum((one["completion_tokens"] or 0) > 0 for one in answered) == 20
    looks = {one["action"] for one in found}
    assert {"get_evaluation", "list_evaluation_results"} <= looks
    assert PLANTED not in str(found)
    events = service.call("GET", "/v1/events?limit=100").json()["events"]
    (shown,) = [one["data"] for one in events if one["type"] == "evaluation.completed"]
    assert (shown["verdict"], shown["reason"], shown["scored"]) == ("hold", "too_few_examples", 10)
    assert "chapters" not in str(shown)


def test_examples_that_came_over_plain_http_are_asked_of_no_such_model(
    hospital: PlayedAnswers,
) -> None:
    service = hospital.service
    service.url = "http://service.test"
    in_the_open = service.dataset(content=jsonl(*rows(20)))
    service.url = "https://service.test"
    answer = service.call("POST", "/v1/evaluations", json=hospital.body(dataset_id=in_the_open))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        *(409, "dataset_error", "dataset_id"),
    )
    assert hospital.asked == []


def test_scores_of_the_mode_stay_in_it(hospital: PlayedAnswers) -> None:
    """An evaluation of another model beside stored scores of the mode is in it, too."""
    service = hospital.service
    first = hospital.ended(hospital.create(baseline=None, max_examples=10, stop_early=False))
    plain = service.deployment("plain")
    made = hospital.create(candidate=plain, baseline=first["id"], max_examples=10)
    assert hospital.ended(made)["graders"][0]["ties"] == 10
    service.come_over_tls(days=None)
    assert service.call("GET", f"/v1/evaluations/{made}").status_code == 403
