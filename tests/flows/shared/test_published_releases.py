"""The real service keeps what the pipeline's sender writes, shows it, and takes answers to its questions."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from flows import shift_traffic
from flows.release.record_file import ReleaseRecord
from flows.rollout.record_file import RecordFile
from flows.shared import links
from flows.shared.approval import ApprovalReply, answer_to
from flows.shared.errors import BadInput
from flows.shared.release_events import finish, takes_answers
from tests.flows.shared.test_release_events import FACTS, OWN, die
from tests.support.service.in_process import Service
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.releases import ReleaseAnswer, ReleaseStatus
from tuneship.gates.plan import CanaryRules
from tuneship.gates.record import ApprovalAnswered, ApprovalAsked, Ended
from tuneship.prefect.connection import api, connect, disconnect
from tuneship.settings import ClientSettings

UNTIL = datetime.now(UTC) + timedelta(days=1)
HELD = [{"name": "T8 enough data", "state": "hold", "value": 12.0, "limit": 50.0, "note": "12"}]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A client of a service with sockets, which this process publishes to."""
    with Service(tmp_path / "data") as service:
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        settings = ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice")
        connect(settings)
        yield api()
        die()
        disconnect()


def add(record: ReleaseRecord, kind: str, **fields: Any) -> None:
    record.add(kind, datetime.now(UTC), **fields)


def test_a_release_is_shown_stage_by_stage_and_its_questions_are_answered(
    client: Client, tmp_path: Path
) -> None:
    own = ReleaseRecord(tmp_path / "releases" / "abc-1.jsonl")
    place = {"endpoint_id": None, "endpoint_name": "shop", "model_name": "notes"}
    link = {"prefect_run": "http://127.0.0.1:4200/runs/flow-run/1"}
    add(own, "begun", run_key="key 1", links=link, **place)
    add(own, "data", dataset_id="ds_0000000001", training_examples=80, validation_examples=12)
    add(own, "training_gates", decision="hold", reason="T8 enough data", gates=HELD)
    asked = {"question": "1f", "asks": ["T8 enough data"], "until": UNTIL.isoformat()}
    add(own, "question", **asked)
    until(lambda: client.releases.list(status=ReleaseStatus.WAITING).releases)

    (shown,) = client.releases.list().releases
    assert (shown.run_key, shown.model_name, shown.endpoint_name) == ("key 1", "notes", "shop")
    assert (shown.kind, shown.stage, shown.links) == ("release", "training_gates", link)
    assert shown.question is not None
    assert (shown.question.id, shown.question.asks) == ("1f", ["T8 enough data"])
    lines = client.releases.lines(shown.id).lines
    assert lines[2].line["gates"][0]["name"] == "T8 enough data"
    assert lines[2].line["reason"] == "T8 enough data"

    now = datetime.now(UTC)
    assert answer_to("1f", UNTIL, now, own.path) is None
    said = ReleaseAnswer(
        question="1f", decision="promote", name="Eve", reason="evidence", ticket="CHG-1"
    )
    client.releases.answer(shown.id, said)
    assert answer_to("1f", UNTIL, now, own.path) == ApprovalReply(
        "promote", "Eve", "evidence, CHG-1"
    )
    assert answer_to("2f", UNTIL, now, own.path) is None, "it answers another question"
    add(own, "held_gates", said="promote by Eve", question="1f", decision="promote", approver="Eve")
    until(lambda: client.releases.get(shown.id).question is None)

    for kind, fields in OWN[5:6]:
        add(own, kind, **fields)
    rollout = RecordFile(tmp_path / "here" / "rollout-0-0001.jsonl")
    rollout.append(*FACTS[:5], ApprovalAsked(now, "3f", UNTIL))
    until(lambda: client.releases.get(shown.id).status == "waiting")
    assert client.releases.get(shown.id).stage == "approval"
    rollout.append(ApprovalAnswered("roll back", "Eve"), Ended("rolled_back", "human_rejected"))
    add(own, "ended", outcome="rolled_back", reason="human_rejected")
    finish()

    (shown,) = client.releases.list().releases
    assert (shown.status, shown.outcome, shown.reason) == ("ended", "rolled_back", "human_rejected")
    assert sorted(shown.records.values()) == [len(own.facts) + 1, len(rollout.record.facts) + 1]
    kinds = [one.line["kind"] for one in client.releases.iterate_lines(shown.id)]
    assert "unknown" not in kinds


def test_an_approval_that_nobody_can_give_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shift_traffic, "can_be_answered", lambda: False)
    with pytest.raises(BadInput, match='approval: "required" needs a place'):
        shift_traffic.ready(CanaryRules(approval="required"))
    assert shift_traffic.ready(CanaryRules()) == []


def test_a_service_with_releases_takes_answers_and_its_console_is_linked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert takes_answers()
    written: list[str] = []
    monkeypatch.setattr(links, "create_link_artifact", lambda url, **_: written.append(url))
    links.show_link("job", "ft_1")
    monkeypatch.setattr(links, "has_console", lambda _: False)
    links.show_link("job", "ft_1")
    assert written == [
        f"{client.settings.url}{path}/ft_1" for path in ("/console/jobs", "/v1/fine-tuning/jobs")
    ]
