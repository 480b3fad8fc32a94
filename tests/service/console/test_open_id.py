"""Sign-in by OpenID Connect: what a provider may say, and what of it is believed."""

import functools
import hashlib
import hmac
import html
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import sqlalchemy as sa
from joserfc.jwk import RSAKey
from pydantic import ValidationError

from tests.support.fakes.open_id_provider import CLIENT, SECRET, FakeOpenIdProvider, running
from tests.support.service.console import Browser
from tests.support.service.in_process import Service, split
from tests.support.service.releases import QUESTION, asked
from tuneship.contract.common import SignedInPerson
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.gates.record import ApprovalAnswered
from tuneship.host.startup import StartupError
from tuneship.service.access import open_id
from tuneship.service.access.api_keys import KeyOfPerson
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.access.open_id import OpenId
from tuneship.service.access.people_groups import GroupsFault
from tuneship.service.background_requests.answering import BackgroundCaller, kept_caller
from tuneship.service.context.context import Context
from tuneship.service.http.console.open_id_sign_in import LONGEST_NEXT, MOST_BEGUN
from tuneship.settings import ServiceSettings
from tuneship.store.database import tables
from tuneship.store.records import audit
from tuneship.store.records.audit import AuditRecord, Chain, Person

BEGIN, END = "/console/sign-in/openid", "/console/sign-in/openid/end"
GROUPS = """
groups:
  - {group: ml-operators, tenant: alice, scopes: [operator]}
  - {group: ml-trainers, tenant: alice, scopes: [trainer, "audit:read"]}
  - {group: lab, tenant: bob, scopes: [viewer]}
"""
PERSON = ("u-4711", "Ann Weber")
Start = Callable[..., Service]


@pytest.fixture
def provider() -> Iterator[FakeOpenIdProvider]:
    with running() as provider:
        yield provider


@pytest.fixture
def options(provider: FakeOpenIdProvider, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "groups.yaml").write_text(GROUPS)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    return {
        "oidc_issuer": provider.issuer,
        "oidc_client_id": CLIENT,
        "oidc_client_secret_file": tmp_path / "secret",
        "oidc_groups_file": tmp_path / "groups.yaml",
    }


@pytest.fixture
def service(start: Start, options: dict[str, Any], provider: FakeOpenIdProvider) -> Service:
    started = start(**options)
    started.listen()
    provider.now = lambda: started.clock().timestamp()
    return started


def begin(browser: Browser, then: str = "") -> str:
    """The address of the provider to which the console leads."""
    answer = browser.open(f"{BEGIN}?next={then}")
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def come_back(
    service: Service, provider: FakeOpenIdProvider, then: str = ""
) -> tuple[Browser, httpx.Response]:
    browser = Browser(service, "cross-site")
    query = provider.authorize(begin(browser, then))
    answer = browser.open(f"{END}?{query}")
    browser.site = "same-origin"
    return browser, answer


def onward(answer: httpx.Response) -> str:
    found = re.search(r'http-equiv="refresh" content="0; url=([^"]*)"', answer.text)
    assert found is not None, answer.text
    return html.unescape(found[1])


def entries(service: Service) -> list[tuple[str, int, Any]]:
    service.parts.audit.link_all(service.database)
    with service.database.read() as connection:
        return [(row["action"], row["status"], row["person"]) for row in audit.rows_of(connection)]


def signs_in(service: Service, answer: httpx.Response) -> bool:
    return any("tuneship-" in text for text in answer.headers.get_list("set-cookie"))


def test_a_person_signs_in_with_the_rights_of_the_groups(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    browser = Browser(service)
    assert f"{BEGIN}?next=/console" in browser.open("/console/sign-in").text
    begun = browser.open(f"{BEGIN}?next=/console/jobs")
    place = urlsplit(begun.headers["location"])
    query = {name: value for name, [value] in parse_qs(place.query).items()}
    assert f"{place.scheme}://{place.netloc}{place.path}" == f"{provider.issuer}/auth"
    assert query["redirect_uri"] == f"{service.parts.public_url}{END}"
    assert (query["scope"], query["code_challenge_method"]) == ("openid profile", "S256")
    [cookie] = begun.headers.get_list("set-cookie")
    assert {"HttpOnly", "Path=/", "SameSite=lax", "Max-Age=600"} <= {*cookie.split("; ")}
    # The browser reads neither of the secrets in its cookie.
    for secret in (query["state"], query["nonce"]):
        assert secret not in cookie
    answer = browser.open(f"{END}?{provider.authorize(begun.headers['location'])}")
    assert (answer.status_code, onward(answer)) == (200, "/console/jobs")
    page = browser.open("/console/jobs")
    assert page.status_code == 200
    assert "Ann Weber" in page.text
    assert "tenant alice" in page.text
    [(_, authorization)] = provider.token_requests
    assert authorization.startswith("Basic ")
    person = {"issuer": provider.issuer, "subject": PERSON[0], "name": PERSON[1]}
    assert entries(service)[-2:] == [("create_key", 200, person), ("sign_in", 200, person)]


def test_rights_add_up_within_the_tenant_of_the_first_group_in_the_file(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    provider.claims["groups"] = ["lab", "other", "ml-trainers", "ml-operators", {"no": "group"}]
    browser, answer = come_back(service, provider)
    assert answer.status_code == 200
    session = service.parts.sessions.find(cookie_of(service, browser), is_use=False)
    wanted = PRESETS["operator"] | PRESETS["trainer"] | {"audit:read"}
    assert (session.principal.client_id, session.principal.scopes) == ("alice", wanted)
    provider.claims["groups"] = "lab"
    browser, _ = come_back(service, provider)
    session = service.parts.sessions.find(cookie_of(service, browser), is_use=False)
    assert (session.principal.client_id, session.principal.scopes) == ("bob", PRESETS["viewer"])


def cookie_of(service: Service, browser: Browser) -> str:
    return browser.cookies[f"tuneship-{service.parts.sessions.installation}"]


@pytest.mark.both_databases
def test_an_action_of_a_person_stands_in_the_chain_with_the_person(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    provider.claims["groups"] = ["ml-trainers"]
    job = service.job()
    browser, _ = come_back(service, provider)
    sent = {"form_token": browser.form_token(), "job_id": job}
    assert browser.post("/console/do/cancel_job", sent).status_code == 303
    assert entries(service)[-1][0] == "cancel_job"
    assert entries(service)[-1][2]["subject"] == PERSON[0]
    listed = service.call("GET", "/v1/audit", "alice").json()["entries"]
    assert listed[-1]["person"] == {
        "issuer": provider.issuer,
        "subject": PERSON[0],
        "name": PERSON[1],
    }
    assert listed[0]["person"] is None
    with service.database.read() as connection:
        assert service.parts.audit.fault(audit.rows_of(connection)) is None
    # Another name, or none, breaks the chain.
    for changed in ({**listed[-1]["person"], "name": "Bob"}, None):
        with service.database.write() as connection:
            row = sa.update(tables.audit).where(tables.audit.c.action == "cancel_job")
            connection.execute(row.values(person=changed))
        with service.database.read() as connection:
            fault = service.parts.audit.fault(audit.rows_of(connection))
        assert fault is not None


def test_a_decision_of_a_person_has_the_person_whatever_name_is_sent(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    """The name of the form is proposed, and anybody can send another one."""
    pipeline = asked(service, "one")
    browser, _ = come_back(service, provider)
    ask = f"/console/do/promote_release?release_id={pipeline.id}&question={QUESTION}"
    assert 'value="Ann Weber" autocomplete="name" readonly' in browser.open(ask).text
    sent = {"form_token": browser.form_token(), "release_id": pipeline.id, "name": "Dr. Other"}
    answered = browser.post("/console/do/promote_release", {**sent, "question": QUESTION})
    assert answered.status_code == 303
    person = {"issuer": provider.issuer, "subject": PERSON[0], "name": PERSON[1]}
    answer = pipeline.shown["question"]["answer"]
    assert (answer["name"], answer["person"]) == (PERSON[1], person)
    assert entries(service)[-1] == ("answer_release", 200, person)

    pipeline.facts(ApprovalAnswered("promote", "Ann Weber", "", SignedInPerson(**person)))
    assert pipeline.lines()[-1]["person"] == person
    shown = f"Ann Weber, signed in at {provider.issuer} as {PERSON[0]}, decided: promote"
    assert shown in browser.open(f"/console/releases/{pipeline.id}").text


def test_a_pause_of_a_person_has_the_person(service: Service, provider: FakeOpenIdProvider) -> None:
    old, new = (service.deployment(name) for name in ("old", "new"))
    fallback = split({old: 100, new: 0})["deployments"]
    lease = {"seconds": 60, "fallback": fallback, "pausable": True}
    endpoint = service.canary("shop", {old: 50, new: 50}, lease=lease)
    browser, _ = come_back(service, provider)
    sent = {"form_token": browser.form_token(), "endpoint_id": endpoint, "name": "Dr. Other"}
    paused = browser.post("/console/do/pause_canary_endpoint", sent)
    assert paused.status_code == 303, paused.text
    decided = service.call("GET", f"/v1/canary-endpoints/{endpoint}").json()["paused"]
    person = {"issuer": provider.issuer, "subject": PERSON[0], "name": PERSON[1]}
    assert (decided["by"], decided["person"]) == ("Ann Weber", person)


def test_a_row_without_a_person_is_sealed_as_before(service: Service) -> None:
    at = service.clock()
    entry = AuditRecord(at, "alice", "k", "get_job", None, 200, "::1", "req")
    values = [
        1,
        at.isoformat(timespec="microseconds"),
        "alice",
        "k",
        "get_job",
        None,
        200,
        "::1",
        "req",
        None,
        None,
    ]
    encoded = json.dumps(values, separators=(",", ":")).encode()
    sealed = hmac.digest(b"key", bytes(32) + encoded, hashlib.sha256)
    row = {name: getattr(entry, name) for name in audit.NAMES}
    assert Chain(b"key")._seal(bytes(32), 1, row) == sealed


def signed_with(key: Any, **header: str) -> Callable[[FakeOpenIdProvider], None]:
    def change(provider: FakeOpenIdProvider) -> None:
        provider.signing_key, provider.header = key(provider), header

    return change


def claiming(**claims: Any) -> Callable[[FakeOpenIdProvider], None]:
    return lambda provider: provider.claims.update(claims)


# Each changes one thing of a token that would be good, and is refused for this reason.
LIES = {
    "another issuer": (claiming(iss="http://127.0.0.1:1"), "claim iss"),
    "another audience": (claiming(aud="another client"), "claim aud"),
    "several audiences, for another": (claiming(aud=[CLIENT, "other"], azp="other"), "claim azp"),
    "several audiences, for nobody": (claiming(aud=[CLIENT, "other"]), "claim azp"),
    "another nonce": (claiming(nonce="0"), "claim nonce"),
    "no nonce": (claiming(nonce=None), "claim nonce"),
    "expired": (claiming(exp=1_000_000_000), "claim exp"),
    "no expiry": (claiming(exp=None), "claim exp"),
    "from tomorrow": (claiming(iat=4_000_000_000), "claim iat"),
    "no subject": (claiming(sub=None), "claim sub"),
    "a long subject": (claiming(sub="x" * 256), "claim sub"),
    "a subject that is no text": (claiming(sub=7), "claim sub"),
    "a subject with a line break": (claiming(sub="a\nb"), "claim sub"),
    "for another access token": (claiming(at_hash="AAAAAAAAAAAAAAAAAAAAAA"), "claim at_hash"),
    "not signed": (signed_with(lambda _: None, alg="none"), "UnsupportedAlgorithmError"),
    "signed with the client's secret": (
        signed_with(lambda _: SECRET.encode(), alg="HS256", kid="first"),
        "UnsupportedAlgorithmError",
    ),
    "signed with the public key as a secret": (
        signed_with(lambda one: one.key.as_pem(private=False), alg="HS256", kid="first"),
        "UnsupportedAlgorithmError",
    ),
    "signed by another": (
        signed_with(lambda _: RSAKey.generate_key(2048), alg="RS256", kid="first"),
        "BadSignatureError",
    ),
    "with an unknown key": (
        signed_with(lambda one: one.key, alg="RS256", kid="unknown"),
        "is not one of the provider's",
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
def test_a_token_that_lies_signs_nobody_in(
    service: Service, provider: FakeOpenIdProvider, lie: str
) -> None:
    LIES[lie][0](provider)
    _, answer = come_back(service, provider)
    assert answer.status_code == 401, answer.text
    assert not signs_in(service, answer)
    assert LIES[lie][1] in html.unescape(answer.text)
    assert entries(service)[-1][:2] == ("authenticate", 401)
    token_texts = ("at-planted", "eyJ", PERSON[0], "another client", "code-")
    for text in token_texts:
        assert text not in answer.text
        assert not [line for line in service.log.texts if text in line]
    with service.database.read() as connection:
        assert (
            connection.scalar(sa.select(sa.func.count()).select_from(tables.console_sessions)) == 0
        )


def test_a_clock_that_is_a_little_ahead_or_behind_signs_in(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    for skew in (40, -340):
        provider.now = lambda skew=skew: service.clock().timestamp() + skew
        assert come_back(service, provider)[1].status_code == 200


@pytest.mark.parametrize(
    "how", ["no cookie", "changed cookie", "another state", "no state", "late"]
)
def test_only_the_browser_that_began_ends_a_sign_in(
    service: Service, provider: FakeOpenIdProvider, how: str
) -> None:
    browser = Browser(service, "cross-site")
    query = provider.authorize(begin(browser))
    [name] = browser.cookies
    assert name.startswith(f"openid-{service.parts.sessions.installation}-")
    if how == "no cookie":
        browser = Browser(service, "cross-site")
    elif how == "changed cookie":
        browser.cookies.set(name, browser.cookies[name][:-8] + "AAAAAAA=")
    elif how == "late":
        service.clock.ahead = timedelta(minutes=11)
    else:
        query = re.sub("state=[^&]*", "state=0" if how == "another state" else "", query)
    answer = browser.open(f"{END}?{query}")
    assert answer.status_code == 401
    assert "begin again" in answer.text
    assert not signs_in(service, answer)
    assert provider.token_requests == []


def test_two_tabs_may_begin_a_sign_in_at_the_same_time(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    browser = Browser(service, "cross-site")
    queries = {
        then: provider.authorize(begin(browser, then))
        for then in ("/console/jobs", "/console/models")
    }
    for then, query in queries.items():
        answer = browser.open(f"{END}?{query}")
        assert (answer.status_code, onward(answer)) == (200, then)
    assert not [name for name in browser.cookies if name.startswith("openid-")]


def test_a_browser_keeps_the_newest_sign_ins_that_it_began(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    browser = Browser(service, "cross-site")
    longest = "/console/jobs?base_model=" + "x" * (LONGEST_NEXT - 25)
    queries = [provider.authorize(begin(browser, longest)) for _ in range(MOST_BEGUN + 2)]
    assert len(browser.cookies) == MOST_BEGUN
    assert sum(len(name) + len(value) for name, value in browser.cookies.items()) < 8 << 10
    statuses = [browser.open(f"{END}?{query}").status_code for query in queries]
    assert statuses == [401] * 2 + [200] * MOST_BEGUN


def test_a_code_signs_in_once(service: Service, provider: FakeOpenIdProvider) -> None:
    browser = Browser(service, "cross-site")
    query = provider.authorize(begin(browser))
    kept = dict(browser.cookies)
    assert browser.open(f"{END}?{query}").status_code == 200
    # The cookie of the sign-in is gone, and whoever kept it meets the provider's refusal.
    assert browser.open(f"{END}?{query}").status_code == 401
    browser.cookies = httpx.Cookies(kept)
    answer = browser.open(f"{END}?{query}")
    assert (answer.status_code, signs_in(service, answer)) == (401, False)
    assert "refused the code" in answer.text


def test_somebody_whom_the_provider_lets_not_in_gets_a_page(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    browser = Browser(service, "cross-site")
    state = parse_qs(urlsplit(begin(browser)).query)["state"][0]
    answer = browser.open(f"{END}?error=access_denied&error_description=<b>planted&state={state}")
    assert answer.status_code == 401
    assert "let nobody in" in answer.text
    assert "planted" not in answer.text


@pytest.mark.parametrize(
    "groups", [["others"], [], None, "ml", {"ml-operators": True}, [["ml-operators"]]]
)
def test_a_person_of_no_listed_group_is_refused_and_recorded(
    service: Service, provider: FakeOpenIdProvider, groups: Any
) -> None:
    provider.claims["groups"] = groups
    _, answer = come_back(service, provider)
    assert (answer.status_code, signs_in(service, answer)) == (403, False)
    assert "None of your groups" in answer.text
    action, status, person = entries(service)[-1]
    assert (action, status, person["subject"]) == ("sign_in", 403, PERSON[0])
    # The row is the operator's: no tenant sees it.
    assert [
        one for one in service.call("GET", "/v1/audit", "alice").json()["entries"] if one["person"]
    ] == []


def test_groups_may_come_with_the_userinfo_of_the_same_person(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    provider.claims["groups"] = None
    provider.description["userinfo_endpoint"] = f"{provider.issuer}/me"
    provider.userinfo = {"sub": "somebody else", "groups": ["ml-operators"]}
    assert come_back(service, provider)[1].status_code == 401
    provider.userinfo["sub"] = PERSON[0]
    assert come_back(service, provider)[1].status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "content"),
    [
        ("/token", 200, b'{"a": "' + b"x" * (1 << 20) + b'"}'),
        ("/token", 200, b"<html>"),
        ("/token", 200, b"[]"),
        ("/token", 200, b"[" * 100_000),
        ("/token", 200, b"{}"),
        ("/token", 200, b'{"id_token": "eyJ.eyJ.x", "access_token": 7}'),
        ("/token", 302, b"http://127.0.0.1:1/elsewhere"),
        ("/token", 500, b""),
        ("/token", 401, b"{}"),
        ("/keys", 200, b'{"keys": []}'),
        ("/keys", 200, b'{"keys": [{"kty": "RSA"}]}'),
        ("/keys", 404, b"{}"),
        ("/.well-known/openid-configuration", 200, b'{"issuer": "http://127.0.0.1:1"}'),
        ("/.well-known/openid-configuration", 200, b"x" * (2 << 20)),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_page(
    service: Service, provider: FakeOpenIdProvider, path: str, status: int, content: bytes
) -> None:
    provider.instead[path] = status, content
    browser = Browser(service, "cross-site")
    answer = browser.open(BEGIN)
    if answer.status_code == 303:
        answer = browser.open(f"{END}?{provider.authorize(answer.headers['location'])}")
    assert answer.status_code in (401, 503)
    assert "provider of OpenID Connect" in answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert not signs_in(service, answer)
    # Who signs in by a key is not concerned.
    assert browser.open("/console/sign-in").status_code == 200


@pytest.mark.parametrize(
    "name", ["authorization_endpoint", "token_endpoint", "jwks_uri", "end_session_endpoint"]
)
@pytest.mark.parametrize(
    "address",
    ["http://192.0.2.1/x", "javascript:alert(1)", "https://a@b.test/x", "//x", 7, "http://["],
)
def test_an_address_without_tls_is_not_used(
    service: Service, provider: FakeOpenIdProvider, name: str, address: Any
) -> None:
    provider.description[name] = address
    assert Browser(service).open(BEGIN).status_code == 503


def test_a_provider_that_is_away_is_asked_again_after_a_while(
    service: Service, provider: FakeOpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_id, "ANSWER_WITHIN_S", 0.2)
    provider.wait_s = 1.0
    for _ in range(3):
        answer = Browser(service).open(BEGIN)
        assert answer.status_code == 503
        assert "try again, or sign in by a key" in answer.text
    assert len(provider.asked) == 1, "the others did not wait for it, too"
    provider.wait_s = 0.0
    service.clock.ahead = timedelta(seconds=6)
    assert Browser(service).open(BEGIN).status_code == 303


def test_keys_are_kept_for_an_hour_and_a_new_one_is_found(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    for _ in range(3):
        assert come_back(service, provider)[1].status_code == 200
    assert provider.asked.count("/keys") == 1
    new = RSAKey.generate_key(2048, {"kid": "second"})
    provider.published, provider.signing_key = [new], new
    provider.header = {"alg": "RS256", "kid": "second"}
    service.clock.ahead = timedelta(minutes=2)
    for _ in range(2):
        assert come_back(service, provider)[1].status_code == 200
    assert provider.asked.count("/keys") == 2
    service.clock.ahead = timedelta(hours=2)
    assert come_back(service, provider)[1].status_code == 200
    assert provider.asked.count("/keys") == 3


def test_another_member_finishes_what_one_began(
    start: Start, options: dict[str, Any], provider: FakeOpenIdProvider
) -> None:
    one, other = start(**options), start(**options)
    one.listen()
    other.listen()
    provider.now = lambda: one.clock().timestamp()
    browser = Browser(one, "cross-site")
    query = provider.authorize(begin(browser, "/console/models"))
    browser.service = other
    answer = browser.open(f"{END}?{query}")
    assert (answer.status_code, onward(answer)) == (200, "/console/models")


@pytest.mark.parametrize(
    "then", ["https://evil.test", "//evil.test", "/v1/x", "/console/" + "x" * 2000]
)
def test_a_sign_in_leads_to_own_pages_only(
    service: Service, provider: FakeOpenIdProvider, then: str
) -> None:
    assert onward(come_back(service, provider, then)[1]) == "/console"


@pytest.mark.parametrize("how", ["idle", "twelve hours", "key revoked"])
def test_a_session_of_a_person_ends(
    service: Service, provider: FakeOpenIdProvider, how: str
) -> None:
    browser, _ = come_back(service, provider)
    if how == "idle":
        service.clock.ahead = timedelta(minutes=16)
    elif how == "twelve hours":
        for step in range(1, 80):
            service.clock.ahead = timedelta(minutes=10 * step)
            service.parts.sessions.store_uses()
            if browser.open("/console").status_code == 303:
                break
        assert service.clock.ahead == timedelta(hours=12)
    else:
        [key] = [row for row in service.keys.listed() if row["person"]]
        service.keys.revoke(key["id"])
        service.clock.ahead = timedelta(seconds=2)
    assert browser.open("/console").status_code == 303
    # A provider that names the person again lets them in.
    browser, _ = come_back(service, provider)
    assert browser.open("/console").status_code == 200


@pytest.mark.both_databases
def test_a_person_has_one_key_that_nobody_can_use_and_the_newest_rights(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    browser, _ = come_back(service, provider)
    provider.claims |= {"groups": ["ml-trainers"], "name": "Ann Weber-Huber"}
    come_back(service, provider)
    [key] = [row for row in service.keys.listed() if row["person"]]
    assert {*key["scopes"]} == PRESETS["trainer"] | {"audit:read"}
    assert (key["label"], key["expires_at"] - key["created_at"]) == (
        "signs in: Ann Weber-Huber",
        timedelta(days=30),
    )
    service.clock.ahead = timedelta(seconds=2)
    session = service.parts.sessions.find(cookie_of(service, browser), is_use=False)
    assert session.principal.scopes == {*key["scopes"]}
    made_up = f"tsk_{key['id']}_" + "A" * 43
    for secret in (f"{made_up}_aaaaaa", made_up):
        headers = {"Authorization": f"Bearer {secret}", "X-Client-ID": "alice"}
        assert service.call("GET", "/v1/models", None, headers=headers).status_code == 401
    with pytest.raises(KeyOfPerson):
        service.keys.rotate(key["id"], None, timedelta())


def test_sign_out_leads_to_the_end_at_the_provider(
    service: Service, provider: FakeOpenIdProvider
) -> None:
    browser, _ = come_back(service, provider)
    answer = browser.post("/console/sign-out", {"form_token": browser.form_token()})
    place = urlsplit(onward(answer))
    assert f"{place.scheme}://{place.netloc}{place.path}" == f"{provider.issuer}/end"
    assert parse_qs(place.query) == {
        "client_id": [CLIENT],
        "post_logout_redirect_uri": [f"{service.parts.public_url}/console/sign-in"],
    }
    assert browser.open("/console").status_code == 303
    # Away, or without such an address, it ends here alone.
    browser, _ = come_back(service, provider)
    token = browser.form_token()
    provider.instead["/.well-known/openid-configuration"] = 500, b""
    service.clock.ahead = timedelta(minutes=14)
    browser.open("/console")
    service.clock.ahead = timedelta(minutes=26)
    browser.open("/console")
    service.clock.ahead = timedelta(minutes=39)
    browser.open("/console")
    service.clock.ahead = timedelta(minutes=50)
    browser.open("/console")
    service.clock.ahead = timedelta(minutes=61)
    answer = browser.post("/console/sign-out", {"form_token": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/sign-in")


def test_attempts_are_limited(service: Service, provider: FakeOpenIdProvider) -> None:
    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(service.app, client=("127.0.0.1", 9))
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as http:
            return [(await http.get(f"{END}?state=x&code=y")).status_code for _ in range(32)]

    found = service.run(statuses())
    assert found == [401] * 30 + [429] * 2
    assert provider.asked == []


def test_without_an_issuer_there_is_no_such_sign_in(start: Start) -> None:
    service = start()
    service.listen()
    browser = Browser(service)
    assert "OpenID" not in browser.open("/console/sign-in").text
    for path in (BEGIN, END):
        assert browser.open(path).status_code in (401, 404)


def test_settings_of_a_provider_are_checked(tmp_path: Path, service: Service) -> None:
    whole: dict[str, Any] = {
        "oidc_issuer": "https://login.test",
        "oidc_client_id": "x",
        "oidc_groups_file": tmp_path / "groups.yaml",
    }
    ServiceSettings(**whole)
    wrong: tuple[dict[str, Any], ...] = (
        {"oidc_issuer": ""},
        {"oidc_issuer": "http://login.test"},
        {"oidc_issuer": "https://a:b@login.test"},
        {"oidc_issuer": "https://login.test?x=1"},
        {"oidc_issuer": "login.test"},
        {"oidc_client_id": ""},
        {"oidc_groups_file": None},
        {"oidc_groups_claim": ""},
        {"console": False},
    )
    for change in wrong:
        with pytest.raises(ValidationError):
            ServiceSettings(**{**whole, **change})
    for name in ("oidc_client_secret_file", "oidc_ca_file", "oidc_groups_file"):
        settings = ServiceSettings(**{**whole, name: tmp_path / "missing"})
        with pytest.raises((StartupError, GroupsFault), match=r"cannot be (read|used)") as raised:
            OpenId(settings, "", service.clock)
        assert f"TUNESHIP_{name.upper()}" in str(raised.value) or "missing" in str(raised.value)


def test_a_request_in_the_background_stands_for_the_person_who_began_it(service: Service) -> None:
    person = Person("https://login.test", "u-1", "Ann Weber")
    for who in (person, None):
        facts = AuditFacts(key_id="k", person=who)
        context = Context(service.parts, "alice", "req", audit_facts=facts)
        # As it is stored, and read again.
        kept = json.loads(json.dumps(kept_caller(context, is_private=True)))
        caller = BackgroundCaller("alice", kept, "generate", "batch")
        later = caller.context(functools.partial(Context, service.parts))
        assert later.audit_facts.person == who
