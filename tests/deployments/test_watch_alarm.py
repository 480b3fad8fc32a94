"""The example automation starts for the guard's alarm and for no other event."""

from typing import Any

import yaml
from prefect.automations import AutomationCore, SendNotification
from prefect.events import Event
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

from flows.upkeep.watch import EVENT
from tests.support.prefect.local_machine import ROOT


def example() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "examples" / "watch_alarm.yaml").read_text())


def starts_for(name: str, resource_id: str) -> bool:
    event = Event(event=name, resource={"prefect.resource.id": resource_id})  # pyright: ignore[reportArgumentType]
    trigger = EventTrigger.model_validate(example()["trigger"])
    return trigger.covers(ReceivedEvent.model_validate(event.model_dump()))


def test_it_tells_a_person_and_moves_nothing() -> None:
    automation = AutomationCore.model_validate(example())
    assert [type(one) for one in automation.actions] == [SendNotification]


def test_it_starts_for_an_alarm_of_the_watch_only() -> None:
    assert starts_for(EVENT, "tuneship.deployment.dep_1")
    assert not starts_for(EVENT, "tuneship.dataset.ds_1")
    assert not starts_for("dataset.processed", "tuneship.deployment.dep_1")
