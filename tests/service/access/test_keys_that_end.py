"""Streams, downloads and long requests end within two seconds of the revocation or expiry of their key."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from tests.service.generation.test_generation import counts, lines, path_of
from tests.service.jobs.test_streams import NOTIFIED_ONLY, Reader
from tests.support.models.conversion import ARCHIVE
from tests.support.openai.openai_clients import bare_headers
from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.service.access import api_keys
from tuneship.service.answers.downloads import Download
from tuneship.service.models import content

Start = Callable[..., Service]
End = Callable[[Service], None]


def revoke(service: Service) -> None:
    service.keys.revoke(service.headers["alice"]["Authorization"][11:19])


def expire(service: Service) -> None:
    service.clock.ahead += timedelta(hours=1)


ENDS = pytest.mark.parametrize("end", [revoke, expire])


@pytest.fixture
def live(start: Start) -> Service:
    """A service at which Alice's key expires after half an hour, and whose streams get no news by themselves."""
    service = start(timing=NOTIFIED_ONLY)
    service.headers["alice"] = service.key_headers("alice", lifetime=timedelta(minutes=30))
    service.headers["another"] = service.key_headers("alice")
    return service


@asynccontextmanager
async def opened(service: Service, method: str, path: str, **options: Any) -> AsyncIterator[Reader]:
    """A stream that Alice has opened with her key alone, or with her client id too for the main API."""
    headers = service.headers["alice"] if path.startswith("/v1") else bare_headers(service)
    headers = {**headers, **options.pop("headers", {})}
    http = httpx.AsyncClient(base_url=service.url, headers=headers, timeout=120, trust_env=False)
    async with http, http.stream(method, path, **options) as response:
        assert response.status_code == 200, await response.aread()
        yield Reader(response)


def read_past_the_end(
    service: Service, end: End, begun: str, method: str, path: str, **options: Any
) -> str:
    """Open a stream, end its key once `begun` was read, and return the whole stream."""

    async def read() -> str:
        async with opened(service, method, path, **options) as reader:
            await reader.read_until(lambda one: begun in one.text)
            await asyncio.to_thread(end, service)
            await reader.read_until(lambda _: False)
            return reader.text

    return asyncio.run(read())


@pytest.mark.both_databases
@ENDS
def test_the_stream_of_a_job_ends_with_an_error_for_its_reader(live: Service, end: End) -> None:
    job_id = live.job()
    live.trainer().start_of(9)
    live.listen()
    path = f"/v1/fine-tuning/jobs/{job_id}/logs?stream=true"
    text = read_past_the_end(live, end, "training 4 examples", "GET", path)
    *_, last = Reader(httpx.Response(200), text).events()
    assert last["event"] == "error"
    error = json.loads(last["data"])["error"]
    assert error["code"] == "authentication_error"
    assert error["message"] == "the API key was revoked or has expired"
    assert error["request_id"]
    assert live.job_status(job_id, "another") == "running"


def test_lines_of_json_end_with_the_error_too(live: Service) -> None:
    job_id = live.job()
    live.trainer().start_of(9)
    live.listen()
    path, accept = f"/v1/fine-tuning/jobs/{job_id}/logs?stream=true", "application/x-ndjson"
    headers = {"Accept": accept}
    text = read_past_the_end(live, revoke, "training 4", "GET", path, headers=headers)
    assert json.loads(text.splitlines()[-1])["error"]["code"] == "authentication_error"


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/deployments/{model}/generate": {"prompt": "a case"},
    "/openai/v1/chat/completions": {"messages": [{"role": "user", "content": "a case"}]},
    "/openai/v1/completions": {"prompt": "a case"},
    "/openai/v1/responses": {"input": "a case"},
}


ACTIONS = (
    "generate",
    "openai_create_chat_completion",
    "openai_create_completion",
    "openai_create_response",
)


@pytest.mark.parametrize("path", STREAMS)
def test_a_generation_ends_in_the_form_of_its_api_and_writes_no_further_token(
    live: Service, path: str
) -> None:
    settings = {"audit_logging": True}
    deployment = live.deployment("one", security_settings=settings)
    live.listen()
    live.engines.tokens_before_pause = 2
    body = {**STREAMS[path], "stream": True}
    if path.startswith("/openai"):
        body["model"] = deployment
    text = read_past_the_end(live, revoke, "Dis", "POST", path.format(model=deployment), json=body)
    last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")][-1]
    if path.endswith("responses"):
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        error = last["response"]["error"]
    else:
        error = last["error"]
        code = "invalid_api_key" if path.startswith("/openai") else "authentication_error"
        assert error["code"] == code
    assert error["message"] == "the API key was revoked or has expired"
    assert "[DONE]" not in text

    live.until(lambda: not live.engines.replicas[0].running)
    live.engines.may_go_on.set()
    live.headers["alice"] = live.headers["another"]
    assert lines(live, deployment) == [("info", "the caller's API key has ended")]
    # Nobody has lost patience with the deployment, and it has not failed.
    assert counts(live, deployment) == (0, 0)
    entries = live.call("GET", "/v1/audit?limit=1000").json()["entries"]
    asked = [one for one in entries if one["action"] in ACTIONS]
    assert [one["status"] for one in asked] == [200, 401]


@ENDS
def test_a_generation_without_a_stream_is_cancelled_with_401(live: Service, end: End) -> None:
    deployment = live.deployment("one")
    live.engines.may_answer.clear()
    asking = asyncio.run_coroutine_threadsafe(
        live.ask("POST", path_of(deployment), json={"prompt": "a case"}), live.loop
    )
    live.until(lambda: bool(live.engines.prompts))
    end(live)
    answer = asking.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "authentication_error")
    live.until(lambda: not live.engines.replicas[0].running)
    live.engines.may_answer.set()


class EndlessDownload(Download):
    """A fake download without an end."""

    media = "application/octet-stream"
    file_name = "endless"
    length = 1 << 40

    def __init__(self) -> None:
        self.is_closed = False

    def blocks(self) -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b"x" * 1024

    def close(self) -> None:
        self.is_closed = True


def test_a_download_breaks_off(live: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    model, download = live.model(), EndlessDownload()
    monkeypatch.setattr(content, "_exported", lambda *_: download)
    live.listen()
    with pytest.raises(httpx.RemoteProtocolError):
        read_past_the_end(live, revoke, "x", "GET", f"/v1/models/{model}/content")
    live.until(lambda: download.is_closed)
    live.headers["alice"] = live.headers["another"]
    assert live.call("GET", "/v1/models").status_code == 200


def test_a_file_that_arrives_after_the_end_of_its_key_is_not_stored(live: Service) -> None:
    live.listen()
    parts, form = {"name": "late", "format": "instruction"}, jsonl(*LINES)
    request = httpx.Request(
        "POST", live.url, data=parts, files={"file": ("x.jsonl", io.BytesIO(form))}
    )
    body, kind = request.read(), request.headers["Content-Type"]

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:-10]
        await asyncio.to_thread(revoke, live)
        live.clock.ahead += timedelta(seconds=1)
        yield body[-10:]

    async def send() -> httpx.Response:
        headers = {**live.headers["alice"], "Content-Type": kind}
        async with httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=60) as http:
            return await http.post("/v1/datasets", content=slowly(), headers=headers)

    assert asyncio.run(send()).status_code == 401
    live.headers["alice"] = live.headers["another"]
    assert live.call("GET", "/v1/datasets").json()["datasets"] == []


def test_an_import_whose_file_is_still_checked_is_stopped(live: Service) -> None:
    live.conversion.waits = True
    live.listen()
    file = ("a.tar", ARCHIVE, "application/x-tar")

    async def send() -> httpx.Response:
        headers = live.headers["alice"]
        async with httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=60) as http:
            sending = asyncio.create_task(
                http.post("/v1/models", headers=headers, files={"file": file})
            )
            await asyncio.to_thread(live.until, lambda: live.conversion.orders)
            await asyncio.to_thread(revoke, live)
            return await sending

    assert asyncio.run(send()).status_code == 401
    live.headers["alice"] = live.headers["another"]
    assert live.call("GET", "/v1/models?fine_tuned_only=true").json()["models"] == []


def test_many_that_wait_for_the_ends_of_their_keys_ask_the_database_together(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [live.keys.issue("alice", SCOPES, None)[4:12] for _ in range(100)]
    looks: list[int] = []
    read = api_keys.api_key_records.ended

    def noted(connection: Any, identifiers: Any, now: Any) -> set[str]:
        if identifiers:  # not the keeper of batches, of which there are none
            looks.append(len(identifiers))
        return read(connection, identifiers, now)

    monkeypatch.setattr(api_keys.api_key_records, "ended", noted)

    async def wait() -> int:
        waiting = [
            asyncio.create_task(live.keys.wait_until_ended(one)) for one in keys for _ in range(3)
        ]
        await asyncio.to_thread(live.keys.revoke, keys[0])
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        ended = sum(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return ended

    assert live.run(wait()) == 3
    assert looks[0] == 100
    assert len(looks) <= 4
    assert not live.keys._watched


def test_a_database_that_is_away_ends_no_stream(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, looks = live.keys.issue("alice", SCOPES, None)[4:12], [0]
    read = api_keys.api_key_records.ended

    def away(connection: Any, identifiers: Any, now: Any) -> set[str]:
        if identifiers:
            looks[0] += 1
            if looks[0] < 3:
                raise OperationalError("", {}, Exception())
        return read(connection, identifiers, now)

    monkeypatch.setattr(api_keys.api_key_records, "ended", away)
    live.keys.revoke(key)
    waiting = asyncio.run_coroutine_threadsafe(live.keys.wait_until_ended(key), live.loop)
    live.until(lambda: looks[0] == 1)
    for _ in range(2):
        live.clock.ahead += timedelta(seconds=1)
    waiting.result(60)
    assert looks[0] == 3
