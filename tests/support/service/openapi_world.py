"""Real resources for requests that are generated from the OpenAPI document, which gets their ids."""

import json
import re
from collections import Counter
from collections.abc import MutableMapping
from itertools import count
from typing import Any

from tests.support.service.evaluations import cancelled, evaluated, rows
from tests.support.service.in_process import Service, jsonl
from tests.support.service.releases import QUESTION, asked, ended
from tuneship.contract.declaring import examples
from tuneship.contract.document.openapi import document
from tuneship.contract.releases import EXAMPLE_ANSWER

Json = dict[str, Any]
Ids = dict[str, list[str]]
ABSENT = "0" * 24
ID_PATTERN = re.compile(r"\^(c?\??ep|[a-z]+)_\[0-9a-z\]\{20,32\}\$")
MODEL_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:/-]{0,255}$"
# Operations that, like every DELETE, can be done only once to a resource.
ENDING = {"cancel_job", "cancel_evaluation"}


class Watch:
    """An ASGI middleware that counts answers by operation, status and code.

    It gives each request a different client address, so that refused keys never lead to a blocked address.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._numbers = count(1)
        self.answers: Counter[tuple[str, str, int, str | None]] = Counter()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = next(self._numbers)
        scope["client"] = (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1)
        heard: list[Json] = []

        async def hear(message: Json) -> None:
            heard.append(message)
            await send(message)

        await self._app(scope, receive, hear)
        if heard and "route" in scope:
            path = re.sub(r":\w+}", "}", scope["route"].path)
            status = heard[0]["status"]
            self.answers[scope["method"], path, status, _code(status, heard)] += 1


def _code(status: int, heard: list[Json]) -> str | None:
    if status < 400:
        return None
    return json.loads(b"".join(one.get("body", b"") for one in heard))["error"]["code"]


def resources(service: Service) -> tuple[Ids, Ids]:
    """Make resources; return the ids, by prefix, of those that stay and of those that requests may delete."""
    deployments = [service.deployment(f"own {number}") for number in range(2)]
    models = [service.model() for _ in range(3)]
    webhooks = [_webhook(service) for _ in range(6)]
    event = service.call("POST", f"/v1/webhooks/{webhooks[0]}/test", json={}).json()["event_id"]
    held_out = service.dataset()
    evaluations = [evaluated(service, held_out, deployments[0]) for _ in range(2)]
    evaluations += [cancelled(service, held_out, deployments[0]) for _ in range(4)]
    completed = service.call("GET", "/v1/fine-tuning/jobs?status=completed")
    kept = {
        "dep": deployments,
        "ds": [service.dataset(content=jsonl(*rows(20))), service.dataset()],
        "ft": [
            one["id"] for one in completed.json()["jobs"]
        ],  # because the stream of an ended job ends
        "cep": [service.canary("own", {deployments[0]: 90, deployments[1]: 10})],
        "ep": [service.endpoint("own plain", deployments[0])],
        "wh": webhooks[:1],
        "evt": [event],
        "evl": evaluations[:2],
        "rel": [asked(service, "kept").id],
        "model": ["tuneship-tiny", models[0]],
    }
    lost = {
        "dep": [service.deployment(f"lost {number}") for number in range(4)],
        "ds": [service.dataset() for _ in range(4)],
        "ft": [service.job() for _ in range(4)],
        "cep": [service.canary(f"lost {n}", {deployments[0]: 100}) for n in range(4)],
        "ep": [service.endpoint(f"lost plain {n}", deployments[0]) for n in range(4)],
        "wh": webhooks[1:],
        "evl": evaluations[2:],
        "rel": [ended(service, f"lost-{number}").id for number in range(4)],
        "model": models[1:],
    }
    return kept, lost


def _webhook(service: Service) -> str:
    body = {"url": "https://receiver.test/hook", "events": ["*"]}
    return service.call("POST", "/v1/webhooks", json=body).json()["id"]


def document_of(service: Service, kept: Ids, lost: Ids) -> Json:
    """Return the service's OpenAPI document with real ids in its examples and in place of id patterns."""
    service.names["hooks.example.com"] = ["9.9.9.9"]
    real_values = {
        examples.MODEL: kept["model"][1],
        examples.DATASET: kept["ds"][0],
        examples.OTHER_DATASET: kept["ds"][1],
        examples.BASELINE: kept["dep"][0],
        examples.CANDIDATE: kept["dep"][1],
        examples.JOB: kept["ft"][0],
        examples.CANARY: kept["cep"][0],
        examples.WEBHOOK: kept["wh"][0],
        examples.EVENT: kept["evt"][0],
        examples.EVALUATION: kept["evl"][0],
        examples.OTHER_EVALUATION: kept["evl"][1],
        examples.RELEASE: kept["rel"][0],
        EXAMPLE_ANSWER["question"]: QUESTION,
    }
    text = json.dumps(document(service.url))
    for example, real in real_values.items():
        text = text.replace(example, real)
    whole = json.loads(text)
    for methods in whole["paths"].values():
        for method, entry in methods.items():
            is_ending = method == "delete" or entry["operationId"] in ENDING
            entry["parameters"] = _with_ids(entry["parameters"], lost if is_ending else kept)
            for one in entry["parameters"] if is_ending else ():
                one.pop("example", None)
    # The other two profiles omit fields; tests/service/http/test_profiles.py covers them.
    whole["components"]["parameters"]["X-API-Profile"]["schema"]["enum"] = ["auto"]
    whole["components"]["schemas"] = _with_ids(whole["components"]["schemas"], kept)
    return whole


def _with_ids(value: Any, ids: Ids) -> Any:
    if isinstance(value, list):
        return [_with_ids(one, ids) for one in value]
    if not isinstance(value, dict):
        return value
    real = _offered(str(value.get("pattern", "")), ids)
    if real:
        return {key: one for key, one in value.items() if key != "pattern"} | {"enum": real}
    return {key: _with_ids(one, ids) for key, one in value.items()}


def _offered(pattern: str, ids: Ids) -> list[str]:
    if pattern == MODEL_PATTERN:
        return [*ids["model"], "absent"]
    match = ID_PATTERN.fullmatch(pattern)
    if match is None:
        return []
    prefixes = ["cep", "ep"] if match[1] == "c?ep" else [match[1]]
    found = [one for prefix in prefixes for one in ids.get(prefix, [])]
    return [*found, f"{prefixes[0]}_{ABSENT}"]
