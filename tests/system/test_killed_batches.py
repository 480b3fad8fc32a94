"""A real service is killed in the middle of a batch: no stored answer is lost, and each request has one answer."""

import io
import json
from pathlib import Path

import openai
import pytest

from tests.support.in_process import jsonl
from tests.support.processes import Serve
from tests.support.waiting import until

pytestmark = pytest.mark.slow

REQUESTS = 200
TOKENS = 48
"""Tokens of an answer: so many that the batch lasts many times longer than a pause of `until`."""
ENDS = ("completed", "failed", "expired", "cancelled")


def client_of(served: Serve) -> openai.OpenAI:
    key = json.loads((served.data_dir / "credentials.json").read_text())["api_key"]
    return openai.OpenAI(base_url=f"{served.url}/openai/v1", api_key=key, max_retries=0)


def request(number: int) -> dict[str, object]:
    body = {
        "model": "tuneship-tiny",
        "messages": [{"role": "user", "content": f"Which chapter is case {number}?"}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    url = "/v1/chat/completions"
    return {"custom_id": f"case-{number}", "method": "POST", "url": url, "body": body}


def test_each_request_is_answered_once_after_two_kills(tmp_path: Path) -> None:
    served = Serve(tmp_path / "data", generate_requests_per_minute="0")
    try:
        client = client_of(served)
        content = jsonl(*map(request, range(REQUESTS)))
        file = client.files.create(file=("night.jsonl", io.BytesIO(content)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        stored = 0
        for _ in range(2):
            stored = until(lambda c=client, before=stored: _more_than(before, c, batch.id))
            assert stored < REQUESTS
            served.kill()
            served.process.wait(60)
            served.start()
            client = client_of(served)
            # What was shown as answered before the kill still is.
            assert _answered(client, batch.id) >= stored
        until(lambda: client.batches.retrieve(batch.id).status in ENDS)
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        lines = client.files.content(done.output_file_id).text.splitlines()
    finally:
        served.kill()
        served.process.wait(60)
    assert (done.status, done.error_file_id) == ("completed", None)
    answers = [json.loads(line) for line in lines]
    assert [one["custom_id"] for one in answers] == [f"case-{n}" for n in range(REQUESTS)]
    assert all(one["response"]["body"]["usage"]["completion_tokens"] > 0 for one in answers)
    assert {path.name for path in (served.data_dir / "blobs" / "files").iterdir()} == {
        one.replace("file-", "file_") for one in (file.id, done.output_file_id)
    }


def _more_than(before: int, client: openai.OpenAI, batch_id: str) -> int:
    """The number of requests that are answered; 0 while it is not above `before`."""
    answered = _answered(client, batch_id)
    return answered if answered > before else 0


def _answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    assert counts.failed == 0
    return counts.completed
