"""Forms that make and delete things: each is the API's own operation, with its refusals in place."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.payloads import SCRIPTS
from tests.support.service.console import Browser, Form, Markup, signed_in
from tests.support.service.in_process import LINES, Service, jsonl, split

UPLOAD, CHECK = "/console/do/upload_dataset", "/console/do/validate_dataset"
BAD = jsonl(LINES[0], {"instruction": SCRIPTS[0], "response": ""}, {"response": "x"})


def fields_of(browser: Browser, page: str, action: str) -> dict[str, str]:
    return Form(browser.open(page).text, f"/console/do/{action}").fields


def send(browser: Browser, action: str, fields: dict[str, str], content: bytes) -> Any:
    """Send a form with a file, as a browser does: the file behind the other fields."""
    own = {name: text for name, text in fields.items() if name != "file"}
    return browser.post(
        action, own, files={"file": ("x.jsonl", content, "application/octet-stream")}
    )


def total(service: Service, path: str) -> int:
    return service.call("GET", f"/v1/{path}?limit=1").json()["pagination"]["total"]


def test_a_file_is_uploaded_once_and_leads_to_its_dataset(service: Service) -> None:
    browser = signed_in(service)
    fields = fields_of(browser, "/console/datasets/new", "upload_dataset")
    fields |= {"name": "notes", "description": "two wards"}
    answers = [send(browser, UPLOAD, fields, jsonl(*LINES)) for _ in range(2)]
    assert [one.status_code for one in answers] == [303, 303]
    # A double click is one request.
    assert answers[0].headers["location"] == answers[1].headers["location"]
    assert total(service, "datasets") == 1
    page = browser.open(answers[0].headers["location"]).text
    assert "notes" in page
    assert "two wards" in page
    made = answers[0].headers["location"].rpartition("/")[2]
    assert f"/console/jobs/new?dataset_id={made}" in page
    rows = service.call("GET", "/v1/audit?limit=100").json()["entries"]
    assert [one["resource_id"] for one in rows if one["action"] == "upload_dataset"][:1] == [made]


def test_every_bad_line_is_named_and_nothing_is_stored(service: Service) -> None:
    browser = signed_in(service)
    fields = fields_of(browser, "/console/datasets/new", "upload_dataset") | {"name": "notes"}
    answer = send(browser, UPLOAD, fields, BAD)
    assert answer.status_code == 422
    text = " ".join(Markup(answer.text).text.split())
    assert "Nothing was stored: the dataset has 2 problems" in text
    assert re.search(r"2 ?response ?must not be empty", text), text
    assert SCRIPTS[0] not in answer.text
    assert Form(answer.text, UPLOAD).fields["name"] == "notes"
    assert total(service, "datasets") == 0


@pytest.mark.parametrize("preset", ["admin", "viewer"])
def test_a_file_is_checked_without_being_stored(service: Service, preset: str) -> None:
    browser = signed_in(service, preset)
    page = browser.open("/console/datasets/new")
    fields = Form(page.text, UPLOAD if preset == "admin" else CHECK).fields
    good, bad = (send(browser, CHECK, fields, content) for content in (jsonl(*LINES), BAD))
    assert (good.status_code, bad.status_code) == (200, 200)
    assert "The file is good: 4 examples" in good.text
    assert "The file cannot be used: 2 problems." in bad.text
    assert total(service, "datasets") == 0
    # Who may not upload has no button, and is refused.
    assert ("Upload</button>" in page.text) == (preset == "admin")
    status = send(browser, UPLOAD, fields | {"name": "x"}, jsonl(*LINES)).status_code
    assert status == (303 if preset == "admin" else 403)


def test_an_upload_without_the_token_of_the_session_is_refused(service: Service) -> None:
    browser, other = signed_in(service), signed_in(service)
    fields = fields_of(browser, "/console/datasets/new", "upload_dataset") | {"name": "notes"}
    theirs = fields | {"form_token": other.form_token()}
    without = {name: text for name, text in fields.items() if name != "form_token"}
    for wrong in (theirs, without):
        assert send(browser, UPLOAD, wrong, jsonl(*LINES)).status_code == 403
    browser.site = "same-site"
    assert send(browser, UPLOAD, fields, jsonl(*LINES)).status_code == 403
    assert total(service, "datasets") == 0
    service.until(lambda: not [*(service.settings.data_dir / "blobs").rglob("*.part")])


def test_a_new_job_has_the_defaults_of_its_model(service: Service) -> None:
    browser = signed_in(service)
    assert "A job needs a dataset." in browser.open("/console/jobs/new").text
    data = service.dataset(name="first")
    newest = service.dataset(name="second", content=jsonl({"instruction": "a", "response": "b"}))
    page = f"/console/jobs/new?dataset_id={data}"
    fields = fields_of(browser, page, "create_job")
    assert fields["dataset_id"] == data
    assert fields_of(browser, "/console/jobs/new", "create_job")["dataset_id"] == newest
    assert fields["hyperparameters.learning_rate"] == "0.0002"
    assert "above 0 to 1, or auto" in browser.open(page).text
    refused = browser.post("/console/do/create_job", fields)
    assert refused.status_code == 400
    assert "model_name is required" in Markup(refused.text).text
    wanted = fields | {"model_name": "notes", "hyperparameters.epochs": "2"}
    answer = browser.post("/console/do/create_job", wanted)
    assert answer.status_code == 303, answer.text
    made = answer.headers["location"].rpartition("/")[2]
    job = service.call("GET", f"/v1/fine-tuning/jobs/{made}").json()
    assert (job["dataset_id"], job["hyperparameters"]["epochs"]) == (data, 2)


def test_every_answer_to_a_double_click_leads_to_what_was_made(service: Service) -> None:
    browser = signed_in(service)
    service.dataset()
    fields = fields_of(browser, "/console/jobs/new", "create_job") | {"model_name": "notes"}
    with ThreadPoolExecutor(4) as pool:
        clicks = [pool.submit(browser.post, "/console/do/create_job", fields) for _ in range(4)]
        answers = [one.result() for one in clicks]
    assert [one.status_code for one in answers] == [303] * 4
    assert len({one.headers["location"] for one in answers}) == 1
    assert total(service, "fine-tuning/jobs") == 1


def test_a_form_that_was_changed_after_going_back_is_another_request(service: Service) -> None:
    browser = signed_in(service)
    service.dataset()
    fields = fields_of(browser, "/console/jobs/new", "create_job")
    made = [
        browser.post("/console/do/create_job", fields | {"model_name": name}).headers["location"]
        for name in ("first", "first", "second")
    ]
    assert made[0] == made[1] != made[2]
    assert total(service, "fine-tuning/jobs") == 2
    sent = fields_of(browser, "/console/datasets/new", "upload_dataset")
    for name in ("one", "other"):
        assert send(browser, UPLOAD, sent | {"name": name}, jsonl(*LINES)).status_code == 303
    assert total(service, "datasets") == 3


@pytest.mark.parametrize(
    "twice",
    [
        {"hyperparameters[0].epochs": "1"},
        {"hyperparameters": "1"},
        {"hyperparameters[]": "1"},
        {"model_name.x": "1"},
        {"model_name[]": "1"},
    ],
)
def test_a_field_that_is_given_in_two_ways_is_refused(
    service: Service, twice: dict[str, str]
) -> None:
    browser = signed_in(service)
    service.dataset()
    fields = fields_of(browser, "/console/jobs/new", "create_job") | {"model_name": "notes"}
    for sent in (fields | twice, twice | fields):
        refused = browser.post("/console/do/create_job", sent)
        assert refused.status_code == 400
        assert "a field of the form is given in two ways" in refused.text
    assert total(service, "fine-tuning/jobs") == 0


def test_a_model_is_deployed_and_an_endpoint_leads_to_it(service: Service) -> None:
    browser = signed_in(service)
    assert "No deployment is running" in browser.open("/console/endpoints/new").text
    page = "/console/deployments/new?model_name=tuneship-tiny"
    fields = fields_of(browser, page, "create_deployment")
    sent = fields | {"deployment_name": "first", "model_config.max_output_tokens": "64"}
    wrong = browser.post("/console/do/create_deployment", sent | {"min_replicas": "many"})
    assert wrong.status_code == 422
    assert "min_replicas" in wrong.text.split('<p class="problem">')[1]
    answer = browser.post("/console/do/create_deployment", sent)
    assert answer.status_code == 303, answer.text
    made = answer.headers["location"].rpartition("/")[2]
    service.until(lambda: service.deployment_status(made) == "running")
    deployed = service.call("GET", f"/v1/deployments/{made}").json()
    assert deployed["model_config"]["max_output_tokens"] == 64
    chosen = fields_of(browser, "/console/endpoints/new", "create_endpoint")
    assert chosen["deployment_id"] == made
    answer = browser.post("/console/do/create_endpoint", chosen | {"name": "notes"})
    assert answer.status_code == 303, answer.text
    assert "first has 100 %" in browser.open(answer.headers["location"]).text


def test_the_traffic_is_changed_for_the_version_that_was_seen(service: Service) -> None:
    browser = signed_in(service)
    old, new = service.deployment("old"), service.deployment("new")
    plain = service.endpoint("plain", old)
    page, do = f"/console/endpoints/{plain}/traffic", "/console/do/update_endpoint"
    seen = fields_of(browser, page, "update_endpoint")
    assert seen["deployment_id"] == old
    assert browser.post(do, seen | {"deployment_id": new}).status_code == 303
    late = browser.post(do, seen | {"deployment_id": old, "idempotency_key": "0" * 32})
    assert late.status_code == 412
    assert "The traffic is unchanged: " in late.text
    body = service.call("GET", f"/v1/endpoints/{plain}").json()
    assert body["deployment_id"] == new


def test_a_split_is_made_and_changed(service: Service) -> None:
    browser = signed_in(service)
    old, new = service.deployment("old"), service.deployment("new")
    fields = fields_of(browser, "/console/endpoints/new-split", "create_canary_endpoint")
    rows = {"deployments[0].id": old, "deployments[0].traffic_percentage": "90"}
    do = "/console/do/create_canary_endpoint"
    refused = browser.post(do, fields | rows | {"name": "notes"})
    assert refused.status_code == 422
    assert "must sum to 100, not 90" in refused.text
    assert Form(refused.text, do).fields["deployments[0].id"] == old
    for wrong in ({"deployments[0]": "x"}, {"deployments": "x"}, {"deployments[0].colour": "x"}):
        assert browser.post(do, fields | {"name": "notes"} | wrong).status_code in (400, 422)
    rows |= {"deployments[1].id": new, "deployments[1].traffic_percentage": "10"}
    answer = browser.post(do, fields | rows | {"name": "notes"})
    assert answer.status_code == 303, answer.text
    place = answer.headers["location"]
    endpoint = place.rpartition("/")[2]
    seen = fields_of(browser, f"{place}/traffic", "update_canary_endpoint")
    changed = seen | {
        "deployments[0].traffic_percentage": "40",
        "deployments[1].traffic_percentage": "60",
    }
    assert browser.post("/console/do/update_canary_endpoint", changed).status_code == 303
    found = service.call("GET", f"/v1/canary-endpoints/{endpoint}").json()
    assert {one["id"]: one["traffic_percentage"] for one in found["deployments"]} == {
        old: 40,
        new: 60,
    }
    lease = {"seconds": 600, "fallback": split({old: 100, new: 0})["deployments"]}
    body = split({old: 40, new: 60}, lease=lease)
    assert service.call("PATCH", f"/v1/canary-endpoints/{endpoint}", json=body).status_code == 200
    page = browser.open(f"{place}/traffic").text
    assert "A rollout is in progress" in page
    assert "/console/do/update_canary_endpoint" not in page


def test_a_deletion_names_the_thing_and_what_refers_to_it(service: Service) -> None:
    browser = signed_in(service)
    data, model = service.dataset(name="mine"), service.model()
    deployment = service.deployment("serving", model_name=model)
    endpoint = service.endpoint("shop", deployment)
    job = service.job(dataset_id=data, model_name="at-work")

    def asked(kind: str, identifier: str, then: str = "/console") -> Any:
        name = "model_id" if kind == "model" else f"{kind.removeprefix('canary_')}_id"
        query = {name: identifier, "then": then, "back": then}
        return browser.open(f"/console/do/delete_{kind}", params=query)

    def confirm(kind: str, page: str, **more: str) -> Any:
        fields = Form(page, f"/console/do/delete_{kind}").fields
        return browser.post(f"/console/do/delete_{kind}", fields | more)

    for kind in ("dataset", "model", "deployment", "endpoint", "canary_endpoint"):
        assert browser.open(f"/console/do/delete_{kind}").status_code == 422
        sent = {"form_token": browser.form_token(), "colour": "red"}
        answer = browser.post(f"/console/do/delete_{kind}", sent)
        assert answer.status_code == 422
        assert "colour" not in answer.text

    page = asked("dataset", data).text
    assert "<dd>mine</dd>" in page
    assert f"/console/jobs/{job}" in page
    refused = confirm("dataset", page)
    assert refused.status_code == 409
    assert "Nothing was changed: " in refused.text

    page = asked("model", model).text
    assert "serving" in page
    assert confirm("model", page).status_code == 409

    page = asked("deployment", deployment).text
    assert "shop, 100 %" in page
    assert "Delete it anyway" in page
    assert confirm("deployment", page).status_code == 409
    assert service.deployment_status(deployment) == "running"

    page = asked("endpoint", endpoint).text
    assert "serving, 100 %" in page
    gone = confirm("endpoint", page, then="/console/endpoints")
    assert (gone.status_code, gone.headers["location"]) == (303, "/console/endpoints")
    assert service.call("GET", f"/v1/endpoints/{endpoint}").status_code == 404

    again = service.canary("again", {deployment: 100})
    page = asked("deployment", deployment).text
    assert "again, 100 %" in page
    assert confirm("deployment", page, force="true").status_code == 303
    assert "inactive" in json.dumps(service.call("GET", f"/v1/canary-endpoints/{again}").json())
    assert confirm("canary_endpoint", asked("canary_endpoint", again).text).status_code == 303
    service.until(lambda: service.deployment_status(deployment) == "deleted")
    assert confirm("model", asked("model", model).text).status_code == 303
    assert service.call("GET", f"/v1/models/{model}").status_code == 404


def test_a_double_click_on_delete_leads_where_a_click_leads(service: Service) -> None:
    browser, data = signed_in(service), service.dataset()
    query = {"dataset_id": data, "then": "/console/datasets", "back": f"/console/datasets/{data}"}
    page = browser.open("/console/do/delete_dataset", params=query).text
    fields = Form(page, "/console/do/delete_dataset").fields
    answers = [browser.post("/console/do/delete_dataset", fields) for _ in range(2)]
    assert [one.status_code for one in answers] == [303, 303]
    assert {one.headers["location"] for one in answers} == {"/console/datasets"}


def test_an_error_page_writes_the_name_of_a_field_as_it_is(service: Service) -> None:
    browser = signed_in(service)
    said = Markup(browser.open("/console/do/delete_dataset").text).text
    assert "dataset_id is missing." in said
    assert "There is no such action." in Markup(browser.open("/console/do/nothing").text).text
