"""The playground: who is answered, by which rules, and that no text of a request stays anywhere."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.objects.files import contents_below
from tests.support.service.console import Browser, link_of, signed_in
from tests.support.service.in_process import ANSWER, Service
from tests.support.service.world import World
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.contract.generation import Generate
from tuneship.service.http.rate_limits import RateLimits
from tuneship.store.database import tables

SECRET = "Q7-planted-patient-text"


def token_of(browser: Browser) -> str:
    """The token of a session, also of one that may see no page."""
    [cookie] = browser.cookies.values()
    return browser.service.parts.sessions.find(cookie, is_use=False).form_token


def send(browser: Browser, deployment: str, body: Any, **headers: str) -> httpx.Response:
    """Send a request as the page's script does."""
    named = {"Accept": "application/x-ndjson", **headers}
    if "X-Form-Token" not in named:
        named["X-Form-Token"] = token_of(browser)
    path = f"/console/generate/{deployment}"
    return browser.send("POST", path, json=body, headers=named)


def in_audit(service: Service, action: str = "generate") -> list[tuple[int, str]]:
    with service.database.read() as connection:
        query = sa.select(tables.audit.c.status, tables.audit.c.resource_id)
        found = connection.execute(query.where(tables.audit.c.action == action))
        return [(row.status, row.resource_id) for row in found]


def test_an_answer_is_the_stream_of_the_operation(service: Service) -> None:
    deployment = service.deployment("notes", security_settings={"audit_logging": True})
    asked = {"prompt": "a", "temperature": 0, "stream": True}
    answer = send(signed_in(service, "operator"), deployment, asked)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["cache-control"] == "no-store"
    *pieces, whole = map(json.loads, answer.text.splitlines())
    assert "".join(one["text"] for one in pieces) == whole["completion"] == ANSWER
    assert whole["usage"]["completion_tokens"] > 1
    by_page = in_audit(service)
    path = f"/v1/deployments/{deployment}/generate"
    assert service.call("POST", path, json=asked).text
    # As of the operation itself.
    assert in_audit(service) == [*by_page, *by_page]
    figures = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()
    assert figures["summary"]["error_rate"]["request_count"] == 2


def test_a_request_needs_the_page_of_its_session(service: Service) -> None:
    deployment = service.deployment("notes")
    browser, other = signed_in(service), signed_in(service)
    for token in ("", "0" * 64, token_of(other)):
        refused = send(browser, deployment, {"prompt": "a"}, **{"X-Form-Token": token})
        assert refused.status_code == 403
    token = token_of(browser)
    for site in ("cross-site", "same-site", "none"):
        browser.site = site
        headers = {"X-Form-Token": token}
        path = f"/console/generate/{deployment}"
        refused = browser.send("POST", path, json={"prompt": "a"}, headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "permission_denied"
    browser.site = "same-origin"
    assert browser.open(f"/console/generate/{deployment}").status_code == 404
    assert service.engines.asked == []


@pytest.mark.parametrize("preset", PRESETS)
def test_only_a_key_that_may_generate_is_answered(world: World, preset: str) -> None:
    deployment, may = world.ids["dep_own"], "generate" in PRESETS[preset]
    for looks_only in ("", "yes"):
        browser = signed_in(world.service, preset, looks_only=looks_only)
        answer = send(browser, deployment, {"prompt": "a"})
        assert answer.status_code == (200 if may and not looks_only else 403), answer.text


def test_the_page_offers_only_what_the_key_may_do(world: World) -> None:
    deployment = world.ids["dep_own"]
    for preset, may in (("operator", True), ("viewer", False)):
        browser = signed_in(world.service, preset)
        page = browser.open("/console/playground").text
        assert ('id="ask"' in page) == may
        assert ("Answers need the scope generate" in page) == (not may)
        link = f"/console/playground?a={deployment}"
        assert (link in browser.open(f"/console/deployments/{deployment}").text) == may
        shown = browser.open(f"/console/endpoints/{world.ids['cep_own']}").text
        assert ("/console/playground?a=" in shown) == may


def test_a_deployment_of_another_tenant_is_none(world: World) -> None:
    browser = signed_in(world.service)
    theirs, missing = (
        send(browser, world.ids[one], {"prompt": "a"})
        for one in ("dep_of_other_tenant", "dep_missing")
    )
    assert theirs.status_code == missing.status_code == 404
    for answer in (theirs, missing):
        answer.json()["error"].pop("request_id")
    assert theirs.json()["error"]["message"] == missing.json()["error"]["message"]


def test_the_limits_are_those_of_the_contract_and_of_the_deployments(service: Service) -> None:
    small = service.deployment("small", model_config={"max_output_tokens": 32})
    other = service.deployment("other")
    browser = signed_in(service)
    page = browser.open(f"/console/playground?a={other}&b={small}").text
    assert "The longest answer allowed has 32 tokens" in page
    for name, bounds in (("temperature", 'min="0" max="2"'), ("top_p", 'min="0" max="1"')):
        assert bounds in page.partition(f'name="{name}"')[2].partition(">")[0]
    refused = send(browser, small, {"prompt": "a", "max_tokens": 33}).json()["error"]
    assert refused["param"] == "max_tokens"
    assert "32" in refused["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": SECRET, "temperature": 3}, "temperature"),
        ({"prompt": SECRET, "stop": [SECRET] * 5}, "stop"),
        ({"prompt": SECRET, SECRET: 1}, None),
        ({"messages": [{"role": "assistant", "content": SECRET}]}, "messages"),
        ({"prompt": SECRET, "response_format": {"type": SECRET}}, "response_format.type"),
        ({"prompt": SECRET, "tool_choice": "required"}, "tool_choice"),
        ({"prompt": SECRET * 200}, "prompt"),
    ],
)
def test_a_refusal_names_the_field_and_never_quotes_it(
    world: World, body: dict[str, Any], field: str | None
) -> None:
    answer = send(signed_in(world.service), world.ids["dep_own"], body)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["param"] == field
    assert SECRET not in answer.text


def test_a_body_too_long_and_one_of_another_kind_are_refused(world: World) -> None:
    browser, deployment = signed_in(world.service), world.ids["dep_own"]
    assert send(browser, deployment, {"prompt": "x" * (1 << 20)}).status_code == 413
    headers = {"X-Form-Token": token_of(browser)}
    path = f"/console/generate/{deployment}"
    form = browser.send("POST", path, data={"prompt": SECRET}, headers=headers)
    assert (form.status_code, SECRET in form.text) == (415, False)


def test_requests_count_as_the_tenants_generations(start: Callable[..., Service]) -> None:
    service = start(generate_requests_per_minute=3)
    service.limit(RateLimits(10**6, 3, service.clock))
    service.listen()
    deployment, browser = service.deployment("notes"), signed_in(service)
    asked = {"prompt": "a"}
    assert service.call("POST", f"/v1/deployments/{deployment}/generate", json=asked).is_success
    answers = [send(browser, deployment, asked) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert answers[-1].headers["x-ratelimit-limit"] == "3"
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_in_hipaa_mode_the_key_must_be_a_good_one(service: Service) -> None:
    service.headers["alice"] = service.key_headers("alice", lifetime=timedelta(days=90))
    mode = service.deployment("mode", security_settings={"compliance_mode": "hipaa"})
    for_ever = send(signed_in(service), mode, {"prompt": SECRET})
    assert (for_ever.status_code, "90 days" in for_ever.text) == (403, True)
    browser = Browser(service)
    browser.post("/console/sign-in", {"code": link_of(service).partition("#")[2]})
    assert send(browser, mode, {"prompt": SECRET}).status_code == 200
    assert in_audit(service) == [(403, mode), (200, mode)]


def test_without_a_session_there_is_no_answer(service: Service) -> None:
    deployment, browser = service.deployment("notes"), signed_in(service)
    token = token_of(browser)
    service.clock.ahead = timedelta(minutes=16)
    answer = send(browser, deployment, {"prompt": "a"}, **{"X-Form-Token": token})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "authentication_error")
    assert service.engines.asked == []


@pytest.mark.parametrize("ending", ["key", "session"])
def test_an_answer_ends_with_its_key_and_its_session(service: Service, ending: str) -> None:
    headers = service.key_headers("alice")
    key = headers["Authorization"].removeprefix("Bearer ")
    browser = Browser(service)
    browser.post("/console/sign-in", {"client_id": "alice", "key": key})
    deployment, token = service.deployment("notes"), token_of(browser)
    service.engines.tokens_before_pause = 2
    cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    sent = {"X-Form-Token": token, "Cookie": cookies, "Accept": "application/x-ndjson"}
    path = f"{service.url}/console/generate/{deployment}"
    body = {"prompt": "a", "stream": True}
    site = {"Sec-Fetch-Site": "same-origin"}
    with httpx.stream("POST", path, json=body, headers=sent | site, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert "text" in json.loads(next(lines))
        if ending == "key":
            service.keys.revoke(key[4:12])
        else:
            browser.post("/console/sign-out", {"form_token": token})
        assert json.loads([*lines][-1])["error"]["code"] == "authentication_error"
    service.engines.may_go_on.set()


def test_no_text_of_a_request_stays_anywhere(service: Service) -> None:
    deployment = service.deployment("notes", security_settings={"audit_logging": True})
    browser = signed_in(service)
    bodies: list[Any] = [
        {"prompt": SECRET},
        {"messages": [{"role": "user", "content": SECRET}], "stream": True},
        {"prompt": "a", "stop": [SECRET], "temperature": 9},
        {SECRET: SECRET},
        [SECRET],
    ]
    for body in bodies:
        send(browser, deployment, body)
    browser.post(f"/console/generate/{deployment}", {"prompt": SECRET})
    browser.open(f"/console/playground?a={deployment}")
    kept = contents_below(service.settings.data_dir)
    assert kept
    assert [str(path) for path, content in kept.items() if SECRET.encode() in content] == []
    assert [line for line in service.log.texts if SECRET in line] == []


def test_the_page_keeps_what_is_typed_from_the_browser(world: World) -> None:
    page = signed_in(world.service).open("/console/playground").text
    boxes = page.split("<textarea")[1:]
    assert len(boxes) == 4
    for box in boxes:
        head = box.partition(">")[0]
        for attribute in (
            'autocomplete="off"',
            'spellcheck="false"',
            'autocorrect="off"',
            'writingsuggestions="false"',
            'translate="no"',
        ):
            assert attribute in head
    form = page.partition('<form id="ask"')[2].partition(">")[0]
    # Without its script the page must not put a prompt into an address.
    assert 'method="post"' in form
    assert "disabled" in page.partition('id="send"')[2].partition(">")[0]
    assert {*Generate.model_fields} >= {"response_format", "tools", "tool_choice"}
