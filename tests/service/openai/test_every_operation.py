"""Rules that hold for every operation of OpenAI's API: keys, scopes, tenants, bad input, planted text, the audit chain.

The cases come from the declarations: a new operation is covered by being declared.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.batches import ended
from tests.support.openai.openai_clients import bare_headers
from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.contract.declaring.scopes import PRESETS, SCOPES
from tuneship.contract.openai.declaring import OPENAI, PREFIX, OpenAIOperation
from tuneship.contract.openai.ids import result_file_of, shown_id
from tuneship.store.database.identifiers import new_id

Declared = OpenAIOperation[..., Any]
PLANTED = "zq planted text 7731"
HOOK = {
    "url": "https://127.0.0.1/hook",
    "name": "one",
    "event_types": ["batch.completed", "fine_tuning.job.failed"],
}
EVERY = pytest.mark.parametrize("operation", OPENAI, ids=lambda one: one.name)
WITH_IDS = pytest.mark.parametrize(
    "operation", [one for one in OPENAI if one.path_parameters], ids=lambda one: one.name
)
WITH_BODIES = pytest.mark.parametrize(
    "operation",
    [one for one in OPENAI if one.body_parameter and not one.is_form],
    ids=lambda one: one.name,
)
LISTS = pytest.mark.parametrize(
    "operation",
    [one for one in OPENAI if one.method == "GET" and not one.path_parameters],
    ids=lambda one: one.name,
)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose tenants both have a deployment, an endpoint, a dataset, a running job and a tuned model."""
    room: dict[str, Any] = {
        "maximum_active_jobs": 1000,
        "concurrent_jobs": 1000,
        "maximum_active_batches": 1000,
        "maximum_active_evaluations": 1000,
        "maximum_webhooks": 1000,
        "webhook_allow_cidrs": ["127.0.0.0/8"],  # where nobody answers a test
    }
    with Service(tmp_path_factory.mktemp("busy"), **room) as service:
        for client in ("alice", "bob"):
            service.endpoint(ENDPOINT, service.deployment("answers", client), client)
            service.model(client)
        yield service


def ids_of(service: Service, client: str) -> dict[str, str]:
    """Make a dataset, a job and a batch, which the operations may end, and return the ids of what a client has."""
    models = service.call("GET", "/v1/models?fine_tuned_only=true", client).json()["models"]
    dataset, job = service.dataset(client), service.job(client)
    return {
        "file_id": shown_id(dataset),
        "job_id": shown_id(job),
        "model_id": models[0]["id"],
        **batch_of(service, client),
        "webhook_id": webhook_of(service, client),
        **run_of(service, client),
    }


@pytest.fixture(scope="module")
def theirs(busy: Service) -> dict[str, str]:
    """Ids of what Bob has, of which no test ends anything."""
    return ids_of(busy, "bob")


@pytest.fixture(scope="module")
def ours(busy: Service) -> dict[str, str]:
    """Ids of what Alice has, of which no test ends anything."""
    return ids_of(busy, "alice")


def webhook_of(service: Service, client: str) -> str:
    headers = bare_headers(service, client)
    made = service.call("POST", f"{PREFIX}webhook_endpoints", None, headers=headers, json=HOOK)
    assert made.status_code == 200, made.text
    return made.json()["id"]


def batch_of(service: Service, client: str) -> dict[str, str]:
    """Make a batch that waits for its turn, and return its id and that of its file."""
    headers = bare_headers(service, client)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": ENDPOINT, "prompt": PLANTED}  # type: ignore[assignment]
    file = service.call(
        "POST",
        "/openai/v1/files",
        None,
        headers=headers,
        data={"purpose": "batch"},
        files={"file": ("night.jsonl", jsonl(line))},
    ).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = service.call("POST", "/openai/v1/batches", None, headers=headers, json=body)
    assert made.status_code == 200, made.text
    return {"batch_id": made.json()["id"], "batch_file_id": file}


EVAL: dict[str, Any] = {
    "data_source_config": {"type": "custom", "item_schema": {"type": "object"}},
    "testing_criteria": [
        {
            "type": "string_check",
            "name": "same",
            "input": "{{sample.output_text}}",
            "reference": "{{item.right}}",
            "operation": "eq",
        }
    ],
}
RUN: dict[str, Any] = {
    "data_source": {
        "type": "completions",
        "model": ENDPOINT,
        "source": {"type": "file_content", "content": [{"item": {"right": PLANTED}}]},
        "input_messages": {
            "type": "template",
            "template": [{"role": "user", "content": PLANTED}],
        },
    }
}


def made_by(service: Service, client: str, path: str, body: Any) -> str:
    headers = bare_headers(service, client)
    made = service.call("POST", f"{PREFIX}{path}", None, headers=headers, json=body)
    assert made.status_code == 200, made.text
    return made.json()["id"]


def run_of(service: Service, client: str) -> dict[str, str]:
    """Make an eval with a run that has ended, or waits where no answer comes."""
    eval_id = made_by(service, client, "evals", EVAL)
    run_id = made_by(service, client, f"evals/{eval_id}/runs", RUN)
    if service.engines.may_answer.is_set():
        path = f"/v1/evaluations/{run_id}"
        service.until(lambda: service.call("GET", path, client).json()["status"] == "completed")
    item = f"outputitem_{run_id.partition('_')[2]}-0"
    return {"eval_id": eval_id, "run_id": run_id, "output_item_id": item}


def missing_ids() -> dict[str, str]:
    job = new_id("ft")
    return {
        "file_id": shown_id(new_id("ds")),
        "job_id": shown_id(job),
        "model_id": f"ft:tuneship-tiny:m:{job[3:]}",
        "batch_id": new_id("batch"),
        "webhook_id": new_id("wh"),
        "batch_file_id": shown_id(new_id("ds")),
        "eval_id": new_id("eval"),
        "run_id": new_id("evl"),
        "output_item_id": "outputitem_" + "0" * 24 + "-0",
    }


def options_of(operation: Declared, ids: dict[str, str]) -> dict[str, Any]:
    bodies: dict[str, Any] = {
        "openai_create_chat_completion": {
            "model": ENDPOINT,
            "messages": [{"role": "user", "content": PLANTED}],
        },
        "openai_create_completion": {"model": ENDPOINT, "prompt": PLANTED},
        "openai_create_embeddings": {"model": ENDPOINT, "input": PLANTED},
        "openai_create_response": {"model": ENDPOINT, "input": PLANTED},
        "openai_create_batch": {
            "input_file_id": ids["batch_file_id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
        "openai_create_eval": EVAL,
        "openai_update_eval": {"name": "another"},
        "openai_create_eval_run": RUN,
        "openai_create_webhook": HOOK,
        "openai_update_webhook": {"name": "another"},
        "openai_rotate_webhook_secret": {},
        "openai_test_webhook": {"event_type": "batch.completed"},
        "openai_create_job": {"model": "tuneship-tiny", "training_file": ids["file_id"]},
    }
    if operation.is_form:
        return {"data": {"purpose": "fine-tune"}, "files": {"file": ("x.jsonl", jsonl(*LINES))}}
    if operation.body_parameter is None:
        return {}
    assert operation.name in bodies, f"there is no valid body of {operation.name} here"
    return {"json": bodies[operation.name]}


def path_of(operation: Declared, ids: dict[str, str]) -> str:
    return re.sub(r"{(\w+)(?::path)?}", lambda found: ids[found[1]], operation.path)


def call(service: Service, operation: Declared, path: str, **options: Any) -> httpx.Response:
    headers = {**options.pop("headers", bare_headers(service)), **options.pop("more", {})}
    return service.call(operation.method, path, None, headers=headers, **options)


def essence(answer: httpx.Response) -> Any:
    return answer.status_code, answer.headers["content-type"], answer.text


@EVERY
def test_without_a_key_nothing_is_answered(busy: Service, operation: Declared) -> None:
    ids = missing_ids()
    options = options_of(operation, ids)
    for headers in ({}, {"Authorization": "Bearer " + PLANTED}, {"X-Client-ID": "alice"}):
        answer = call(busy, operation, path_of(operation, ids), headers=headers, **options)
        assert answer.status_code in (401, 429)
        assert PLANTED not in answer.text


@EVERY
def test_a_key_without_the_scope_is_refused_and_recorded(
    busy: Service, operation: Declared
) -> None:
    key = busy.key_headers("alice", SCOPES - {operation.scope})["Authorization"]
    ids = missing_ids()
    options = options_of(operation, ids)
    headers = {"Authorization": key}
    answer = call(busy, operation, path_of(operation, ids), headers=headers, **options)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    last = entries(busy)[-1]
    assert (last["action"], last["status"]) == (operation.name, 403)


@EVERY
def test_an_operation_is_opened_by_its_scope_alone(busy: Service, operation: Declared) -> None:
    """The ids do not exist, so a scope that lets the request through leads to 404 at most."""
    key = busy.key_headers("alice", frozenset({operation.scope}))["Authorization"]
    ids = missing_ids()
    options = options_of(operation, ids)
    headers = {"Authorization": key}
    answer = call(busy, operation, path_of(operation, ids), headers=headers, **options)
    assert answer.status_code not in (401, 403), answer.text


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_opens_the_operations_of_its_scopes_and_no_other(
    busy: Service, preset: str
) -> None:
    headers = {"Authorization": busy.key_headers("alice", PRESETS[preset])["Authorization"]}
    ids = missing_ids()
    for operation in OPENAI:
        options = options_of(operation, ids)
        answer = call(busy, operation, path_of(operation, ids), headers=headers, **options)
        is_open = operation.scope in PRESETS[preset]
        assert (answer.status_code != 403) == is_open, (operation.name, answer.text)


# Operations that do more than their scope names, with what they need beside it.
FURTHER = [
    ("openai_list_files", "jobs:read", {"params": {"purpose": "fine-tune-results"}}),
    ("openai_get_file", "jobs:read", {}),
    ("openai_get_file_content", "generate", {}),
    ("openai_create_chat_completion", "deployments:write", {}),
    ("openai_create_completion", "deployments:write", {}),
    ("openai_create_response", "deployments:write", {}),
    ("openai_create_embeddings", "deployments:write", {}),
    ("openai_create_eval_run", "deployments:write", {}),
    ("openai_delete_model", "deployments:write", {}),
]


@pytest.mark.parametrize(
    ("name", "scope", "options"), FURTHER, ids=lambda one: one if isinstance(one, str) else ""
)
def test_an_operation_that_does_more_than_its_scope_says_needs_another(
    start: Callable[..., Service], name: str, scope: str, options: dict[str, Any]
) -> None:
    (operation,) = (one for one in OPENAI if one.name == name)
    service = start()
    model = service.model()
    job = service.call("GET", f"/v1/models/{model}").json()["fine_tuning_job_id"]
    ids = missing_ids() | {"file_id": result_file_of(job), "model_id": model}
    options = options_of(operation, ids) | options
    if scope == "generate":
        ids["file_id"] = output_of_a_batch(service)
    elif name == "openai_delete_model":  # which has a deployment from its first request
        service.call("POST", CHAT, json={"model": model, **MESSAGES})
    elif scope == "deployments:write":
        options["json"] = json.loads(json.dumps(options["json"]).replace(ENDPOINT, model))
    if name == "openai_create_eval_run":
        ids["eval_id"] = made_by(service, "alice", "evals", EVAL)
    before = service.call("GET", "/v1/deployments").json()["deployments"]

    for scopes, status in ((SCOPES - {scope}, 403), (frozenset({operation.scope, scope}), 200)):
        headers = {"Authorization": service.key_headers("alice", scopes)["Authorization"]}
        answer = call(service, operation, path_of(operation, ids), headers=headers, **options)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["code"] == "missing_scope"
            assert scope in answer.json()["error"]["message"]
            assert service.call("GET", "/v1/deployments").json()["deployments"] == before


CHAT = "/openai/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}


def output_of_a_batch(service: Service) -> str:
    service.endpoint(ENDPOINT, service.deployment("answers"))
    done = ended(service, batch_of(service, "alice")["batch_id"])
    return done["output_file_id"]


def entries(service: Service) -> list[Any]:
    """All entries of Alice's audit log."""
    found: list[Any] = []
    after: dict[str, str] = {}
    while True:
        page = service.call("GET", "/v1/audit", params={"limit": 1000, **after}).json()
        if not page["entries"]:
            return found
        found += page["entries"]
        after = {"after": page["pagination"]["after"]}


@WITH_IDS
def test_another_tenants_id_names_nothing(
    busy: Service, operation: Declared, theirs: dict[str, str], ours: dict[str, str]
) -> None:
    before = state_of_bob(busy)
    options = options_of(operation, ours)
    paths = [path_of(operation, ids) for ids in (theirs, missing_ids())]
    if "file_id" in operation.path_parameters:
        job = busy.call("GET", "/v1/fine-tuning/jobs?status=completed", "bob").json()["jobs"][0]
        result = {"file_id": result_file_of(job["id"])}
        paths.append(path_of(operation, result))
        paths.append(path_of(operation, {"file_id": theirs["batch_file_id"]}))
    answers = [call(busy, operation, path, **options) for path in paths]
    assert {answer.status_code for answer in answers} == {404}
    assert essence(answers[0]) == essence(answers[1])
    assert state_of_bob(busy) == before


def state_of_bob(service: Service) -> list[str]:
    paths = ("datasets", "fine-tuning/jobs", "models", "deployments", "endpoints")
    texts = [service.call("GET", f"/v1/{path}?limit=100", "bob").text for path in paths]
    return [re.sub(r'"(updated_at|status)":"[^"]*"', "", text) for text in texts]


@pytest.mark.parametrize("name", ["openai_create_job", "openai_create_batch"])
def test_another_tenants_file_in_a_body_names_nothing(
    busy: Service, name: str, theirs: dict[str, str]
) -> None:
    (operation,) = (one for one in OPENAI if one.name == name)
    answers = [
        call(busy, operation, operation.path, **options_of(operation, ids))
        for ids in (theirs, missing_ids())
    ]
    assert answers[0].status_code == 404
    assert essence(answers[0]) == essence(answers[1])


@LISTS
def test_a_list_shows_nothing_of_another_tenant(
    busy: Service, operation: Declared, theirs: dict[str, str]
) -> None:
    answer = call(busy, operation, operation.path)
    assert answer.status_code == 200
    assert not [one for one in theirs.values() if one in answer.text]


@EVERY
def test_planted_text_comes_back_nowhere(busy: Service, operation: Declared) -> None:
    ids = {
        "file_id": "file-" + PLANTED,
        "job_id": "ftjob-" + PLANTED,
        "model_id": PLANTED,
        "batch_id": "batch_" + PLANTED,
        "webhook_id": "wh_" + PLANTED,
        "eval_id": "eval_" + PLANTED,
        "run_id": "evl_" + PLANTED,
        "output_item_id": PLANTED,
    }
    options = options_of(operation, missing_ids())
    places: list[dict[str, Any]] = [
        {"params": {PLANTED: PLANTED}},
        {"params": {"limit": PLANTED}},
        {"params": {"after": PLANTED}},
        {"more": {"OpenAI-Project": PLANTED}},
        {"params": {"order": PLANTED}},
    ]
    path = path_of(operation, ids)
    for place in places:
        answer = call(busy, operation, path, **options, **place)
        assert 400 <= answer.status_code < 500, (place, answer.text)
        assert set(answer.json()["error"]) - {"details"} == {"message", "type", "param", "code"}
        assert "planted" not in answer.text
    assert not [line for line in busy.log.texts if "planted" in line]
    assert not [one for one in entries(busy) if "planted" in json.dumps(one)]


BODIES = [
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"model": NaN}',
    b'{"model": "a", "model": "b"}',
    json.dumps({PLANTED: PLANTED}).encode(),
    json.dumps({"model": {PLANTED: PLANTED}}).encode(),
    json.dumps({"model": PLANTED, "stop": [[PLANTED]], "metadata": {PLANTED: 7}}).encode(),
    b'{"model": "\\u0000"}',
    b"[" * 40 + b"]" * 40,
]


@WITH_BODIES
def test_a_bad_body_is_refused_in_openais_form(busy: Service, operation: Declared) -> None:
    path = path_of(operation, missing_ids())
    for body in BODIES:
        media = {"Content-Type": "application/json"}
        answer = call(busy, operation, path, content=body, more=media)
        assert answer.status_code in (400, 422), (body, answer.text)
        assert set(answer.json()["error"]) - {"details"} == {"message", "type", "param", "code"}
        assert "planted" not in answer.text
    answer = call(busy, operation, path, content=b"{}", more={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert "error" in answer.json()


@EVERY
def test_a_change_is_recorded_under_its_own_name(busy: Service, operation: Declared) -> None:
    if operation.name == "openai_delete_model":
        busy.model()
    if operation.name in ("openai_cancel_batch", "openai_cancel_eval_run"):
        busy.engines.may_answer.clear()  # else it would have ended
    ids = ids_of(busy, "alice")
    if operation.name == "openai_delete_file":
        ids["file_id"] = shown_id(busy.dataset())
    before = len(entries(busy))
    answer = call(busy, operation, path_of(operation, ids), **options_of(operation, ids))
    busy.engines.may_answer.set()
    refused = {
        "openai_pause_job": 400,
        "openai_resume_job": 400,
        "openai_get_file_content": 403,
        "openai_test_webhook": 400,
    }
    assert answer.status_code == refused.get(operation.name, 200), answer.text
    # The request for the entries is recorded, too.
    new = [one for one in entries(busy)[before:] if one["action"] == operation.name]
    expected = operation.is_change or answer.status_code == 403
    assert len(new) == int(expected)
    if operation.is_change:
        assert new[0]["resource_id"] is not None
        assert "-" not in new[0]["resource_id"].partition(":")[0]
