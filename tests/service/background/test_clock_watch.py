"""A clock that jumps in either direction while the service runs deletes nothing and stops nothing."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tuneship.service.background.clock_watch import HOLD_S, ClockWatch
from tuneship.store.database import tables

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR_S = 3600.0


class FakeTime:
    """A wall clock, and the time that has really passed."""

    def __init__(self) -> None:
        self.now, self.passed_s = NOON, 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.passed_s += seconds

    def watch(self, last_seen: datetime | None = None) -> ClockWatch:
        return ClockWatch(lambda: self.now, lambda: self.passed_s, last_seen)


@pytest.mark.parametrize("jump", [timedelta(minutes=6), timedelta(days=1), timedelta(days=400)])
def test_after_a_jump_ahead_nothing_is_forgotten_for_a_day(jump: timedelta) -> None:
    time = FakeTime()
    watch = time.watch()
    time.pass_by(HOUR_S)
    assert watch.may_forget()
    time.now += jump
    assert not watch.may_forget()
    time.pass_by(HOLD_S - 1)
    assert not watch.may_forget()
    time.pass_by(2)
    assert watch.may_forget()


@pytest.mark.parametrize("jump", [timedelta(minutes=4), timedelta(days=-1)])
def test_a_small_step_or_a_jump_back_holds_nothing_up(jump: timedelta) -> None:
    time = FakeTime()
    watch = time.watch()
    time.now += jump
    assert watch.may_forget()


@pytest.mark.parametrize(
    ("away", "may_forget"), [(timedelta(hours=20), True), (timedelta(days=30), False)]
)
def test_a_start_after_a_long_time_forgets_nothing_for_a_day(
    away: timedelta, may_forget: bool
) -> None:
    time = FakeTime()
    watch = time.watch(last_seen=NOON - away)
    assert watch.may_forget() == may_forget
    time.pass_by(HOLD_S)
    assert watch.may_forget()


def kept(service: Service) -> dict[str, int]:
    """The number of rows in every table from which rows are deleted by age."""
    service.supervisor.records.store_metrics()
    service.supervisor.records.store_logs()
    found = (tables.events, tables.idempotency, tables.metric_windows, tables.deployment_logs)
    with service.database.read() as connection:
        return {
            table.name: connection.execute(
                sa.select(sa.func.count()).select_from(table)
            ).scalar_one()
            for table in found
        }


def worked(service: Service) -> None:
    """Make a row in every table from which rows are deleted by age."""
    deployment = service.deployment("d")
    generated = service.call("POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "a"})
    assert generated.status_code == 200
    body = {"name": "e", "deployment_id": deployment}
    headers = {"Idempotency-Key": "once"}
    assert service.call("POST", "/v1/endpoints", json=body, headers=headers).status_code == 201


def test_resources_of_users_outlive_a_clock_that_jumps_ahead(
    start: Callable[..., Service],
) -> None:
    service = start()
    worked(service)
    service.rest()
    before = kept(service)
    assert all(before.values()), before
    service.clock.jumped = timedelta(days=400)
    service.go_on()
    service.until(lambda: any("jumped ahead" in line for line in service.log.texts))
    path = f"/v1/fine-tuning/jobs/{service.job()}"
    service.until(lambda: service.call("GET", path).json()["status"] == "running")
    after = kept(service)
    assert all(after[name] >= number for name, number in before.items()), (before, after)
    # Nobody has set the clock back, so it is believed.
    service.clock.ahead = timedelta(seconds=HOLD_S + 1)
    service.until(lambda: kept(service)["idempotency"] < before["idempotency"])


def test_metrics_are_stored_although_the_clock_was_set_back(start: Callable[..., Service]) -> None:
    service = start()
    worked(service)
    service.clock.jumped = timedelta(days=-1)
    deployment = service.deployment("after")
    answer = service.call("POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "a"})
    assert answer.status_code == 200
    table = tables.metric_windows

    def stored() -> bool:
        with service.database.read() as connection:
            query = sa.select(table.c.start).where(table.c.deployment_id == deployment)
            return connection.execute(query).first() is not None

    service.until(stored)
