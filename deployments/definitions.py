"""Merges the flows of `prefect.yaml` with the settings that people have changed on a Prefect server.

`prefect deploy` resets everything to its file: the `release` that was set for a retraining would be gone, and its
schedule off again. So it gets a merged file. Kept are parameters, the switches of flows, schedules and triggers, and
schedules that the file does not know.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from deployments.commands import PROJECT

PREFECT_YAML = PROJECT / "prefect.yaml"
WORK_POOL = "tuneship"
# The name of the worker that `make up` starts.
WORKER = "local"
# Fields that define when a schedule starts a run, both on the server and in the file.
TIMES = ("cron", "interval", "rrule", "anchor_date", "timezone", "day_or")
Definition = dict[str, Any]


def merged(
    wanted: Definition, found: Mapping[str, Any], triggers: Mapping[str, bool]
) -> Definition:
    """Merge one flow's definition with its JSON on the server; `triggers`: which triggers are on, by name."""
    known = {schedule["slug"]: schedule for schedule in found["schedules"] if schedule["slug"]}
    schedules = [
        {**schedule, "active": known[schedule["slug"]]["active"]}
        if schedule.get("slug") in known
        else schedule
        for schedule in wanted.get("schedules", [])
    ]
    ours = {schedule.get("slug") for schedule in schedules}
    for schedule in found["schedules"]:
        if schedule["slug"] in ours:
            continue
        # The server nests the times and sends every field; the file has only those that are set.
        times = {name: schedule["schedule"].get(name) for name in TIMES}
        rest = {name: schedule[name] for name in ("active", "slug", "parameters")}
        given = {name: value for name, value in (times | rest).items() if value}
        schedules.append({"active": False, **given})
    starts = [
        {**trigger, "enabled": triggers.get(trigger["name"], trigger["enabled"])}
        for trigger in wanted.get("triggers", [])
    ]
    return {
        **wanted,
        "paused": found["paused"],
        "parameters": {**wanted.get("parameters", {}), **found["parameters"]},
        **({"schedules": schedules} if schedules else {}),
        **({"triggers": starts} if starts else {}),
    }


def write_merged(file: Path) -> None:
    """Write the definitions, merged with the settings of the server at PREFECT_API_URL, to this file."""
    whole = yaml.safe_load(PREFECT_YAML.read_text())
    definitions: list[Definition] = []
    with get_client(sync_client=True) as client:
        for wanted in whole["deployments"]:
            # Prefect names a flow after its function, with dashes.
            flow = wanted["entrypoint"].rpartition(".")[2].replace("_", "-")
            try:
                found = client.read_deployment_by_name(f"{flow}/{wanted['name']}")
            except ObjectNotFound:
                definitions.append(wanted)
                continue
            triggers = {
                automation.name: automation.enabled
                for trigger in wanted.get("triggers", [])
                for automation in client.read_automations_by_name(trigger["name"])
            }
            definitions.append(merged(wanted, found.model_dump(mode="json"), triggers))
    whole["deployments"] = definitions
    file.write_text(yaml.safe_dump(whole, sort_keys=False))
