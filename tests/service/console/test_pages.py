"""Pages of a service with resources of every kind and state: what they show, to whom, and what they never hold."""

import hashlib
import json
import re
from pathlib import Path

import jinja2
import pytest
import sqlalchemy as sa

from tests.support.payloads import SCRIPTS
from tests.support.service.console import Browser, Markup, signed_in
from tests.support.service.evaluations import evaluated
from tests.support.service.in_process import Service, split
from tests.support.service.world import World
from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.evaluations import EvaluationStatus
from tuneship.contract.jobs import JobStatus
from tuneship.contract.releases import ReleaseStatus
from tuneship.contract.webhooks import DeliveryStatus
from tuneship.service.console import words
from tuneship.service.console.page import all_pages, page_at
from tuneship.service.console.rendering import place
from tuneship.service.http.console.assets import assets
from tuneship.service.http.console.entry import own_path
from tuneship.store.database import tables

# A page for each kind of resource, and the lists. Adding a page adds a line.
PAGES = {
    "overview": "/console",
    "releases": "/console/releases",
    "release with a question": "/console/releases/{rel_own}",
    "release that has begun": "/console/releases/{rel_begun}",
    "release that has ended": "/console/releases/{rel_ended}",
    "jobs": "/console/jobs",
    "job": "/console/jobs/{ft_own}",
    "job that has ended": "/console/jobs/{ft_ended}",
    "job beside another": "/console/jobs/{ft_own}?with={ft_ended}",
    "job that is tuned again": "/console/jobs/{ft_ended}/again",
    "new job": "/console/jobs/new",
    "new job on a dataset": "/console/jobs/new?dataset_id={ds_own}&base_model=tuneship-tiny",
    "datasets": "/console/datasets",
    "new dataset": "/console/datasets/new",
    "dataset": "/console/datasets/{ds_own}",
    "dataset that failed": "/console/datasets/{ds_failed}",
    "models": "/console/models",
    "base model": "/console/models/tuneship-tiny",
    "model": "/console/models/{model_own}",
    "endpoints": "/console/endpoints",
    "endpoint": "/console/endpoints/{ep_own}",
    "canary endpoint": "/console/endpoints/{cep_own}",
    "inactive endpoint": "/console/endpoints/{ep_inactive}",
    "new endpoint": "/console/endpoints/new",
    "new split": "/console/endpoints/new-split",
    "cut-over": "/console/endpoints/{ep_own}/traffic",
    "split that is changed": "/console/endpoints/{cep_own}/traffic",
    "deployments": "/console/deployments",
    "new deployment": "/console/deployments/new",
    "new deployment of a model": "/console/deployments/new?model_name={model_own}",
    "deployment": "/console/deployments/{dep_own}",
    "deployment that failed": "/console/deployments/{dep_failed}",
    "evaluations": "/console/evaluations",
    "webhooks": "/console/webhooks",
    "webhook": "/console/webhooks/{wh_own}",
    "webhook that is switched off": "/console/webhooks/{wh_inactive}",
    "keys": "/console/keys",
    "audit": "/console/audit",
    "settings": "/console/settings",
    "playground": "/console/playground",
    "playground of two": "/console/playground?a={dep_own}&b={dep_failed}",
}
THEIRS = (
    "/console/releases/{rel_of_other_tenant}",
    "/console/jobs/{ft_of_other_tenant}",
    "/console/endpoints/{ep_of_other_tenant}",
    "/console/endpoints/{cep_of_other_tenant}",
    "/console/datasets/{ds_of_other_tenant}",
    "/console/deployments/{dep_of_other_tenant}",
    "/console/models/{model_of_other_tenant}",
    "/console/webhooks/{wh_of_other_tenant}",
    "/console/playground?a={dep_of_other_tenant}",
    "/console/jobs/{ft_own}?with={ft_of_other_tenant}",
    "/console/jobs/{ft_of_other_tenant}/again",
    "/console/endpoints/{ep_of_other_tenant}/traffic",
    "/console/endpoints/{cep_of_other_tenant}/traffic",
    "/console/do/delete_dataset?dataset_id={ds_of_other_tenant}",
    "/console/do/delete_model?model_id={model_of_other_tenant}",
    "/console/do/delete_deployment?deployment_id={dep_of_other_tenant}",
    "/console/do/delete_endpoint?endpoint_id={ep_of_other_tenant}",
    "/console/do/delete_canary_endpoint?endpoint_id={cep_of_other_tenant}",
)
TEMPLATES = Path(words.__file__).parent / "templates"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_answered_whole_and_by_the_rules(world: World, name: str) -> None:
    browser = signed_in(world.service)
    answer = browser.open(PAGES[name].format(**world.ids))
    assert answer.status_code == 200, answer.text
    page = Markup(answer.text)
    assert "no such" not in page.text
    titles = [one for one, _ in page.tags if one in ("h1", "main", "title")]
    assert sorted(titles) == ["h1", "main", "title"]
    for tag, attributes in page.tags:
        assert "style" not in attributes, tag
        assert not [one for one in attributes if one.startswith("on")], tag
        if tag == "script":
            is_data = attributes.get("type") == "application/json"
            assert is_data or str(attributes["src"]).startswith("/console/static/")
    identifiers = [one["id"] for _, one in page.tags if "id" in one]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(world: World, name: str) -> None:
    browser = signed_in(world.service)
    page = Markup(browser.open(PAGES[name].format(**world.ids)).text)
    posts = {"/console/sign-out"}
    for path in sorted({*page.links} - posts):
        if not path.startswith("/console/do/"):
            answer = browser.open(path)
            assert answer.status_code == 200, (path, answer.text)


def test_every_page_is_in_this_file() -> None:
    named = {re.sub(r"{\w+(:path)?}", "x", page.path) for page in all_pages()}
    evaluation = "/console/evaluations/x"  # it has tests of its own
    tried = {re.sub(r"{\w+}", "x", path) for path in PAGES.values()}
    assert named - tried == {evaluation}


@pytest.mark.parametrize("path", THEIRS)
def test_a_page_of_another_tenant_is_no_page(world: World, path: str) -> None:
    browser = signed_in(world.service)
    found = browser.open(path.format(**world.ids))
    name = re.sub(r"{(\w+)_of_other_tenant}", r"{\1_missing}", path)
    missing = browser.open(name.format(**{"model_missing": "x" * 8, **world.ids}))
    assert found.status_code == missing.status_code == 404
    # Nor does a page say which of the two it is.
    shown = Markup(found.text)
    assert "It is gone, or was never here" in shown.text
    assert "/console" in shown.links
    assert "bob" not in found.text


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_a_key_only_what_its_scopes_allow(
    world: World, preset: str, name: str
) -> None:
    browser = signed_in(world.service, preset)
    answer = browser.open(PAGES[name].format(**world.ids))
    assert answer.status_code in (200, 403), answer.text
    if answer.status_code == 403:
        assert "lacks the scope" in answer.text


def test_a_button_is_there_exactly_where_its_operation_would_answer(world: World) -> None:
    path = PAGES["job"].format(**world.ids)
    for preset in ("trainer", "viewer"):
        browser = signed_in(world.service, preset)
        has_button = "/console/do/cancel_job" in browser.open(path).text
        assert has_button == ("jobs:write" in PRESETS[preset])
        sent = {"form_token": browser.form_token(), "job_id": world.ids["ft_missing"]}
        status = browser.post("/console/do/cancel_job", sent).status_code
        assert status == (404 if has_button else 403)


def test_a_session_that_only_looks_has_no_button_and_changes_nothing(world: World) -> None:
    browser = signed_in(world.service, looks_only="yes")
    path = PAGES["job"].format(**world.ids)
    assert "/console/do/" not in browser.open(path).text
    sent = {"form_token": browser.form_token(), "job_id": world.ids["ft_own"]}
    assert browser.post("/console/do/cancel_job", sent).status_code == 403


def test_an_endpoint_offers_the_decisions_that_would_be_taken(service: Service) -> None:
    old, new = service.deployment("old"), service.deployment("new")
    endpoint = service.canary("shop", {old: 100})
    path, place = f"/v1/canary-endpoints/{endpoint}", f"/console/endpoints/{endpoint}"
    approver, viewer = signed_in(service, "approver"), signed_in(service, "viewer")

    def offered() -> set[str]:
        text = approver.open(place).text
        return {*re.findall(r'action="/console/do/(\w+)_canary_endpoint"', text)}

    def decide(verb: str, **fields: str) -> int:
        name = f"{verb}_canary_endpoint"
        sent = {"form_token": approver.form_token(), "endpoint_id": endpoint, "then": place}
        question = approver.open(f"/console/do/{name}?endpoint_id={endpoint}&then={place}")
        assert "clinical review" in question.text
        return approver.post(f"/console/do/{name}", sent | fields).status_code

    def shift(*, pausable: bool) -> None:
        lease = split({old: 100}) | {"seconds": 600, "pausable": pausable}
        lease["fallback"] = lease.pop("deployments")
        body = split({old: 50, new: 50}, lease=lease)
        assert service.call("PATCH", path, json=body).status_code == 200

    assert (offered(), "No rollout is in progress." in approver.open(place).text) == (set(), True)
    shift(pausable=False)
    assert offered() == {"revert"}
    assert "Its pipeline cannot be paused." in approver.open(place).text
    assert decide("pause") == 409
    shift(pausable=True)
    assert offered() == {"pause", "revert"}
    # The empty fields of the form are none.
    assert decide("pause", name="Dr. Ada <b>", reason="", ticket="") == 303
    assert "Paused by Dr. Ada &lt;b&gt;" in approver.open(place).text
    assert offered() == {"resume", "revert"}
    assert decide("resume", ticket="no ticket") == 422
    assert decide("resume", reason="evidence", ticket="CHG-1") == 303
    assert "/console/do/" not in viewer.open(place).text
    assert decide("revert", name="Dr. Ada") == 303
    assert "Dr. Ada rolled the last rollout back" in viewer.open(place).text
    assert offered() == set()


def test_texts_of_users_are_shown_as_they_are(service: Service) -> None:
    tags = {f"tag {number}": text for number, text in enumerate(SCRIPTS) if "\t" not in text}
    job = service.job(tags=tags)
    data = service.dataset(tags=json.dumps(tags), description=SCRIPTS[0])
    browser = signed_in(service)
    for path in (f"/console/jobs/{job}", f"/console/datasets/{data}"):
        answer = browser.open(path)
        page = Markup(answer.text)
        for text in tags.values():
            assert " ".join(text.split()) in " ".join(page.text.split())
        scripts = [one for one in page.tags if one[0] == "script"]
        assert all(
            str(one["src"]).startswith("/console/static/") for _, one in scripts if "src" in one
        )
        assert not [
            tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed", "base")
        ]


def test_a_model_page_has_its_card_and_its_evaluations(service: Service) -> None:
    held_out = service.dataset()
    job = service.job(validation_dataset_id=held_out)
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job) == "completed")
    model = service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()["fine_tuned_model"]
    deployment = service.deployment("tuned", model_name=model)
    other = evaluated(service, service.dataset(), service.deployment("base"))
    made = evaluated(service, held_out, deployment)
    browser = signed_in(service)
    page = browser.open(f"/console/models/{model}").text
    text = " ".join(Markup(page).text.split())
    for shown in ("Learnt where answers end99.0 %", "Compliance modenone", "stated here0 of 31"):
        assert shown in text
    assert f"tuneship models card {model}" in text
    assert f"/console/datasets/{held_out}" in page
    assert f"/console/evaluations/{made}" in page
    assert other not in page
    base = browser.open("/console/models/tuneship-tiny").text
    assert other in base
    assert 'id="h-card"' not in base
    # Parts of the lineage may be gone, and may be hidden from a key.
    scopes = frozenset({"models:read", "jobs:read"})
    headers = service.key_headers("alice", scopes)
    key = headers["Authorization"].removeprefix("Bearer ")
    narrow = Browser(service)
    narrow.post("/console/sign-in", {"client_id": "alice", "key": key})
    hidden = narrow.open(f"/console/models/{model}").text
    assert "Validation data" in hidden
    assert f"/console/evaluations/{made}" not in hidden


def test_a_query_that_no_page_has_is_refused_in_words(world: World) -> None:
    browser = signed_in(world.service)
    for query in (
        "status=nope",
        "offset=-1",
        "offset=x",
        "colour=red",
        "status=queued&status=failed",
    ):
        answer = browser.open(f"/console/jobs?{query}")
        assert answer.status_code in (400, 422), query
        assert answer.headers["content-type"].startswith("text/html")
        assert (
            "nope" not in Markup(answer.text).text.replace("nope", "", 0) or "status" in answer.text
        )


def test_every_state_has_a_look() -> None:
    for states in (
        JobStatus,
        DeploymentStatus,
        DatasetStatus,
        EvaluationStatus,
        DeliveryStatus,
        ReleaseStatus,
    ):
        assert {*states} <= {*words.STATES}


def test_templates_never_say_that_a_text_is_safe() -> None:
    environment = jinja2.Environment(autoescape=True)
    for file in TEMPLATES.glob("*.html"):
        source = file.read_text()
        tree = environment.parse(source)
        filters = {one.name for one in tree.find_all(jinja2.nodes.Filter)}
        assert not filters & {"safe", "forceescape", "xmlattr", "urlize"}, file.name
        assert "autoescape" not in source
        assert "Markup" not in source
        assert not re.search(r"\sstyle=|\son[a-z]+=", source), file.name
        # A link comes from `place`, from the frame, or is written out.
        for link in re.findall(r'href="([^"]*)"', source):
            assert link.startswith(
                (
                    "/console",
                    "#",
                    "{{ place(",
                    "{{ link(",
                    "{{ frame.static }}",
                    "{{ path }}",
                    "{{ one.path }}",
                    "{{ then }}",
                )
            ), (file.name, link)


def test_places_are_own_places() -> None:
    assert (
        place("/models/ft:a/b c", offset=50, status=None)
        == "/console/models/ft%3Aa/b%20c?offset=50"
    )
    for text in (
        "",
        "//evil.test",
        "https://evil.test",
        "/consolex",
        "/console\\@evil.test",
        "/console/\r\nX: y",
    ):
        assert own_path(text) == "/console"
    for text in ("/console", "/console/jobs?status=queued", "/console?x=1"):
        assert own_path(text) == text


def test_a_page_is_found_by_its_address() -> None:
    page, named = page_at("/console/models/ft:base/x:name:y")
    assert (page.path, named) == (
        "/console/models/{model_id:path}",
        {"model_id": "ft:base/x:name:y"},
    )


def test_files_of_pages_are_kept_for_ever_and_compressed(world: World) -> None:
    browser = Browser(world.service)
    for path, asset in assets().by_path.items():
        answer = browser.open(path, headers={"Accept-Encoding": "gzip"})
        assert answer.status_code == 200
        assert answer.content == asset.body
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-type"] == asset.media
        assert (answer.headers.get("content-encoding") == "gzip") == (asset.packed is not None)
    assert browser.open("/console/static/0/console.css").status_code == 303


def test_the_files_of_others_are_as_they_were_published() -> None:
    folder = Path(words.__file__).parent / "static" / "vendor"
    listed = json.loads((folder / "vendor.json").read_text())
    files = {one.name for one in folder.iterdir()} - {"vendor.json"}
    assert {file for one in listed for file in one["files"]} == files
    for one in listed:
        for name, digest in one["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_operating_pages_are_in_the_navigation_of_those_who_may_read_them(world: World) -> None:
    def operated(preset: str) -> set[str]:
        links = Markup(signed_in(world.service, preset).open("/console/settings").text).links
        return {*links} & {f"/console/{name}" for name in ("webhooks", "keys", "audit", "settings")}

    assert {one.rpartition("/")[2] for one in operated("admin")} == {
        "webhooks",
        "keys",
        "audit",
        "settings",
    }
    assert operated("viewer") == {"/console/webhooks", "/console/settings"}
    assert operated("auditor") == {"/console/audit", "/console/settings"}
    assert operated("inference") == {"/console/settings"}


def test_a_delivery_that_was_given_up_goes_back_into_the_queue(service: Service) -> None:
    asked = {"url": "https://receiver.test/x", "events": ["*"]}
    hook = service.call("POST", "/v1/webhooks", json=asked).json()["id"]
    event = service.call("POST", f"/v1/webhooks/{hook}/test", json={}).json()["event_id"]
    with service.database.write() as connection:
        dead = {"status": "dead", "attempts": 10, "next_attempt_at": None, "failure": "status"}
        connection.execute(sa.update(tables.deliveries).values(**dead))
    browser, place = signed_in(service), f"/console/webhooks/{hook}"
    again = "/console/do/retry_webhook_delivery"
    shown = browser.open(place).text
    assert "1 event was given up after all attempts" in shown
    assert again in shown
    assert again not in signed_in(service, "viewer").open(place).text
    assert event not in browser.open(f"{place}?status=delivered").text
    fields = {
        "form_token": browser.form_token(),
        "webhook_id": hook,
        "event_id": event,
        "then": place,
    }
    answer = browser.post("/console/do/retry_webhook_delivery", fields)
    assert (answer.status_code, answer.headers["location"]) == (303, place)
    delivery = service.call("GET", f"/v1/webhooks/{hook}/deliveries").json()["deliveries"][0]
    assert (delivery["status"], delivery["attempts"]) == ("pending", 0)
    assert again not in browser.open(place).text, "it waits to be sent already"
    service.call("PATCH", f"/v1/webhooks/{hook}", json={"active": False})
    shown = browser.open(place).text
    assert "Nothing is sent to it" in shown
    assert again not in shown


def test_keys_are_listed_by_their_public_parts_and_of_the_own_tenant_alone(
    service: Service,
) -> None:
    label = "make up, /home/somebody/flows-key.json"
    secret = service.keys.issue("alice", PRESETS["trainer"], None, label)
    public = secret[4:12]
    theirs = service.headers["bob"]["Authorization"].removeprefix("Bearer tsk_")[:8]
    service.keys.revoke(public)
    answer = service.call("GET", "/v1/api-keys?limit=1")
    [newest] = answer.json()["api_keys"]
    names = {"id", "scopes", "created_at", "expires_at", "revoked_at", "last_used_at"}
    assert {*newest} == names
    assert newest["id"] == public
    page = signed_in(service).open("/console/keys").text
    assert f'id="key-{public}"' in page
    assert "revoked" in page
    # The secret may have any sign that divides a key.
    for hidden in (theirs, "somebody", secret[13:-7]):
        assert hidden not in page
        assert hidden not in service.call("GET", "/v1/api-keys?limit=100").text
    viewer = service.call("GET", "/v1/api-keys", None, headers=_as(service, "operator"))
    assert viewer.status_code == 403


def _as(service: Service, preset: str) -> dict[str, str]:
    return service.key_headers("alice", PRESETS[preset])


def test_audit_rows_are_read_page_by_page_from_the_newest_on(service: Service) -> None:
    for number in range(120):
        service.keys.issue("alice", frozenset({"jobs:read"}), None, str(number))
    browser = signed_in(service)
    seen: list[int] = []
    place: str | None = "/console/audit"
    while place is not None:
        page = Markup(browser.open(place).text)
        rows = [
            str(one["id"])
            for tag, one in page.tags
            if tag == "tr" and str(one.get("id")).startswith("row-")
        ]
        seen += [int(one.removeprefix("row-")) for one in rows]
        older = [one["href"] for tag, one in page.tags if "?after=" in str(one.get("href"))]
        place = str(older[0]) if older else None
        assert len(seen) < 1000
    listed = service.call("GET", "/v1/audit?limit=1000").json()["entries"]
    assert seen == [one["seq"] for one in reversed(listed)]
    assert 'data-live=""' in browser.open("/console/audit").text, "it stays as it was opened"


def test_a_token_of_one_order_of_the_audit_rows_is_refused_in_the_other(service: Service) -> None:
    newest = service.call("GET", "/v1/audit?order=desc&limit=2").json()
    assert [one["seq"] for one in newest["entries"]] == sorted(
        (one["seq"] for one in newest["entries"]), reverse=True
    )
    token = newest["pagination"]["after"]
    assert service.call("GET", f"/v1/audit?order=desc&after={token}").status_code == 200
    assert service.call("GET", f"/v1/audit?after={token}").status_code == 422
    end = service.call("GET", "/v1/audit?order=desc&limit=1000").json()["pagination"]["after"]
    assert service.call("GET", f"/v1/audit?order=desc&after={end}").json()["entries"] == []


def test_settings_show_what_is_enforced_and_no_path_or_address(service: Service) -> None:
    page = Markup(signed_in(service, "inference").open("/console/settings").text)
    text = " ".join(page.text.split())
    health = service.call("GET", "/healthz", None).json()["capabilities"]
    assert all(name in text for name in health)
    for hidden in (str(service.parts.settings.data_dir), "sqlite:", service.parts.public_url):
        assert hidden not in text
    assert "Deployments50" in text
    assert "Ends without use after15 min" in text


def test_a_link_to_something_deleted_leads_to_a_page_that_says_so(service: Service) -> None:
    browser = signed_in(service)
    made = {
        "datasets": service.dataset(),
        "endpoints": service.endpoint("gone", service.deployment("kept")),
        "models": service.model(),
    }
    for kind, identifier in made.items():
        answer = service.call("DELETE", f"/v1/{kind}/{identifier}")
        assert answer.status_code in (200, 202, 204), answer.text
        page = browser.open(f"/console/{kind}/{identifier}")
        assert page.status_code == 404
        shown = Markup(page.text)
        assert "It is gone, or was never here" in shown.text
        assert f"/console/{kind}" in shown.links
        assert "not live" not in shown.text
    question = f"/console/do/delete_dataset?dataset_id={made['datasets']}&then=/console/datasets"
    shown = Markup(browser.open(question).text)
    assert "It is gone, or was never here" in shown.text
    assert "/console/datasets" in shown.links


def test_a_list_says_how_many_there_are_in_the_singular_the_plural_and_without_any(
    service: Service,
) -> None:
    browser = signed_in(service)

    def says(page: str) -> str:
        text = Markup(browser.open(f"/console/{page}").text).text
        return " ".join(text.partition("Overview")[2].split())

    assert "No endpoint answers requests yet." in says("endpoints")
    assert "No job." in says("jobs")
    assert "No job in the state failed of tuneship-tiny." in says(
        "jobs?status=failed&base_model=tuneship-tiny"
    )
    old, new = service.deployment("old"), service.deployment("new")
    service.canary("first", {old: 50, new: 50})
    assert "1 endpoint splits its traffic between models." in says("endpoints")
    assert "to one model" not in says("endpoints")
    service.canary("second", {old: 50, new: 50})
    service.endpoint("third", old)
    shown = says("endpoints")
    assert "2 endpoints split their traffic between models. 1 endpoint leads to one model." in shown
    service.job()
    assert "1 job in the state queued, newest first." in says("jobs?status=queued") or (
        "1 job in the state running, newest first." in says("jobs?status=running")
    )
