"""A real service is killed in the middle of a batch: no stored answer is lost, and each request has one answer."""

import io
import json
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.support.service.in_process import jsonl
from tests.support.service.processes import Serve
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# Numbers of requests: a batch that ends before it is killed twice is followed by a longer one.
SIZES = (400, 1600, 6400)
TOKENS = 48
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


def killed_twice(served: Serve, requests: int) -> Batch | None:
    """Kill the service twice in the middle of a batch; None if the batch was too short for that."""
    client = client_of(served)
    content = jsonl(*map(request, range(requests)))
    file = client.files.create(file=("night.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    stored = 0
    for _ in range(2):
        stored = until(lambda c=client, before=stored: _more_than(before, c, batch.id))
        if stored == requests:
            return None
        served.kill()
        served.process.wait(60)
        served.start()
        client = client_of(served)
        # What was shown as answered before the kill still is.
        assert _answered(client, batch.id) >= stored
    return batch


def test_each_request_is_answered_once_after_two_kills(tmp_path: Path) -> None:
    served = Serve(tmp_path / "data", generate_requests_per_minute="0")
    try:
        batch = next(filter(None, (killed_twice(served, requests) for requests in SIZES)))
        client = client_of(served)
        # A batch that was too short may have been killed just before its end.
        until(lambda: all(one.status in ENDS for one in client.batches.list()))
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        lines = client.files.content(done.output_file_id).text.splitlines()
        files = {
            id_ for one in client.batches.list() for id_ in (one.input_file_id, one.output_file_id)
        }
    finally:
        served.kill()
        served.process.wait(60)
    assert (done.status, done.error_file_id) == ("completed", None)
    assert done.request_counts is not None
    answers = [json.loads(line) for line in lines]
    sent = range(done.request_counts.total)
    assert [one["custom_id"] for one in answers] == [f"case-{number}" for number in sent]
    assert all(one["response"]["body"]["usage"]["completion_tokens"] > 0 for one in answers)
    assert {path.name for path in (served.data_dir / "blobs" / "files").iterdir()} == {
        str(one).replace("file-", "file_") for one in files
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
