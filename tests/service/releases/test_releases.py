"""Releases over the API: lines exactly once, questions and answers, and who may see and decide."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.support.service.in_process import Service
from tests.support.service.releases import (
    NOON,
    OWN,
    QUESTION,
    ROLLOUT,
    PlayedPipeline,
    asked,
    ended,
    line_of,
    look,
)
from tuneship.contract.declaring.scopes import PRESETS, SCOPES
from tuneship.gates.record import ApprovalAnswered, ApprovalAsked, Ended
from tuneship.service.releases.handlers import _holder
from tuneship.store.database import rows, tables
from tuneship.store.records.audit import Person

HIPAA: dict[str, Any] = {"security_settings": {"compliance_mode": "hipaa"}}
LINES = [{"kind": "begun", "run_key": str(number)} for number in range(5)]
BAD_REQUEST = {"more": 400}


def numbers(pipeline: PlayedPipeline) -> list[tuple[str, int]]:
    answer = pipeline.service.call("GET", f"{pipeline.path}/lines?limit=1000")
    return [(one["record"], one["number"]) for one in answer.json()["lines"]]


def kinds_of_events(service: Service) -> list[str]:
    events = service.call("GET", "/v1/events?limit=1000").json()["events"]
    return [one["type"] for one in events if one["type"].startswith("release.")]


def test_a_run_is_announced_once(service: Service) -> None:
    first = PlayedPipeline(service, "one", links={"prefect_run": "javascript:alert(1)"})
    again = PlayedPipeline(service, "one", endpoint_name="other")
    assert (again.id, again.shown["endpoint_name"], again.shown["links"]) == (first.id, "notes", {})
    linked = PlayedPipeline(service, "two", links={"prefect_run": "https://prefect.test/1"})
    assert linked.shown["links"] == {"prefect_run": "https://prefect.test/1"}
    # Another tenant's run of the same name is another one.
    theirs = PlayedPipeline(service, "one", "bob")
    assert theirs.id != first.id
    rollout = PlayedPipeline(service, "three", kind="rollout")
    assert rollout.shown["stage"] == "canary"
    listed = service.call("GET", "/v1/releases?run_key=two").json()
    assert [one["id"] for one in listed["releases"]] == [linked.id]


@pytest.mark.both_databases
def test_each_line_is_stored_once_whatever_is_sent_again(service: Service) -> None:
    pipeline = PlayedPipeline(service, "one")
    assert pipeline.post(OWN, 1, LINES[:2]).json()["next_line"] == 3
    # An answer was lost: the same again, and a part of it with more behind.
    assert pipeline.post(OWN, 1, LINES[:2]).json()["next_line"] == 3
    assert pipeline.post(OWN, 2, LINES[1:4]).json()["next_line"] == 5
    gap = pipeline.post(OWN, 6, LINES[:1])
    assert gap.status_code == 409
    assert gap.json()["error"]["details"] == [
        {
            "line": 5,
            "field": "first_line",
            "code": "gap",
            "message": "the lines before it are missing",
        }
    ]
    assert pipeline.post(ROLLOUT, 2, LINES[:1]).json()["error"]["details"][0]["line"] == 1
    assert pipeline.post(ROLLOUT, 1, LINES[:1]).json()["next_line"] == 2
    assert numbers(pipeline) == [*((OWN, number) for number in range(1, 5)), (ROLLOUT, 1)]
    assert pipeline.shown["records"] == {OWN: 5, ROLLOUT: 2}


@pytest.mark.both_databases
def test_two_senders_store_each_line_once(service: Service) -> None:
    pipeline = PlayedPipeline(service, "one")
    lines = [line_of(look(number, 40, 5)) for number in range(1, 41)]

    def send(start: int) -> None:
        for first in range(start, 41, 2):
            while pipeline.post(ROLLOUT, first, lines[first - 1 : first + 2]).status_code == 409:
                pass

    with ThreadPoolExecutor(2) as senders:
        assert [*senders.map(send, (1, 2))] == [None, None]
    assert numbers(pipeline) == [(ROLLOUT, number) for number in range(1, 41)]
    evidence = service.call("GET", f"{pipeline.path}/evidence").json()
    assert [one["number"] for one in evidence["points"]] == [*range(1, 41)]


def test_lines_are_read_page_by_page_with_and_without_looks(service: Service) -> None:
    pipeline = ended(service, "one")
    whole = pipeline.lines()
    few = pipeline.lines(looks=False)
    assert [one for one in whole if one["kind"] not in ("look", "probed")] == few
    assert {one["kind"] for one in few} >= {"begun", "split_confirmed", "approval_asked", "ended"}
    found, after = [], None
    while True:
        query = {"limit": 7} | ({"after": after} if after else {})
        page = service.call("GET", f"{pipeline.path}/lines", params=query).json()
        if not page["lines"]:
            break
        found += [one["line"] for one in page["lines"]]
        after = page["pagination"]["after"]
    assert found == whole
    other = ended(service, "two")
    stolen = service.call("GET", f"{other.path}/lines", params={"after": after})
    assert stolen.status_code == 422


@pytest.mark.both_databases
def test_evidence_of_many_looks_is_shown_in_part_with_the_newest(service: Service) -> None:
    pipeline = PlayedPipeline(service, "one", kind="rollout")
    nothing = service.call("GET", f"{pipeline.path}/evidence").json()
    assert nothing == {"looks": 0, "points": [], "last_look": None}
    pipeline.facts(*(look(number, 900, 5) for number in range(1, 902)))
    evidence = service.call("GET", f"{pipeline.path}/evidence").json()
    shown = [one["number"] for one in evidence["points"]]
    assert (evidence["looks"], len(shown), shown[-1]) == (901, 301, 901)
    assert evidence["last_look"]["number"] == 901
    assert evidence["last_look"]["kept"] == ""


@pytest.mark.both_databases
def test_a_question_is_answered_and_closed_by_its_line(service: Service) -> None:
    pipeline = asked(service, "one")
    shown = pipeline.shown
    assert (shown["status"], shown["stage"]) == ("waiting", "approval")
    assert shown["candidate_percentage"] == 75
    question = shown["question"]
    assert question["id"] == QUESTION
    assert question["asks"] == ["promotion"]
    assert question["allowed"] == ["promote", "roll back"]
    assert kinds_of_events(service) == ["release.waiting"]
    assert pipeline.answer("promote", question="other").status_code == 409
    given = pipeline.answer("promote").json()["question"]
    assert given["answer"]["name"] == "A. Reviewer"
    assert given["allowed"] == ["roll back"]
    # It is a proposal: the release still waits, and the pipeline hears it with its next line.
    assert pipeline.shown["status"] == "waiting"
    assert pipeline.answer("promote").status_code == 409
    heard = pipeline.facts(look(42, 42, 75))
    assert heard["answer"]["decision"] == "promote"
    # Whoever finds a reason to stop is heard, and nobody after that.
    assert pipeline.answer("roll back", name="B. Other").status_code == 200
    assert pipeline.answer("promote").status_code == 409
    closed = pipeline.facts(ApprovalAnswered("roll back", "B. Other"))
    assert closed["answer"] is None
    after = pipeline.shown
    assert (after["status"], after["question"]) == ("running", None)
    assert pipeline.answer("promote").status_code == 409
    pipeline.facts(Ended("rolled_back", "human_rejected"))
    pipeline.own("ended", outcome="rolled_back", reason="human_rejected")
    assert kinds_of_events(service) == ["release.waiting", "release.ended"]
    event = service.call("GET", "/v1/events?limit=1000").json()["events"][-1]["data"]
    assert (event["status"], event["outcome"]) == ("ended", "rolled_back")
    assert "notes" not in str(event)


def test_a_question_ends_with_its_time_and_with_the_release(service: Service) -> None:
    pipeline = asked(service, "one")
    service.clock.ahead += timedelta(hours=24)
    assert pipeline.answer("promote").status_code == 409
    service.clock.ahead -= timedelta(hours=24)
    pipeline.own("ended", outcome="aborted", reason="stopped")
    assert pipeline.shown["question"] is None
    assert pipeline.answer("roll back").status_code == 409
    # A line that comes late opens nothing.
    pipeline.facts(ApprovalAsked(NOON, QUESTION))
    assert pipeline.shown["status"] == "ended"


def test_an_ended_release_can_be_deleted_and_no_other(service: Service) -> None:
    waiting, over = asked(service, "one"), ended(service, "two")
    assert service.call("DELETE", waiting.path).status_code == 409
    assert service.call("DELETE", over.path).json() == {"id": over.id, "deleted": True}
    assert service.call("GET", over.path).status_code == 404
    assert over.post(OWN, 1, LINES[:1]).status_code == 404
    statuses = {
        status: service.call("GET", f"/v1/releases?status={status}").json()["pagination"]["total"]
        for status in ("waiting", "ended")
    }
    assert statuses == {"waiting": 1, "ended": 0}


def test_quotas_of_releases_lines_and_records(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = "tuneship.service.releases.handlers"
    monkeypatch.setattr(f"{handlers}.MOST_RELEASES", 1)
    monkeypatch.setattr(f"{handlers}.MOST_LINES", 3)
    monkeypatch.setattr(f"{handlers}.MOST_RECORDS", 1)
    pipeline = PlayedPipeline(service, "one")
    body = {"run_key": "two", "kind": "release"}
    refused = service.call("POST", "/v1/releases", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert pipeline.post(OWN, 1, LINES[:3]).status_code == 200
    assert pipeline.post(OWN, 4, LINES[:1]).status_code == 429
    assert pipeline.post(OWN, 3, LINES[:1]).status_code == 200, "a known line costs nothing"
    monkeypatch.setattr(f"{handlers}.MOST_LINES", 100)
    assert pipeline.post(ROLLOUT, 1, LINES[:1]).status_code == 429


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("record", "../../etc/passwd"),
        ("record", "x-1"),
        ("first_line", 0),
        ("first_line", 20_001),
        ("lines", []),
        ("lines", [{}] * 101),
        ("lines", ["text"]),
        ("more", 1),
    ],
)
def test_bad_lines_are_refused_by_name(service: Service, field: str, value: Any) -> None:
    pipeline = PlayedPipeline(service, "one")
    body = {"record": OWN, "first_line": 1, "lines": LINES, field: value}
    refused = service.call("POST", f"{pipeline.path}/lines", json=body)
    assert refused.status_code == BAD_REQUEST.get(field, 422)
    assert field in refused.json()["error"]["details"][0]["field"]
    assert numbers(pipeline) == []


# Who may


def test_a_release_of_another_tenant_is_none(service: Service) -> None:
    pipeline = asked(service, "one")
    calls = [
        ("GET", ""),
        ("GET", "/lines"),
        ("GET", "/evidence"),
        ("DELETE", ""),
    ]
    for method, path in calls:
        assert service.call(method, pipeline.path + path, "bob").status_code == 404
    assert pipeline.answer("promote", "bob").status_code == 404
    body = {"record": OWN, "first_line": 1, "lines": LINES}
    assert service.call("POST", f"{pipeline.path}/lines", "bob", json=body).status_code == 404
    assert service.call("GET", "/v1/releases", "bob").json()["releases"] == []


def test_deciding_needs_its_scope(service: Service) -> None:
    pipeline = asked(service, "one")
    may = {
        preset: "releases:decide" in scopes
        for preset, scopes in PRESETS.items()
        if "releases:read" in scopes
    }
    assert {preset for preset, is_so in may.items() if is_so} == {"operator", "approver", "admin"}
    for preset, decides in may.items():
        headers = service.key_headers("alice", PRESETS[preset])
        shown = service.call("GET", pipeline.path, None, headers=headers).json()
        assert bool(shown["question"]["allowed"]) == decides
        body = {"question": "none", "decision": "promote", "name": "A"}
        status = service.call(
            "POST", f"{pipeline.path}/answer", None, headers=headers, json=body
        ).status_code
        assert status == (409 if decides else 403)


def test_four_eyes_where_the_installation_asks_for_them(start: Callable[..., Service]) -> None:
    service = start(four_eyes=True)
    pipeline = asked(service, "one")
    assert pipeline.shown["question"]["allowed"] == ["roll back"]
    refused = pipeline.answer("promote")
    assert refused.status_code == 403
    assert pipeline.shown["question"]["answer"] is None
    other = service.key_headers("alice", PRESETS["approver"])
    body = {"question": QUESTION, "decision": "promote", "name": "B. Other"}
    answered = service.call("POST", f"{pipeline.path}/answer", None, headers=other, json=body)
    assert answered.json()["question"]["answer"]["name"] == "B. Other"
    # To stop, any key will do.
    assert pipeline.answer("roll back").status_code == 200


def test_a_second_key_of_the_same_holder_makes_no_four_eyes(
    start: Callable[..., Service],
) -> None:
    """Keys of a person, of a label, of a rotation, and one that joined the release later, count as those behind it."""
    service = start(four_eyes=True)
    person = Person("https://login.example", "u-1", "Ann")
    issued = service.keys.issue("alice", SCOPES, None, "pipelines")
    bearer = {"X-Client-ID": "alice", "Authorization": f"Bearer {issued}"}
    own = service.headers["alice"]
    pipeline = asked(service, "one")
    # Another key takes the run over: it announces again and sends a line.
    service.headers["alice"] = bearer
    again = PlayedPipeline(service, "one")
    assert again.id == pipeline.id
    rotated = service.keys.rotate(issued[4:12], None, timedelta(hours=1))
    labelled = service.keys.issue("alice", SCOPES, None, "pipelines")

    def allowed(headers: dict[str, str]) -> list[str]:
        shown = service.call("GET", pipeline.path, None, headers=headers).json()["question"]
        body = {"question": QUESTION, "decision": "promote", "name": "A"}
        answer = service.call("POST", f"{pipeline.path}/answer", None, headers=headers, json=body)
        assert (answer.status_code == 403) == ("promote" not in shown["allowed"])
        return shown["allowed"]

    behind = [own, bearer]
    behind += [{**bearer, "Authorization": f"Bearer {key}"} for key in (rotated, labelled)]
    for headers in behind:
        assert allowed(headers) == ["roll back"]

    # A person whose key was revoked gets another one, and is the same person.
    with service.database.write("alice") as connection:
        first = service.keys.of_person(connection, "alice", SCOPES, person).key_id
        rows.change(connection, tables.releases, pipeline.id, service.clock(), announced_by=first)
    service.keys.revoke(first)
    with service.database.write("alice") as connection:
        second = service.keys.of_person(connection, "alice", SCOPES, person).key_id
        assert second != first
        assert _holder(connection, second) == _holder(connection, first)
        namesake = Person("https://login.example", "u-2", "Ann")
        third = service.keys.of_person(connection, "alice", SCOPES, namesake).key_id
        assert _holder(connection, third) != _holder(connection, first)
    assert allowed(service.key_headers("alice", PRESETS["approver"])) == ["promote", "roll back"]


# The hipaa mode


@pytest.fixture
def hospital(start: Callable[..., Service]) -> Service:
    service = start(private_networks=("10.0.0.0/8",))
    service.come_over_tls()
    return service


def test_a_release_is_in_the_mode_of_its_parts(hospital: Service) -> None:
    candidate = hospital.deployment("candidate", **HIPAA)
    pipeline = PlayedPipeline(hospital, "one")
    pipeline.own("held_gates", question="q", decision="promote", approver="A", comment="Alice Z")
    assert "Alice Z" in str(pipeline.lines())
    # The first line that names such a deployment puts the release into the mode, and what was said before with it.
    pipeline.own("candidate", id=candidate)
    pipeline.facts(
        ApprovalAsked(NOON, QUESTION),
        ApprovalAnswered("roll back", "A. Reviewer", "Alice Z"),
        ApprovalAsked(NOON, QUESTION),
    )
    assert "Alice Z" not in str(pipeline.lines())
    assert "A. Reviewer" in str(pipeline.lines())

    question = pipeline.shown["question"]
    assert (question["allowed"], question["needs_reason"]) == (["roll back"], True)
    missing = pipeline.answer("roll back", ticket="CHG-1")
    assert missing.json()["error"]["param"] == "reason"
    reasons = {"reason": "safety", "ticket": "CHG-1"}
    assert pipeline.answer("roll back", reason="safety").status_code == 422
    assert pipeline.answer("promote", **reasons).status_code == 403
    assert pipeline.answer("roll back", **reasons).status_code == 200
    audit = hospital.call("GET", "/v1/audit?limit=1000").json()["entries"]
    actions = {one["action"] for one in audit if one["resource_id"] == pipeline.id}
    assert {"get_release", "list_release_lines", "add_release_lines", "answer_release"} <= actions
    assert "Alice" not in str(audit)
    events = hospital.call("GET", "/v1/events?limit=100").json()["events"]
    assert "notes" not in str([one for one in events if one["type"].startswith("release.")])

    good = hospital.headers["alice"]
    for days, url, status in ((90, "http", 400), (None, "https", 403)):
        hospital.come_over_tls(days)
        hospital.url = f"{url}://service.test"
        for path in (pipeline.path, f"{pipeline.path}/lines", "/v1/releases"):
            assert hospital.call("GET", path).status_code == status
    hospital.headers["alice"], hospital.url = good, "https://service.test"
    # A part that is deleted does not end the mode.
    hospital.call("DELETE", f"/v1/deployments/{candidate}?force=true")
    pipeline.own("model_card", sha256="0")
    assert pipeline.shown["question"]["needs_reason"] is True


def test_a_caller_outside_the_mode_cannot_bring_a_release_into_it(hospital: Service) -> None:
    candidate = hospital.deployment("candidate", **HIPAA)
    pipeline = PlayedPipeline(hospital, "one")
    hospital.come_over_tls(None)
    body = {"record": OWN, "first_line": 1, "lines": [{"kind": "candidate", "id": candidate}]}
    refused = hospital.call("POST", f"{pipeline.path}/lines", json=body)
    assert refused.status_code == 403
    assert numbers(pipeline) == []
