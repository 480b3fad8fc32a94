"""Pages of a service with resources of every kind and state: what they show, to whom, and what they never hold."""

import hashlib
import json
import re
from pathlib import Path

import jinja2
import pytest

from tests.support.payloads import SCRIPTS
from tests.support.service.console import Browser, Markup, signed_in
from tests.support.service.evaluations import evaluated
from tests.support.service.in_process import Service
from tests.support.service.world import World
from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.evaluations import EvaluationStatus
from tuneship.contract.jobs import JobStatus
from tuneship.service.console import words
from tuneship.service.console.page import all_pages, page_at
from tuneship.service.console.rendering import place
from tuneship.service.http.console.assets import assets
from tuneship.service.http.console.entry import own_path

# A page for each kind of resource, and the lists. Adding a page adds a line.
PAGES = {
    "overview": "/console",
    "jobs": "/console/jobs",
    "job": "/console/jobs/{ft_own}",
    "job that has ended": "/console/jobs/{ft_ended}",
    "job beside another": "/console/jobs/{ft_own}?with={ft_ended}",
    "job that is tuned again": "/console/jobs/{ft_ended}/again",
    "datasets": "/console/datasets",
    "dataset": "/console/datasets/{ds_own}",
    "dataset that failed": "/console/datasets/{ds_failed}",
    "models": "/console/models",
    "base model": "/console/models/tuneship-tiny",
    "model": "/console/models/{model_own}",
    "endpoints": "/console/endpoints",
    "endpoint": "/console/endpoints/{ep_own}",
    "canary endpoint": "/console/endpoints/{cep_own}",
    "inactive endpoint": "/console/endpoints/{ep_inactive}",
    "deployments": "/console/deployments",
    "deployment": "/console/deployments/{dep_own}",
    "deployment that failed": "/console/deployments/{dep_failed}",
    "evaluations": "/console/evaluations",
    "playground": "/console/playground",
    "playground of two": "/console/playground?a={dep_own}&b={dep_failed}",
}
THEIRS = (
    "/console/jobs/{ft_of_other_tenant}",
    "/console/endpoints/{ep_of_other_tenant}",
    "/console/endpoints/{cep_of_other_tenant}",
    "/console/datasets/{ds_of_other_tenant}",
    "/console/deployments/{dep_of_other_tenant}",
    "/console/models/{model_of_other_tenant}",
    "/console/playground?a={dep_of_other_tenant}",
    "/console/jobs/{ft_own}?with={ft_of_other_tenant}",
    "/console/jobs/{ft_of_other_tenant}/again",
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
    for shown in ("Ends of answers learnt99.0 %", "Compliance modenone", "stated here0 of 31"):
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
    for states in (JobStatus, DeploymentStatus, DatasetStatus, EvaluationStatus):
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
