"""The guard reports a deployment that became worse after its bake, and moves no traffic."""

import errno
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows.guard import guard
from flows.shared.journal import Journal
from flows.upkeep.guard_form import GuardResult, GuardRules
from flows.upkeep.watch import EVENT, Memory
from tests.flows.conftest import use, wait_for
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, Answer, FakeService, as_text
from tuneship.prefect.connection import disconnect

pytestmark = [pytest.mark.prefect]
QUARTER = timedelta(minutes=15)


class Aging(FakeService):
    """An endpoint that only the candidate has served for some hours, with a given share of errors by age."""

    def __init__(self, hours: float) -> None:
        super().__init__()
        self.opened = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=hours)
        self.bad_share: Callable[[float], float] = lambda _hours: 0.004
        self.odd: Callable[[dict[str, Any]], object] = lambda _answer: None
        self.asked: list[str] = []

    def open(self) -> None:
        self.make_endpoint({BASELINE: 0, CANDIDATE: 100})
        if self.endpoint:
            self.endpoint["updated_at"] = as_text(self.opened)

    def _metrics(self, name: str, query: dict[str, str]) -> Answer:
        if self.metrics_down(0):
            return super()._metrics(name, query)
        self.asked.append(query["start_time"])
        start, end = (datetime.fromisoformat(query[key]) for key in ("start_time", "end_time"))
        assert query["interval"] == "15m"
        number = int((end - start) / QUARTER)
        starts = [start + QUARTER * index for index in range(number)]
        hours = [(one - self.opened) / timedelta(hours=1) for one in starts]
        stamps = {"timestamps": [as_text(one) for one in starts]}
        answer: dict[str, Any] = {
            "deployment_id": name,
            "start_time": as_text(start),
            "end_time": as_text(end),
            "interval": "15m",
            "metrics": {
                "throughput": stamps | {"requests_per_second": [5.0] * number},
                "error_rate": stamps
                | {
                    "request_count": [4500] * number,
                    "error_count": [round(4500 * self.bad_share(one)) for one in hours],
                },
                "token_usage": stamps | {"empty_count": [3] * number},
                "latency": stamps
                | {"p50": [400.0] * number, "p95": [900.0] * number, "p99": [1500.0] * number},
            },
            "summary": {},
        }
        self.odd(answer)
        return 200, answer


@pytest.fixture
def aging(prefect_api: None, records: Path) -> Iterator[Callable[[float], Aging]]:
    """Start a service that has served for this many hours."""
    services: list[Aging] = []

    def make(hours: float) -> Aging:
        service = Aging(hours)
        service.__enter__()
        services.append(service)
        service.open()
        use(service)
        return service

    yield make
    disconnect()
    for one in services:
        one.__exit__()


def findings(result: GuardResult) -> list[tuple[str, str]]:
    return [(one.deployment_id, one.finding) for one in result.alarms]


def turns_bad_after(hours: float) -> Callable[[float], float]:
    return lambda now: 0.1 if now >= hours else 0.004


def test_a_deployment_that_turns_bad_after_90_minutes_is_reported_once_and_nothing_is_moved(
    aging: Callable[[float], Aging], caplog: pytest.LogCaptureFixture
) -> None:
    service = aging(3.0)
    service.bad_share = turns_bad_after(1.75)
    split = dict(service.weights)

    with caplog.at_level(logging.WARNING):
        result = guard()

    assert findings(result) == [(CANDIDATE, "error")]
    assert result.outcome == "nothing_to_do"
    assert f"{CANDIDATE} on cep_shop is worse than on its first day (error)" in caplog.text
    assert (service.patches, service.weights) == ([], split)
    assert findings(guard()) == [], "one alarm for one finding"
    wait_for(lambda: events() == [(f"tuneship.deployment.{CANDIDATE}", "error")])
    with get_client(sync_client=True) as client:
        (page,) = [one for one in client.read_artifacts() if one.key == "watch-dep-candidate"]
    assert "| error |" in str(page.data)


def events() -> list[tuple[str, str]]:
    """The alarms that the Prefect server has received."""
    with get_client(sync_client=True) as client:
        wanted = {"filter": {"event": {"name": [EVENT]}}, "limit": 50}
        found = client._client.post("/events/filter", json=wanted).json()["events"]
    return [(one["resource"]["prefect.resource.id"], one["payload"]["finding"]) for one in found]


def test_an_unchanged_deployment_is_not_reported(aging: Callable[[float], Aging]) -> None:
    service = aging(3.0)
    result = guard()
    assert (result.alarms, result.notes) == ([], [])
    assert service.asked, "it was weighed"


def test_the_first_day_is_kept_and_later_days_are_compared_with_it(
    aging: Callable[[float], Aging], records: Path
) -> None:
    service = aging(24.0 * 4)
    assert guard().alarms == []
    (path,) = (records / "watch").glob("*.jsonl")
    memory = Memory(path)
    began = datetime.fromisoformat((memory.last("began") or {})["at"])
    assert timedelta() <= began - service.opened < QUARTER
    kept = (memory.last("first_day") or {})["answer"]
    assert len(kept["metrics"]["throughput"]["timestamps"]) == 96

    service.bad_share = lambda _: 0.1  # the service would now answer this for the first day too
    service.asked.clear()
    assert findings(guard()) == [(CANDIDATE, "error")]
    assert len(service.asked) == 1


@pytest.mark.parametrize("wrong", ["down", "odd", "refused"])
def test_missing_or_wrong_metrics_stop_nothing(
    wrong: str, aging: Callable[[float], Aging], records: Path
) -> None:
    service = aging(3.0)
    if wrong == "down":
        service.metrics_down = lambda _: True
    elif wrong == "odd":
        service.odd = lambda answer: answer["metrics"]["error_rate"].update(request_count=["x"])
    else:
        (records / "watch").parent.mkdir(parents=True, exist_ok=True)
        (records / "watch").write_text("no folder")
        service.bad_share = turns_bad_after(1.75)
    result = guard()
    assert result.outcome == "nothing_to_do"
    assert len(result.notes) == 1
    assert CANDIDATE in result.notes[0]


def test_a_disk_that_takes_no_line_hides_no_alarm(
    aging: Callable[[float], Aging], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = aging(3.0)
    service.bad_share = turns_bad_after(1.75)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(Journal, "_write", full)
        result = guard()
    assert findings(result) == [(CANDIDATE, "error")]
    (note,) = result.notes
    assert "could not be written (No space left on device)" in note
    assert findings(guard()) == [(CANDIDATE, "error")], "reported again, for nothing was remembered"
    assert findings(guard()) == []


def test_an_endpoint_with_a_split_or_a_lease_is_not_watched(
    aging: Callable[[float], Aging],
) -> None:
    service = aging(3.0)
    service.bad_share = turns_bad_after(1.75)
    service.change_from_outside({BASELINE: 10, CANDIDATE: 90})
    assert guard().alarms == []
    service.make_endpoint({CANDIDATE: 100}, lease_seconds=600)
    assert guard().alarms == []
    service.open()
    assert guard(GuardRules(watch=False)).alarms == []
    assert service.asked == []


def test_a_server_that_lists_no_endpoints_is_not_watched(prefect_api: None, records: Path) -> None:
    with FakeService(extensions=False) as bare:
        use(bare)
        result = guard()
        disconnect()
    assert (result.alarms, result.notes) == ([], [])
