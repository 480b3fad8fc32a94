"""Batches of a service in this process, made and read over OpenAI's API."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from tests.support.service.in_process import Service, jsonl
from tuneship.service.background_requests.background_run import BackgroundTiming

URL = "/v1/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
# Each answer is stored as soon as it may be.
AT_ONCE = BackgroundTiming(soon_s=0, enough=1)
AT_THE_END = BackgroundTiming(enough=10**6, late_s=10**6)


def request(name: str, model: str, **body: Any) -> dict[str, Any]:
    fields = {"model": model, "prompt": "zq planted text 7731", **body}
    return {"custom_id": name, "method": "POST", "url": URL, "body": fields}


def call(
    service: Service, method: str, path: str, client: str = "alice", **options: Any
) -> httpx.Response:
    return service.call(method, f"/openai/v1/{path}", client, **options)


def upload(service: Service, lines: Iterable[Any], client: str = "alice") -> str:
    form, files = {"purpose": "batch"}, {"file": ("night.jsonl", jsonl(*lines))}
    answer = call(service, "POST", "files", client, data=form, files=files)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def batch(service: Service, *lines: Any, client: str = "alice", file_id: str | None = None) -> str:
    body = {
        "input_file_id": file_id or upload(service, lines, client),
        "endpoint": URL,
        "completion_window": "24h",
    }
    answer = call(service, "POST", "batches", client, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def shown(service: Service, batch_id: str, client: str = "alice") -> dict[str, Any]:
    answer = call(service, "GET", f"batches/{batch_id}", client)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(service: Service, batch_id: str, client: str = "alice") -> dict[str, Any]:
    service.until(lambda: shown(service, batch_id, client)["status"] in ENDS)
    return shown(service, batch_id, client)


def lines_of(service: Service, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    answer = call(service, "GET", f"files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def names_of(service: Service, file_id: str | None) -> list[str]:
    return [line["custom_id"] for line in lines_of(service, file_id)]


def permits(number: int) -> Callable[[str], bool]:
    """Return a function that lets so many requests of batches begin, and no more."""
    left = [number]

    def take(_client: str) -> bool:
        left[0] -= 1
        return left[0] >= 0

    return take
