"""A whole release is published while it runs, and what refused it is seen in its lines and not just in its reason."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.release.record_file import ReleaseRecords
from flows.shared.release_events import finish
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.conftest import in_use
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.release_service import WholeReleaseService

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@pytest.fixture
def service(
    prefect_api: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeReleaseService]:
    with in_use(WholeReleaseService(), tmp_path / "reports", monkeypatch) as running:
        assert isinstance(running, WholeReleaseService)
        yield running


def published(service: WholeReleaseService, run_key: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of a release by record, once all are sent."""
    finish()
    found = [key for key, one in service.releases.items() if one["run_key"] == run_key]
    assert len(found) == 1
    return service.lines[found[0]]


def test_a_release_shows_its_data_its_gates_and_its_rollout(
    service: WholeReleaseService, records: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    result = tune_and_deploy(release(tmp_path, files=[str(file)]))
    assert result.outcome == "promoted"

    lines = published(service, result.run_key)

    (own,) = [one for name, one in lines.items() if not name.startswith("rollout-")]
    by_kind = {line["kind"]: line for line in own}
    assert list(by_kind) == [
        *("begun", "data", "release", "job", "trained", "training_gates"),
        *("baseline", "candidate", "smoke_test", "rollout", "ended", "model_card"),
    ]
    assert by_kind["data"]["training_examples"] == 80
    assert by_kind["data"]["validation_examples"] == 60
    gates = {gate["name"]: gate for gate in by_kind["training_gates"]["gates"]}
    assert gates["T1 finite"]["state"] == "pass"
    assert set(gates["T1 finite"]) == {"name", "state", "value", "limit"}
    assert by_kind["smoke_test"]["gates"][0]["name"] == "T10 smoke"
    (rollout,) = [one for name, one in lines.items() if name.startswith("rollout-")]
    assert (rollout[0]["kind"], rollout[-1]["kind"]) == ("begun", "ended")
    (record,) = ReleaseRecords(records)
    assert len(own) == len(record.facts)
    assert [len(digest) for digest in (record.last("data") or {})["content"]] == [64]
    sent = json.dumps([service.releases, service.lines])
    assert str(tmp_path) not in sent
    assert service.releases[next(iter(service.lines))]["links"]["prefect_run"].startswith("http")


def test_a_refusal_is_seen_in_its_gate(service: WholeReleaseService, tmp_path: Path) -> None:
    service.losses = lambda _: [1.0, 1.0, 1.0, 1.0]
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    result = tune_and_deploy(release(tmp_path, files=[str(file)]))
    assert (result.outcome, result.reason) == ("rejected", "training_gate")

    (own,) = published(service, result.run_key).values()

    (gates,) = [line for line in own if line["kind"] == "training_gates"]
    assert gates["reason"] == result.gate
    refusing = next(gate for gate in gates["gates"] if gate["name"] == result.gate)
    assert refusing["state"] in ("hold", "reject")
    assert refusing["limit"] is not None
    ended = next(line for line in own if line["kind"] == "ended")
    assert (ended["outcome"], ended["reason"]) == ("rejected", "training_gate")
