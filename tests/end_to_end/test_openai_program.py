"""A program that was written for OpenAI tunes a model and asks it, with nothing changed but two variables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service.processes import Serve

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAM = """
import io, json, time
from openai import OpenAI

client = OpenAI()
colours = ("red", "green", "blue", "black")
lines = [
    {"messages": [
        {"role": "user", "content": f"What colour is number {number}?"},
        {"role": "assistant", "content": colours[number % 4]},
    ]}
    for number in range(40)
]
content = "".join(json.dumps(line) + "\\n" for line in lines).encode()
file = client.files.create(file=("colours.jsonl", io.BytesIO(content)), purpose="fine-tune")
job = client.fine_tuning.jobs.create(
    model="tuneship-tiny",
    training_file=file.id,
    suffix="colours",
    method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
)
while job.status not in ("succeeded", "failed", "cancelled"):
    time.sleep(0.5)
    job = client.fine_tuning.jobs.retrieve(job.id)
assert job.status == "succeeded", job.error

messages = [{"role": "user", "content": "What colour is number 3?"}]
options = {"model": job.fine_tuned_model, "messages": messages, "temperature": 0, "max_tokens": 8}
whole = client.chat.completions.create(**options)
stream = client.chat.completions.create(**options, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
events = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
print(json.dumps({
    "model": job.fine_tuned_model,
    "answered": whole.model,
    "whole": whole.choices[0].message.content,
    "streamed": streamed,
    "last": events[0],
    "result": client.files.content(job.result_files[0]).text[:8],
    "checkpoints": len(client.fine_tuning.jobs.checkpoints.list(job.id).data),
}))
"""


def test_it_uploads_tunes_polls_and_asks(tmp_path: Path) -> None:
    served = Serve(tmp_path / "data")
    try:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=served.openai_variables(),
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        served.kill()
        served.process.wait(60)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["model"] == found["answered"]
    assert found["model"].startswith("ft:tuneship-tiny:colours:")
    assert found["whole"]
    assert found["streamed"] == found["whole"]
    assert found["last"] == "The job has successfully completed"
    assert found["result"]
    assert found["checkpoints"] == 1
