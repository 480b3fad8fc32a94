"""Signing in and out of the console, and what a session protects from."""

from collections.abc import Callable
from datetime import timedelta
from urllib.parse import quote

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.console import Browser, Markup, link_of, signed_in
from tests.support.service.in_process import Service
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.service.http.console.entry import HEADERS
from tuneship.service.http.rate_limits import RateLimits
from tuneship.store.database import tables


def code_of(link: str) -> str:
    return link.partition("#")[2]


def actions(service: Service) -> list[str]:
    with service.database.read() as connection:
        rows = connection.execute(sa.select(tables.audit.c.action).order_by(tables.audit.c.seq))
        return [row.action for row in rows]


def test_a_link_signs_in_once(service: Service) -> None:
    link, browser = link_of(service), Browser(service)
    assert link.startswith(f"{service.parts.public_url}/console/sign-in#")
    # A preview of the link asks for the page, which uses nothing up.
    assert browser.open("/console/sign-in").status_code == 200
    answer = browser.post("/console/sign-in", {"code": link, "next": "/console/jobs"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs")
    assert browser.open("/console/jobs").status_code == 200
    again = Browser(service).post("/console/sign-in", {"code": code_of(link)})
    assert again.status_code == 401
    assert "set-cookie" not in again.headers
    assert actions(service)[-3:] == ["create_sign_in_link", "sign_in", "authenticate"]


def test_a_link_ends_after_ten_minutes_and_with_its_key(service: Service) -> None:
    late, revoked = link_of(service), link_of(service, "bob")
    service.keys.revoke(service.headers["bob"]["Authorization"][len("Bearer tsk_") :][:8])
    service.clock.ahead = timedelta(minutes=11)
    for link in (late, revoked):
        answer = Browser(service).post("/console/sign-in", {"code": code_of(link)})
        assert answer.status_code == 401


def test_a_session_holds_no_more_than_its_key(service: Service) -> None:
    browser = signed_in(service, "viewer", name="Ann Weber")
    page = browser.open("/console").text
    assert "Ann Weber" in page
    assert "tenant alice" in page


def test_a_wrong_key_signs_nobody_in_and_attempts_are_limited(service: Service) -> None:
    statuses = []
    with httpx.Client(base_url=service.url, headers={"Sec-Fetch-Site": "same-origin"}) as http:
        for number in range(32):
            fields = {"client_id": "alice", "key": f"tsk_{number}"}
            answer = http.post("/console/sign-in", data=fields)
            statuses.append(answer.status_code)
            assert "set-cookie" not in answer.headers
            assert f"tsk_{number}" not in answer.text
    assert set(statuses[:29]) == {401}
    assert statuses[-1] == 429
    assert "authenticate" in actions(service)


def test_a_good_key_signs_in_from_an_address_whose_other_programs_fail(service: Service) -> None:
    with httpx.Client(base_url=service.url, headers={"Sec-Fetch-Site": "same-origin"}) as http:
        for _ in range(22):
            http.get("/v1/models", headers={"Authorization": "Bearer tsk_x", "X-Client-ID": "a"})
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        answer = http.post("/console/sign-in", data={"client_id": "alice", "key": key})
    assert answer.status_code == 303


def test_pages_and_forms_are_limited(start: Callable[..., Service]) -> None:
    service = start(control_requests_per_minute=5)
    limits = RateLimits(5, 5, service.clock)
    service.limit(limits)
    service.listen()
    browser = signed_in(service)
    token = browser.form_token()
    fields = {"form_token": token, "job_id": "ft_" + "x" * 24}
    forms = [browser.post("/console/do/cancel_job", fields).status_code for _ in range(7)]
    assert forms[0] == 404
    assert forms[-1] == 429
    assert browser.open("/console/jobs").status_code == 200
    while not limits.count_page(token).exceeded:
        pass
    assert browser.open("/console/jobs").status_code == 429


def test_a_made_up_cookie_causes_no_query(service: Service) -> None:
    browser = Browser(service)
    name = f"tuneship-{service.parts.sessions.installation}"
    asked: list[str] = []
    sa.event.listen(
        service.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2])
    )
    for number in range(5):
        browser.cookies.set(name, f"{number}.{'0' * 32}")
        assert browser.open("/console/jobs").status_code == 303
    assert not [one for one in asked if "SELECT" in one and "console_sessions" in one]


def test_a_second_sign_in_ends_the_first(service: Service) -> None:
    browser = signed_in(service)
    before = dict(browser.cookies)
    shown = browser.open("/console/sign-in").text
    assert "data-asks" in shown
    answer = browser.post("/console/sign-in", {"code": code_of(link_of(service, "bob"))})
    assert answer.status_code == 303
    assert "tenant bob" in browser.open("/console").text
    old = Browser(service)
    for name, value in before.items():
        old.cookies.set(name, value)
    assert old.open("/console").status_code == 303


def test_without_a_session_every_page_leads_to_the_sign_in(service: Service) -> None:
    browser = Browser(service)
    answer = browser.open("/console/jobs")
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "/console/sign-in?next=%2Fconsole%2Fjobs",
    )
    # EventSource would give up at any other status, and the page would not learn why.
    live = browser.open("/console/live?page=/console/jobs")
    assert (live.status_code, live.text) == (200, "event: end\ndata: signed out\n\n")
    browser.cookies.set(f"tuneship-{service.parts.sessions.installation}", "planted")
    assert browser.open("/console/jobs").status_code == 303


def test_a_link_of_another_site_comes_again_with_its_cookie(service: Service) -> None:
    stranger = Browser(service, "cross-site")
    answer = stranger.open("/console/jobs")
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text


def test_a_key_of_the_api_opens_no_page_and_a_cookie_no_operation(service: Service) -> None:
    assert service.call("GET", "/console", "alice").status_code == 303
    browser = signed_in(service)
    assert browser.open("/v1/fine-tuning/jobs").status_code == 401


@pytest.mark.parametrize("how", ["signed out", "idle", "twelve hours", "key revoked"])
def test_a_session_ends(service: Service, how: str) -> None:
    headers = service.key_headers("alice")
    key = headers["Authorization"].removeprefix("Bearer ")
    browser = Browser(service)
    browser.post("/console/sign-in", {"client_id": "alice", "key": key})
    if how == "signed out":
        answer = browser.post("/console/sign-out", {"form_token": browser.form_token()})
        assert answer.status_code == 303
        assert "Max-Age=0" in answer.headers["set-cookie"]
    elif how == "idle":
        service.clock.ahead = timedelta(minutes=16)
    elif how == "twelve hours":
        for step in range(1, 80):
            service.clock.ahead = timedelta(minutes=10 * step)
            service.parts.sessions.store_uses()
            if browser.open("/console").status_code == 303:
                break
        assert service.clock.ahead == timedelta(hours=12)
    else:
        service.keys.revoke(key[4:12])
        service.clock.ahead = timedelta(seconds=2)  # keys are read again each second
    assert browser.open("/console").status_code == 303


def test_use_keeps_a_session_and_an_open_page_does_not(service: Service) -> None:
    browser = signed_in(service)
    for step in (10, 20, 30):
        service.clock.ahead = timedelta(minutes=step)
        assert browser.open("/console").status_code == 200
    service.parts.sessions.store_uses()
    with service.database.read() as connection:
        [session] = connection.execute(sa.select(tables.console_sessions)).mappings()
    assert session["used_at"] - (session["expires_at"] - timedelta(hours=12)) > timedelta(
        minutes=25
    )


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
def test_a_form_of_another_page_is_refused(service: Service, site: str) -> None:
    job = service.job()
    browser = signed_in(service)
    sent = {"form_token": browser.form_token(), "job_id": job}
    browser.site = site
    before = actions(service)
    answer = browser.post("/console/do/cancel_job", sent)
    assert answer.status_code == 403
    assert service.job_status(job) not in ("cancelling", "cancelled")
    assert "cancel_job" not in actions(service)[len(before) :]


def test_a_form_needs_the_token_of_its_session(service: Service) -> None:
    job = service.job()
    browser, other = signed_in(service), signed_in(service)
    for token in ("", "0" * 64, other.form_token()):
        fields = {"form_token": token, "job_id": job}
        assert browser.post("/console/do/cancel_job", fields).status_code == 403
        assert browser.post("/console/sign-out", {"form_token": token}).status_code == 403
    assert service.job_status(job) not in ("cancelling", "cancelled")
    assert browser.open("/console").status_code == 200


@pytest.mark.parametrize("how", ["ended", "another one began"])
def test_a_form_that_comes_after_its_session_leads_back_to_its_page(
    service: Service, how: str
) -> None:
    browser, job = signed_in(service), service.job()
    fields = {"form_token": browser.form_token(), "job_id": job}
    page = f"/console/do/cancel_job?job_id={job}&then=/console/jobs"
    if how == "ended":
        service.clock.ahead = timedelta(minutes=16)
    else:
        browser.post("/console/sign-in", {"code": code_of(link_of(service))})
    answer = browser.post("/console/do/cancel_job", fields, headers={"Referer": service.url + page})
    place = answer.headers["location"]
    assert answer.status_code == 303
    assert place == f"/console/sign-in?ended=unsent&next={quote(page, safe='')}"
    shown = Markup(browser.open(place).text)
    assert "What you sent was not carried out" in shown.text
    assert page in [one.get("value") or one.get("href") for _, one in shown.tags]
    assert service.job_status(job) not in ("cancelling", "cancelled")
    # Without a page to return to, or with one of elsewhere, it still says so.
    service.clock.ahead += timedelta(minutes=16)
    for referer in ("", "https://evil.test/console/jobs", "//[", f"{service.url}/console/do/x"):
        headers = {"Referer": referer} if referer else {}
        answer = browser.post("/console/do/cancel_job", fields, headers=headers)
        assert answer.headers["location"] == "/console/sign-in?ended=unsent"
    # To be signed out was what the person wanted.
    answer = browser.post("/console/sign-out", fields, headers={"Referer": service.url + page})
    assert answer.headers["location"] == "/console/sign-in"


def test_a_browser_that_names_no_site_needs_its_own_origin(service: Service) -> None:
    browser = signed_in(service)
    token, browser.site = browser.form_token(), None
    for origin, status in (("https://evil.test", 403), ("null", 403), (service.url, 303)):
        fields = {"form_token": token, "job_id": service.job(), "then": "/console/jobs"}
        answer = browser.post("/console/do/cancel_job", fields, headers={"Origin": origin})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("host", ["[", "evil.test", "service.test.evil.test", "xservice.test"])
def test_a_foreign_host_name_is_refused(service: Service, host: str) -> None:
    browser = signed_in(service)
    for path in ("/console", "/console/sign-in"):
        assert browser.open(path, headers={"Host": host}).status_code == 400
    assert browser.open("/console", headers={"Host": "127.0.0.1:1"}).status_code == 200


def test_plain_http_from_elsewhere_is_refused_unless_it_was_allowed(
    start: Callable[..., Service],
) -> None:
    for settings, status in (({}, 403), ({"console_plaintext": True}, 200)):
        service = start(**settings)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(service.app, client=("192.0.2.7", 1)),
            base_url="http://service.test",
        )
        assert service.run(http.get("/console/sign-in")).status_code == status


def test_over_tls_the_cookie_is_bound_to_this_host(start: Callable[..., Service]) -> None:
    service = start()
    service.come_over_tls()
    browser = Browser(service)
    answer = browser.post("/console/sign-in", {"code": code_of(link_of(service))})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-tuneship-")
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Secure"} <= {*cookie.split("; ")}
    assert "max-age" in browser.open("/console").headers["strict-transport-security"]


def test_every_answer_carries_the_headers(service: Service) -> None:
    browser = signed_in(service)
    for path in ("/console", "/console/nope", "/console/sign-in", "/console/jobs?x=1"):
        answer = browser.open(path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
        assert answer.headers["cache-control"] == "no-store"
        assert "content-encoding" not in answer.headers
    # As text, so that a change is seen.
    assert HEADERS["Content-Security-Policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types tuneship"
    )


def test_a_double_click_is_one_request(service: Service) -> None:
    browser, job = signed_in(service), service.job()
    asked = browser.open(f"/console/do/cancel_job?job_id={job}&then=/console/jobs/{job}")
    assert "Cancel this job?" in asked.text
    key = asked.text.partition('name="idempotency_key" value="')[2].partition('"')[0]
    fields = {
        "form_token": browser.form_token(),
        "idempotency_key": key,
        "job_id": job,
        "then": f"/console/jobs/{job}",
    }
    answers = [browser.post("/console/do/cancel_job", fields) for _ in range(2)]
    assert [one.status_code for one in answers] == [303, 303]
    assert answers[0].headers["location"] == f"/console/jobs/{job}"
    assert actions(service).count("cancel_job") == 2, "the second one is answered from the first"


def test_a_refused_action_says_why_in_a_page(service: Service) -> None:
    browser = signed_in(service)
    fields = {"form_token": browser.form_token(), "job_id": "no id"}
    answer = browser.post("/console/do/cancel_job", fields)
    assert answer.status_code == 404
    lacking = browser.post("/console/do/cancel_job", {"form_token": browser.form_token()})
    assert (lacking.status_code, "job_id" in lacking.text) == (422, True)
    assert answer.headers["content-type"].startswith("text/html")
    unknown = browser.post("/console/do/delete_everything", fields)
    assert unknown.status_code == 404
    big = browser.post("/console/do/cancel_job", {**fields, "x": "y" * (65 << 10)})
    assert big.status_code == 413


def test_a_question_about_the_time_left_is_no_use_and_a_sign_of_life_is(service: Service) -> None:
    browser = signed_in(service)
    token = browser.form_token()
    service.clock.ahead = timedelta(minutes=10)
    for path in ("/console/session", "/console/sign-in"):
        browser.open(path)
    left = browser.open("/console/session")
    assert left.headers["cache-control"] == "no-store"
    assert 290 < left.json()["idle"] <= 300
    assert left.json()["whole"] == pytest.approx(11 * 3600 + 50 * 60, abs=10)
    answer = browser.post("/console/session", {"form_token": "0" * 64})
    assert answer.status_code == 403
    stays = browser.post("/console/session", {"form_token": token})
    assert 890 < stays.json()["idle"] <= 900
    with service.database.read() as connection:
        used_at = connection.scalar(sa.select(tables.console_sessions.c.used_at))
    assert service.clock() - used_at < timedelta(seconds=10), "other members know it at once"
    browser.site = "same-site"
    assert browser.post("/console/session", {"form_token": token}).status_code == 403


def test_signs_of_life_are_no_requests_of_the_tenant(start: Callable[..., Service]) -> None:
    service = start(control_requests_per_minute=5)
    service.limit(RateLimits(5, 5, service.clock))
    service.listen()
    browser = signed_in(service)
    fields = {"form_token": browser.form_token()}
    answers = [browser.post("/console/session", fields).status_code for _ in range(9)]
    assert {*answers} == {200}


def test_a_short_session_lasts_while_it_is_used(start: Callable[..., Service]) -> None:
    service = start(console_idle_minutes=1)
    service.listen()
    browser = signed_in(service)
    for step in range(1, 9):
        service.clock.ahead = timedelta(seconds=20 * step)
        assert browser.open("/console").status_code == 200
    service.clock.ahead += timedelta(seconds=61)
    assert browser.open("/console").status_code == 303


def test_a_session_ends_no_later_than_its_key(service: Service) -> None:
    key = service.keys.issue("alice", PRESETS["viewer"], service.clock() + timedelta(hours=1))
    browser = Browser(service)
    browser.post("/console/sign-in", {"client_id": "alice", "key": key})
    assert 3590 < browser.open("/console/session").json()["whole"] <= 3600


def test_signing_out_is_in_the_audit_chain_once(service: Service) -> None:
    browser = signed_in(service)
    fields = {"form_token": browser.form_token()}
    assert browser.post("/console/sign-out", fields).status_code == 303
    with service.database.read() as connection:
        rows = connection.execute(sa.select(tables.audit).order_by(tables.audit.c.seq)).mappings()
        entered, left = [row for row in rows if row["action"].startswith("sign_")]
    assert (entered["action"], left["action"]) == ("sign_in", "sign_out")
    for name in ("client_id", "key_id"):
        assert left[name] == entered[name]
    assert left["address"].startswith("127.")
    # A second sign-in ends the first, which is a sign-out, too.
    browser = signed_in(service)
    browser.post("/console/sign-in", {"code": code_of(link_of(service))})
    assert actions(service)[-2:] == ["sign_in", "sign_out"]


def test_after_the_end_the_cookie_is_gone_and_the_sign_in_leads_back(service: Service) -> None:
    browser = signed_in(service)
    service.clock.ahead = timedelta(minutes=16)
    led = browser.open("/console/jobs?status=failed")
    place = led.headers["location"]
    assert place == "/console/sign-in?next=%2Fconsole%2Fjobs%3Fstatus%3Dfailed"
    assert browser.open("/console/session").status_code == 303
    shown = browser.open(place)
    assert "the session has ended" in shown.text
    assert "Max-Age=0" in shown.headers["set-cookie"]
    assert "the session has ended" not in browser.open(place).text
    fields = {"code": code_of(link_of(service)), "next": "/console/jobs?status=failed"}
    answer = browser.post("/console/sign-in", fields)
    assert answer.headers["location"] == "/console/jobs?status=failed"


def test_a_page_says_when_its_session_ends_also_where_it_is_an_error(service: Service) -> None:
    browser, job = signed_in(service), service.job()
    asked = f"/console/do/cancel_job?job_id={job}&then=/console/jobs/{job}"
    for path, then in (
        (asked, asked),
        ("/console/jobs?status=failed",) * 2,
        ("/console/nope", "/console"),
    ):
        [dialog] = [one for tag, one in Markup(browser.open(path).text).tags if tag == "dialog"]
        assert dialog["role"] == "alertdialog"
        assert dialog["data-next"] == then
        assert 890 < float(dialog["data-idle-left"] or 0) <= float(dialog["data-idle"] or 0) == 900
    assert "<dialog" not in browser.open("/console/sign-in").text
