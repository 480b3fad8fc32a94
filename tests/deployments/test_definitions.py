"""A new set-up keeps the settings that a person has changed in the Prefect UI."""

from typing import Any

from deployments.definitions import merged

CRON = {"cron": "0 2 * * 0", "timezone": "UTC"}


def wanted() -> dict[str, Any]:
    return {
        "name": "retrain-weekly",
        "entrypoint": "flows.retrain.retrain",
        "schedules": [{**CRON, "slug": "weekly", "active": False}],
        "triggers": [{"name": "on-dataset", "enabled": False, "expect": ["dataset.processed"]}],
    }


def found(**changes: Any) -> dict[str, Any]:
    return {"paused": False, "parameters": {}, "schedules": [], **changes}


def schedule(slug: str | None, *, active: bool, **times: Any) -> dict[str, Any]:
    return {"slug": slug, "active": active, "parameters": {}, "schedule": times}


def test_parameters_that_were_set_stay_and_those_of_the_file_come() -> None:
    file = wanted() | {"parameters": {"a": 1, "b": 1}}
    result = merged(
        file, found(parameters={"b": 2, "release": {"model_name": "m"}}, paused=True), {}
    )
    assert result["parameters"] == {"a": 1, "b": 2, "release": {"model_name": "m"}}
    assert result["paused"] is True


def test_a_schedule_stays_on_or_off_and_its_times_are_the_files() -> None:
    switched_on = schedule("weekly", active=True, cron="0 3 * * 0", timezone="UTC")
    result = merged(wanted(), found(schedules=[switched_on]), {})
    assert result["schedules"] == [{**CRON, "slug": "weekly", "active": True}]


def test_a_schedule_that_the_file_does_not_know_stays() -> None:
    own = [
        schedule(None, active=True, interval=3600.0, anchor_date="2026-01-01T00:00:00Z"),
        schedule("mine", active=False, rrule="FREQ=DAILY", timezone=None),
    ]
    result = merged(wanted(), found(schedules=own), {})
    assert result["schedules"] == [
        *wanted()["schedules"],
        {"active": True, "interval": 3600.0, "anchor_date": "2026-01-01T00:00:00Z"},
        {"active": False, "slug": "mine", "rrule": "FREQ=DAILY"},
    ]


def test_a_trigger_stays_on_or_off() -> None:
    assert merged(wanted(), found(), {})["triggers"] == wanted()["triggers"]
    (trigger,) = merged(wanted(), found(), {"on-dataset": True})["triggers"]
    assert trigger == {**wanted()["triggers"][0], "enabled": True}
