"""A batch that asks a model in hipaa mode keeps the rules of the mode, and so do its files."""

from collections.abc import Callable
from typing import Any

from tests.support.openai.batches import batch, call, ended, lines_of, request, upload
from tests.support.service.in_process import Service


def test_its_requests_its_record_and_its_answers_need_what_the_mode_needs(
    start: Callable[..., Service],
) -> None:
    service = start(private_networks=("10.0.0.0/8",))
    service.come_over_tls()
    settings = {"compliance_mode": "hipaa"}
    deployment = service.deployment("safe", security_settings=settings)
    lines = [request(name, deployment) for name in "ab"]
    done = ended(service, batch(service, *lines))
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert len(lines_of(service, done["output_file_id"])) == 2

    entries = service.call("GET", "/v1/audit?limit=1000").json()["entries"]
    of_batch = [one for one in entries if one["resource_id"] == done["id"]]
    asked = [one for one in of_batch if one["action"] == "openai_create_completion"]
    assert len(asked) == 2
    assert all(one["completion_tokens"] > 0 for one in asked)
    assert "openai_create_batch" in {one["action"] for one in of_batch}

    paths = [
        f"batches/{done['id']}",
        "batches",
        f"files/{done['output_file_id']}",
        f"files/{done['output_file_id']}/content",
    ]
    service.url = "http://service.test"
    assert {call(service, "GET", path).status_code for path in paths} == {400}
    service.come_over_tls(days=None)
    assert {call(service, "GET", path).status_code for path in paths} == {403}


def test_a_file_that_came_over_plain_http_asks_no_such_model(
    start: Callable[..., Service],
) -> None:
    service = start(private_networks=("10.0.0.0/8",))
    service.come_over_tls()
    deployment = service.deployment("safe", security_settings={"compliance_mode": "hipaa"})
    service.url = "http://service.test"
    file_id = upload(service, [request("a", deployment)])
    service.come_over_tls()
    done = ended(service, batch(service, file_id=file_id))
    assert done["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    (line,) = lines_of(service, done["error_file_id"])
    error: dict[str, Any] = line["response"]["body"]["error"]
    assert line["response"]["status_code"] == 400
    assert "hipaa" in error["message"]
