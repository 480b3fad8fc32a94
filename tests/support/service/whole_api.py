"""Valid requests of all declared operations, for tests of rules that hold for every operation.

`BODIES` is written by hand; an operation that needs a body but is missing there fails by name. The rest, including
paths and their ids, comes from the declarations.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tuneship.service.all_handlers
from tests.support.models.conversion import ARCHIVE
from tests.support.service.in_process import LINES, jsonl
from tests.support.service.releases import QUESTION
from tuneship.contract.declaring.operation import DECLARED, JSON_LINES, Operation
from tuneship.contract.releases import RECORD
from tuneship.store.database.identifiers import new_id

assert tuneship.service.all_handlers.SERVED, "it declares every operation"
OPERATIONS = tuple(DECLARED)
WITH_PATH_IDS = tuple(one for one in OPERATIONS if one.path_parameters)
WITH_BODIES = tuple(one for one in OPERATIONS if one.body_parameter and not one.is_form)
CREATING = tuple(one for one in OPERATIONS if one.is_creating)
PREFIXES = {
    "job_id": "ft",
    "dataset_id": "ds",
    "deployment_id": "dep",
    "endpoint_id": "ep",
    "webhook_id": "wh",
    "event_id": "evt",
    "evaluation_id": "evl",
    "baseline_id": "evl",
    "release_id": "rel",
    "model_id": "model",
}


@dataclass(frozen=True)
class Own:
    """Objects of a tenant to which valid request bodies refer."""

    dataset: str
    dataset_2: str
    deployment: str
    model: str
    name: str = "every-operation"


def _split(own: Own) -> dict[str, Any]:
    members = [{"id": own.deployment, "traffic_percentage": 100}]
    return {
        "deployments": members,
        "lease": {"seconds": 3600, "fallback": members, "pausable": True},
    }


BODIES: dict[str, Callable[[Own], dict[str, Any]]] = {
    "validate_dataset": lambda _: {"format": "instruction"},
    "upload_dataset": lambda own: {"name": own.name, "format": "instruction"},
    "merge_datasets": lambda own: {
        "dataset_ids": [own.dataset, own.dataset_2],
        "name": own.name,
    },
    "create_job": lambda own: {
        "base_model": "tuneship-tiny",
        "dataset_id": own.dataset,
        "validation_dataset_id": own.dataset_2,
        "model_name": own.name,
    },
    "import_model": lambda own: {"name": own.name, "base_model": "tuneship-tiny"},
    "create_deployment": lambda own: {"model_name": own.model, "deployment_name": own.name},
    "update_deployment": lambda own: {"tags": {"k": own.name}},
    "create_endpoint": lambda own: {"name": own.name, "deployment_id": own.deployment},
    "update_endpoint": lambda own: {"deployment_id": own.deployment},
    "create_canary_endpoint": lambda own: {"name": f"{own.name}-canary", **_split(own)},
    "update_canary_endpoint": _split,
    "renew_canary_lease": lambda _: {"seconds": 600},
    "pause_canary_endpoint": lambda _: {"name": "Ann"},
    "resume_canary_endpoint": lambda _: {"name": "Ann"},
    "revert_canary_endpoint": lambda _: {"name": "Ann", "reason": "safety"},
    "generate": lambda _: {"prompt": "a"},
    "generate_by_endpoint": lambda _: {"prompt": "a"},
    "embed": lambda _: {"input": "a"},
    "embed_by_endpoint": lambda _: {"input": ["a", "b"]},
    "create_evaluation": lambda own: {
        "name": own.name,
        "dataset_id": own.dataset,
        "candidate": own.deployment,
        "graders": [{"name": "same", "type": "string_check"}],
    },
    "create_release": lambda own: {"run_key": own.name, "kind": "release"},
    "add_release_lines": lambda _: {
        "record": RECORD,
        "first_line": 1,
        "lines": [{"kind": "begun"}],
    },
    "answer_release": lambda _: {
        "question": QUESTION,
        "decision": "promote",
        "name": "A. Reviewer",
    },
    "create_webhook": lambda _: {"url": "https://93.184.215.14/hook", "events": ["*"]},
    "update_webhook": lambda own: {"description": own.name},
    "rotate_webhook_secret": lambda _: {"overlap_hours": 1},
    "send_test_event": lambda _: {},
    "replay_webhook": lambda _: {"status": "all"},
}


def body_of(operation: Operation[..., Any], own: Own) -> dict[str, Any]:
    assert operation.name in BODIES, f"whole_api.BODIES has no valid body of {operation.name}"
    return BODIES[operation.name](own)


def options_of(operation: Operation[..., Any], own: Own) -> dict[str, Any]:
    """Return the httpx options of a valid request."""
    if operation.body_parameter is None:
        return {}
    if not operation.is_form:
        return {"json": body_of(operation, own)}
    return {
        "data": body_of(operation, own),
        "files": {"file": file_of(operation)},
    }


def file_of(operation: Operation[..., Any]) -> tuple[str, bytes, str]:
    """Return name, content and media type of the file of a valid form."""
    if operation.file_media is JSON_LINES:
        return "x.jsonl", jsonl(*LINES), JSON_LINES.name
    return "x.tar", ARCHIVE, operation.file_media.name


def path_of(operation: Operation[..., Any], ids: Mapping[str, str]) -> str:
    """Fill ids into an operation's path; `ids` has one of each kind, from `ft` and `ds` to `model`."""

    def identifier(found: re.Match[str]) -> str:
        kind = PREFIXES[found[1]]
        plain = operation.path.startswith("/v1/endpoints/") or kind != "ep"
        return ids[kind if plain else "cep"]

    return re.sub(r"{(\w+)(?::path)?}", identifier, operation.path)


def missing_ids() -> dict[str, str]:
    """Make well-formed ids to which no resource belongs."""
    kinds = ("ft", "ds", "dep", "ep", "cep", "wh", "evt", "evl", "rel")
    made = {kind: new_id(kind) for kind in kinds}
    return {**made, "model": f"ft:tuneship-tiny:m:{made['ft'][3:11]}"}


def replaced(body: Any, old: str, new: str) -> Any:
    """Replace an id in a body, in all places."""
    return json.loads(json.dumps(body).replace(json.dumps(old), json.dumps(new)))
