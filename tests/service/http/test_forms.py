"""Each operation answers with exactly the fields of the API description, plus the additions that are documented."""

import json
import re
from datetime import timedelta

import pytest

from tests.support.service.in_process import ANSWER, LINES, Service, jsonl, split

JOB_CREATED = {
    "id", "base_model", "dataset_id", "validation_dataset_id", "fine_tuning_method", "model_name",
    "status", "created_at", "updated_at", "validation_frequency", "hyperparameters",
    "compute_config", "tags",
}  # fmt: skip
JOB = JOB_CREATED | {
    "fine_tuned_model", "started_at", "current_epoch", "total_epochs", "current_step",
    "total_steps", "training_loss", "validation_loss", "ends_learnt", "devices",
    "security_settings",
    "queue_position", "tokens_per_second", "estimated_completion_at",
}  # fmt: skip
DATASET_ITEM = {
    "id", "name", "format", "num_examples", "total_tokens", "created_at", "status", "tags",
}  # fmt: skip
DEPLOYMENT_ITEM = {
    "id", "model_name", "deployment_name", "status", "endpoint", "created_at", "updated_at",
    "compute_type", "instance_type", "tags", "deployment_id", "model_id",
}  # fmt: skip
REPLICAS = {"min_replicas", "max_replicas", "auto_scaling"}
DEPLOYMENT_CREATED = DEPLOYMENT_ITEM | REPLICAS | {"region"}
DEPLOYMENT = DEPLOYMENT_CREATED | {
    "current_replicas", "model_config", "security_settings", "health",
}  # fmt: skip
ENDPOINT = {
    "id", "name", "deployments", "url", "created_at", "updated_at", "status", "version", "lease",
    "rollout_id", "large_keys", "paused", "reverted",
}  # fmt: skip
PAGINATION = {"total", "limit", "offset", "next_offset"}
SECOND = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


pytestmark = pytest.mark.both_databases(postgres="soak")


@pytest.fixture(scope="module")
def deployment(shared: Service) -> str:
    return shared.deployment("forms", tags={"team": "a"})


def test_a_dataset_is_created_fetched_and_listed_in_its_three_forms(shared: Service) -> None:
    fields = {"name": "d", "format": "instruction", "tags": '{"k":"v"}', "description": "x"}
    files = {"file": ("x", jsonl(*LINES))}
    answer = shared.call("POST", "/v1/datasets", data=fields, files=files)
    created = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/datasets/{created['id']}"
    assert set(created) == DATASET_ITEM | {"description", "tokenizer"}
    got = shared.call("GET", f"/v1/datasets/{created['id']}").json()
    assert set(got) == DATASET_ITEM | {"description", "tokenizer", "token_distribution"}
    assert sum(got["token_distribution"].values()) == got["total_tokens"] > 0
    page = shared.call("GET", "/v1/datasets?tags[k]=v&limit=1").json()
    assert (page["datasets"][0], set(page["datasets"][0])) == (
        {key: got[key] for key in DATASET_ITEM},
        DATASET_ITEM,
    )
    assert set(page["pagination"]) == PAGINATION
    assert SECOND.fullmatch(created["created_at"])


def test_a_merged_dataset_names_its_sources(shared: Service) -> None:
    sources = [shared.dataset(), shared.dataset()]
    body = {"dataset_ids": sources, "name": "m"}
    answer = shared.call("POST", "/v1/datasets/merge", json=body)
    merged = answer.json()
    assert answer.headers["location"] == f"/v1/datasets/{merged['id']}"
    own = {"description", "source_datasets", "tokenizer", "duplicate_examples"}
    assert set(merged) == DATASET_ITEM | own
    assert (merged["source_datasets"], merged["num_examples"]) == (sources, 2 * len(LINES))


def test_validate_reports_a_bad_file_with_200_and_without_its_text(shared: Service) -> None:
    secret = "the patient's own words"
    content = jsonl(*LINES, {"instruction": secret}, [secret])
    answer = shared.call(
        "POST",
        "/v1/datasets/validate",
        data={"format": "instruction"},
        files={"file": ("x", content)},
    )
    report = answer.json()
    assert set(report) == {
        "is_valid", "num_examples", "total_tokens", "token_distribution", "format_details",
        "suggestions", "errors", "warnings", "error_count", "errors_truncated", "warning_count",
        "tokenizer",
    }  # fmt: skip
    assert (answer.status_code, report["is_valid"], report["error_count"]) == (200, False, 2)
    found = [(one["line"], one["field"], one["code"]) for one in report["errors"]]
    assert found == [(5, "response", "missing_field"), (6, None, "not_object")]
    assert secret not in answer.text


def test_a_job_is_created_and_fetched_in_its_two_forms(shared: Service) -> None:
    body = {"base_model": "tuneship-tiny", "dataset_id": shared.dataset(), "model_name": "m"}
    answer = shared.call("POST", "/v1/fine-tuning/jobs", json=body)
    created = answer.json()
    assert answer.headers["location"] == f"/v1/fine-tuning/jobs/{created['id']}"
    assert set(created) == JOB_CREATED
    assert created["status"] == "queued"
    assert created["hyperparameters"]["lora_alpha"] == 2 * created["hyperparameters"]["lora_rank"]
    got = shared.call("GET", f"/v1/fine-tuning/jobs/{created['id']}").json()
    assert set(got) == JOB
    assert {got[name] for name in ("current_epoch", "current_step", "total_steps")} == {0}
    unknown_yet = ("fine_tuned_model", "training_loss", "validation_loss")
    assert {got[name] for name in unknown_yet} == {None}
    cancelled = shared.call("POST", f"/v1/fine-tuning/jobs/{created['id']}/cancel")
    assert set(cancelled.json()) == {"id", "status", "updated_at"}
    assert cancelled.json()["status"] == "cancelling"
    assert cancelled.status_code == 200


def test_metrics_and_logs_of_a_job_have_their_arrays_and_their_cursor(shared: Service) -> None:
    job_id = shared.job()
    trainer = shared.trainer_of(job_id)
    trainer.start_of(3)
    for step in (1, 2):
        trainer.step(step)
    path = f"/v1/fine-tuning/jobs/{job_id}"
    shared.until(lambda: len(shared.call("GET", f"{path}/metrics").json()["steps"]) == 2)
    metrics = shared.call("GET", f"{path}/metrics").json()
    arrays = {
        "steps", "training_loss", "validation_loss", "learning_rate", "epochs", "accuracy",
        "perplexity",
    }  # fmt: skip
    assert set(metrics) == {"job_id", "created_at"} | arrays
    assert {len(metrics[name]) for name in arrays} == {2}
    first = shared.call("GET", f"{path}/logs?limit=1").json()
    assert set(first) == {"logs", "pagination"}
    assert set(first["logs"][0]) == {"timestamp", "level", "message"}
    assert re.fullmatch(r".*\.\d{3}Z", first["logs"][0]["timestamp"])
    after = first["pagination"]["after"]
    rest = shared.call("GET", f"{path}/logs", params={"after": after}).json()
    assert rest["logs"][0] != first["logs"][0]
    last = rest["pagination"]["after"]
    end = shared.call("GET", f"{path}/logs", params={"after": last}).json()
    assert end == {"logs": [], "pagination": {"after": last}}


def test_a_cursor_of_another_job_is_refused(shared: Service) -> None:
    one, two = shared.job(), shared.job()
    after = shared.call("GET", f"/v1/fine-tuning/jobs/{one}/logs").json()["pagination"]["after"]
    moved = shared.call("GET", f"/v1/fine-tuning/jobs/{two}/logs", params={"after": after})
    assert (moved.status_code, moved.json()["error"]["param"]) == (422, "after")


def test_models_list_base_models_and_tuned_ones_in_one_form(shared: Service) -> None:
    tuned = shared.model()
    page = shared.call("GET", "/v1/models").json()
    fields = {
        "id", "name", "version", "description", "parameters", "context_length",
        "supported_fine_tuning", "base_model", "fine_tuning_job_id", "created_at",
        "fine_tuning_method", "ends_learnt", "appended_end", "tags",
    }  # fmt: skip
    # What is known of a base model's origin is there beside them.
    assert all(set(one) - {"licence", "source"} == fields for one in page["models"])
    assert [one["id"] for one in page["models"]][:2] == ["tuneship-tiny", tuned]
    base, name, suffix = re.fullmatch(r"ft:(.+):(.+):(.+)", tuned).groups()  # type: ignore[union-attr]
    assert (base, name, f"ft_{suffix}") == (
        "tuneship-tiny",
        "m",
        page["models"][1]["fine_tuning_job_id"],
    )
    only = shared.call("GET", "/v1/models?fine_tuned_only=true").json()
    assert all(one["base_model"] == "tuneship-tiny" for one in only["models"])


def test_a_deployment_has_its_create_get_and_update_forms(shared: Service) -> None:
    body = {"model_id": "tuneship-tiny", "deployment_name": "forms 2", "tags": {"a": "1", "b": "2"}}
    answer = shared.call("POST", "/v1/deployments", json=body)
    created = answer.json()
    assert set(created) == DEPLOYMENT_CREATED
    assert (created["status"], created["id"]) == ("creating", created["deployment_id"])
    assert created["endpoint"].endswith(f"/v1/deployments/{created['id']}/generate")
    path = f"/v1/deployments/{created['id']}"
    assert set(shared.call("GET", path).json()) == DEPLOYMENT
    change = {"tags": {"b": None, "c": "3"}, "model_config": {"default_temperature": 0}}
    updated = shared.call("PATCH", path, json=change).json()
    assert set(updated) == DEPLOYMENT_ITEM | REPLICAS | {"model_config"}
    assert updated["status"] == "updating"
    assert updated["tags"] == {"a": "1", "c": "3"}
    assert updated["model_config"]["default_temperature"] == 0
    assert updated["model_config"]["default_top_p"] == 1.0
    shared.until(lambda: shared.deployment_status(created["id"]) == "running")
    gone = shared.call("DELETE", path)
    assert (gone.status_code, set(gone.json())) == (200, {"id", "deployment_id", "status"})
    shared.until(lambda: shared.deployment_status(created["id"]) == "deleted")


def test_a_deleted_deployment_is_shown_for_a_day_and_deleting_it_again_is_no_error(
    service: Service,
) -> None:
    deployment = service.deployment("short")
    for _ in range(2):
        assert service.call("DELETE", f"/v1/deployments/{deployment}").status_code == 200
    service.until(lambda: service.deployment_status(deployment) == "deleted")
    service.clock.ahead = timedelta(hours=24, minutes=1)
    assert service.call("GET", f"/v1/deployments/{deployment}").status_code == 404


def test_generation_answers_in_the_described_form(shared: Service, deployment: str) -> None:
    path = f"/v1/deployments/{deployment}/generate"
    answer = shared.call("POST", path, json={"prompt": " as sent ", "temperature": 0})
    reply = answer.json()
    assert set(reply) == {"id", "deployment_id", "prompt", "completion", "finish_reason", "usage"}
    assert (reply["prompt"], reply["completion"]) == (" as sent ", ANSWER)
    assert (reply["finish_reason"], reply["deployment_id"]) == ("stop", deployment)
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer.headers["x-deployment-id"] == deployment


def test_a_stop_text_is_cut_off(shared: Service, deployment: str) -> None:
    body = {"prompt": "a", "stop": ["of the", "skin"]}
    reply = shared.call("POST", f"/v1/deployments/{deployment}/generate", json=body).json()
    assert (reply["completion"], reply["finish_reason"]) == ("Diseases ", "stop")


def test_a_completion_that_is_cut_short_says_length(shared: Service, deployment: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    reply = shared.call("POST", f"/v1/deployments/{deployment}/generate", json=body).json()
    assert (reply["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 1)


def test_a_canary_endpoint_answers_with_its_version_as_etag(
    shared: Service, deployment: str
) -> None:
    body = split({deployment: 100}, name="forms")
    answer = shared.call("POST", "/v1/canary-endpoints", json=body)
    created = answer.json()
    assert set(created) == ENDPOINT
    assert created["deployments"] == body["deployments"]
    assert answer.headers["etag"] == '"1"'
    path = f"/v1/canary-endpoints/{created['id']}"
    assert answer.headers["location"] == path
    assert created["url"].endswith(f"/v1/endpoints/{created['id']}/generate")
    same = shared.call("PATCH", path, json=split({deployment: 100}), headers={"If-Match": '"1"'})
    assert (same.json()["version"], same.headers["etag"]) == (2, '"2"')
    page = shared.call("GET", "/v1/canary-endpoints?name=forms").json()
    assert page["canary_endpoints"] == [same.json()]
    assert set(page["pagination"]) == PAGINATION


def test_deployment_metrics_have_the_described_series(shared: Service, deployment: str) -> None:
    shared.call("POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "a"})
    path = f"/v1/deployments/{deployment}/metrics?interval=1h"
    got = shared.call("GET", path).json()
    assert set(got) == {
        "deployment_id", "start_time", "end_time", "interval", "metrics", "summary",
        "summary_start_time", "summary_end_time", "in_flight", "generate_timeout_seconds",
    }  # fmt: skip
    series = got["metrics"]
    times = {"timestamps", "complete"}
    assert set(series["latency"]) == times | {
        "average", "p50", "p95", "p99", "histogram", "cells", "cells_per_token",
    }  # fmt: skip
    assert set(series["throughput"]) == times | {"requests_per_second"}
    assert set(series["error_rate"]) == times | {
        "percentage", "request_count", "error_count", "cancelled_count", "refused_count", "error_callers",
        "cancelled_callers", "refused_callers",
    }  # fmt: skip
    assert set(series["token_usage"]) == times | {
        "total",
        "input",
        "output",
        "empty_count",
        "cells",
    }
    assert set(got["summary"]["latency"]) == {"average", "p50", "p95", "p99"}
    assert set(got["summary"]["token_usage"]) == {"total", "input", "output"}
    assert series["error_rate"]["request_count"][-1] >= 1
    only = shared.call("GET", f"{path}&metrics[]=latency&metrics=throughput").json()["metrics"]
    assert {name for name, one in only.items() if one is not None} == {"latency", "throughput"}


def test_a_trailing_slash_is_the_same_address(shared: Service) -> None:
    assert shared.call("GET", "/v1/models/").json() == shared.call("GET", "/v1/models").json()


@pytest.mark.parametrize("media", ["application/json; charset=UTF-8", "Application/JSON"])
def test_the_media_type_of_json_is_read_as_the_standard_says(shared: Service, media: str) -> None:
    body = {"base_model": "tuneship-tiny", "dataset_id": shared.dataset(), "model_name": "m"}
    headers = {"Content-Type": media}
    answer = shared.call(
        "POST", "/v1/fine-tuning/jobs/", headers=headers, content=json.dumps(body).encode()
    )
    assert answer.status_code == 201, answer.text


def test_addresses_in_answers_are_the_services_own_whatever_host_was_asked(
    shared: Service, deployment: str
) -> None:
    elsewhere = {"Host": "evil.example", "X-Forwarded-Host": "evil.example"}
    answer = shared.call("GET", f"/v1/deployments/{deployment}", headers=elsewhere)
    assert answer.json()["endpoint"].startswith("http://service.test/v1/")
    assert "evil.example" not in answer.text + str(answer.headers)


def test_pages_walk_through_all_entries_once(shared: Service) -> None:
    wanted = {shared.dataset(tags='{"walk":"yes"}') for _ in range(5)}
    found: list[str] = []
    offset: int | None = 0
    while offset is not None:
        page = shared.call("GET", f"/v1/datasets?tags[walk]=yes&limit=2&offset={offset}").json()
        found += [one["id"] for one in page["datasets"]]
        offset = page["pagination"]["next_offset"]
    assert (len(found), set(found)) == (5, wanted)
    beyond = shared.call("GET", "/v1/datasets?tags[walk]=yes&offset=50").json()
    assert (beyond["datasets"], beyond["pagination"]["total"]) == ([], 5)


@pytest.mark.parametrize("key", ['a"b', "a'b", "a.b", "a[0]", "$", "ä", "a\\b"])
def test_a_tag_of_any_key_can_be_filtered(shared: Service, key: str) -> None:
    dataset = shared.dataset(tags=json.dumps({key: "v"}))
    page = shared.call("GET", "/v1/datasets", params={f"tags[{key}]": "v"})
    if "[" in key:
        assert page.status_code == 422
    else:
        assert [one["id"] for one in page.json()["datasets"]] == [dataset]


def test_tags_are_counted_on_the_merged_record(shared: Service) -> None:
    deployment = shared.deployment("tagged", tags={f"a{number}": "v" for number in range(64)})
    path = f"/v1/deployments/{deployment}"
    refused = shared.call("PATCH", path, json={"tags": {"b": "v"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "tags")
    assert shared.call("PATCH", path, json={"tags": {"b": "v", "a1": None}}).status_code == 200


def test_health_needs_no_key(shared: Service) -> None:
    answer = shared.call("GET", "/healthz", None)
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "status": "ok",
            "capabilities": {
                "encryption_level": True,
                "audit_logging": True,
                "compliance_mode": True,
                "network_isolation": True,
                "private_endpoints": True,
            },
        },
    )
