"""Make the data directory of 26.12.0 that tests upgrade: `python -m tests.support.databases.data_of_26_12_0`.

The program of that version fills it, from the history, and is killed in the middle of a training. Nothing in it is of
any worth: its keys open this directory alone. It is kept in the repository, since a checkout of CI has no history, and
since a later version of a library must not change what 26.12.0 had written.
"""

import json
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx

from tests.support.databases.other_versions import first_release
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    trainer_at_work,
)
from tests.support.waiting import free_port, until

PACKED = Path(__file__).with_name("data_of_26_12_0.tar.xz")
# Beside the data directory: ids and keys that tests use.
FACTS = "facts.json"
PROMPT = {"prompt": "What is case 7?", "max_tokens": 4, "temperature": 0}
# Asks how likely each token of the prompt is, and for no answer.
SCORED = {"prompt": "What is case 7? black", "max_tokens": 0, "echo": True, "logprobs": 0}
# The training is killed after so many steps of the many that it has.
EPOCHS, STEPS = 12, 20
ENDED = ("completed", "failed", "cancelled", "canceled", "expired")
GRADERS = [{"name": "same", "type": "string_check"}]


def unpacked(folder: Path) -> dict[str, Any]:
    """Unpack the data directory into `folder`/data, and return what is known of it."""
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    (folder / "data").chmod(0o700)
    return json.loads((folder / FACTS).read_text())


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204 if self.path == "/good" else 500)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Filling:
    """Requests to the service that fill its tables."""

    def __init__(self, serve: Serve, receiver: str, folder: Path) -> None:
        self.serve, self.receiver, self.folder = serve, receiver, folder
        self.http = httpx.Client(
            base_url=serve.url, headers=serve.headers, timeout=300, trust_env=False
        )

    def call(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        assert answer.is_success, (path, answer.text)
        return answer.json() if answer.content else None

    def ended(self, path: str) -> Any:
        until(lambda: self.call("GET", path)["status"] in ENDED)
        return self.call("GET", path)

    def dataset(self, question: str = "What is case") -> str:
        rows = rows_file(self.folder / "rows.jsonl", 24)
        content = rows.read_text().replace("What is case", question)
        form, files = {"name": "d", "format": "instruction"}, {"file": ("d.jsonl", content)}
        return self.call("POST", "/v1/datasets", data=form, files=files)["id"]

    def job(self, epochs: int) -> str:
        """Start a job with the smallest adapter, which the packed file has to hold."""
        dataset = self.dataset()
        body = {
            "base_model": "tuneship-tiny",
            "dataset_id": dataset,
            "validation_dataset_id": dataset,
            "model_name": "m",
            "hyperparameters": {
                "epochs": epochs,
                "lora_rank": 1,
                "batch_size": 8,
                "learning_rate": 1e-3,
            },
        }
        return self.call("POST", "/v1/fine-tuning/jobs", json=body)["id"]

    def fill(self) -> dict[str, Any]:
        client, call = self.serve.client(), self.call
        hooks = [
            call("POST", "/v1/webhooks", json={"url": f"{self.receiver}/{name}", "events": ["*"]})
            for name in ("good", "bad")
        ]
        call("POST", f"/v1/webhooks/{hooks[0]['id']}/rotate-secret", json={"overlap_hours": 1})
        finished = self.job(epochs=1)
        job = ended_job(client, finished)
        assert job.status == "completed", job.error
        dataset = job.dataset_id
        cancelled = self.job(epochs=100)
        call("POST", f"/v1/fine-tuning/jobs/{cancelled}/cancel")
        datasets = [one["id"] for one in call("GET", "/v1/datasets")["datasets"]]
        body = {"dataset_ids": datasets[:2], "name": "both"}
        merged = call("POST", "/v1/datasets/merge", json=body, headers={"Idempotency-Key": "k1"})
        assert job.fine_tuned_model is not None
        baseline = running_deployment(client, "base", "tuneship-tiny")
        candidate = running_deployment(client, "tuned", job.fine_tuned_model, team="notes")
        gone = running_deployment(client, "gone", "tuneship-tiny")
        call("DELETE", f"/v1/deployments/{gone}")
        endpoint = call("POST", "/v1/endpoints", json={"name": "e", "deployment_id": baseline})
        split = [(baseline, 90), (candidate, 10)]
        members = [{"id": one, "traffic_percentage": share} for one, share in split]
        fallback = [{"id": baseline, "traffic_percentage": 100}]
        body = {
            "name": "notes",
            "deployments": members,
            "lease": {"seconds": 600, "fallback": fallback},
        }
        canary = call("POST", "/v1/canary-endpoints", json=body)
        for _ in range(8):
            call("POST", f"/v1/endpoints/{canary['id']}/generate", json=PROMPT)
        body = {
            "name": "both",
            "dataset_id": self.dataset("Which colour has case"),
            "candidate": candidate,
            "baseline": baseline,
            "graders": GRADERS,
        }
        evaluation = call("POST", "/v1/evaluations", json=body)["id"]
        assert self.ended(f"/v1/evaluations/{evaluation}")["status"] == "completed"
        body = {"model": job.fine_tuned_model, **SCORED}
        scored = call("POST", "/openai/v1/completions", json=body)["choices"][0]
        call("POST", "/v1/sign-in-links")
        return {
            "finished_job": finished,
            "cancelled_job": cancelled,
            "model": job.fine_tuned_model,
            "dataset": dataset,
            "merged_dataset": merged["id"],
            "baseline": baseline,
            "candidate": candidate,
            "log_probabilities": scored["logprobs"]["token_logprobs"],
            "endpoint": endpoint["id"],
            "canary": canary["id"],
            "evaluation": evaluation,
            "webhooks": [hook["id"] for hook in hooks],
            **self.openai(job.fine_tuned_model),
        }

    def openai(self, model: str) -> dict[str, Any]:
        """Fill what only OpenAI's API has."""
        call = self.call
        lines = [
            {
                "custom_id": f"r{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": model, "prompt": f"What is case {n}?", "max_tokens": 2},
            }
            for n in range(3)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        form, files = {"purpose": "batch"}, {"file": ("requests.jsonl", content)}
        file = call("POST", "/openai/v1/files", data=form, files=files)["id"]
        body = {
            "input_file_id": file,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = call("POST", "/openai/v1/batches", json=body)["id"]
        done = self.ended(f"/openai/v1/batches/{batch}")
        assert done["status"] == "completed", done
        body = {
            "name": "Colours",
            "data_source_config": {
                "type": "custom",
                "item_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
                "include_sample_schema": True,
            },
            "testing_criteria": [
                {
                    "type": "string_check",
                    "name": "same",
                    "input": "{{ sample.output_text }}",
                    "reference": "{{ item.q }}",
                    "operation": "eq",
                }
            ],
        }
        made = call("POST", "/openai/v1/evals", json=body)["id"]
        items = [{"item": {"q": f"What is case {n}?"}} for n in range(3)]
        asked = [{"type": "message", "role": "user", "content": "{{ item.q }}"}]
        source = {
            "type": "completions",
            "model": model,
            "source": {"type": "file_content", "content": items},
            "input_messages": {"type": "template", "template": asked},
        }
        runs = f"/openai/v1/evals/{made}/runs"
        run = call("POST", runs, json={"name": "r", "data_source": source})["id"]
        assert self.ended(f"{runs}/{run}")["status"] == "completed"
        return {"batch": batch, "output_file": done["output_file_id"], "eval": made, "run": run}


def made_in(folder: Path) -> None:
    """Fill `folder`/data, and write the facts beside it."""
    older = first_release(folder / "26.12.0")
    assert older is not None, "this checkout has no history of 26.12.0: git fetch --unshallow"
    port = free_port()
    receiver = HTTPServer(("127.0.0.1", port), _Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    data = folder / "data"
    serve = Serve(data, starter=older, webhook_allow_http_hosts=f"127.0.0.1:{port}")
    facts = _Filling(serve, f"http://127.0.0.1:{port}", folder).fill()

    def keys(*arguments: str) -> Any:
        command = ("tuneship.cli.main", "keys", *arguments, "--json", "--data-dir", str(data))
        with older(*command, env={}) as process:
            printed = process.communicate()[0]
        assert process.returncode == 0, arguments
        return json.loads(printed)

    facts["key"] = keys("create", "--client-id", "local", "--scopes", "admin")["api_key"]
    made = keys("create", "--client-id", "radiology", "--scopes", "trainer", "--expires", "90d")
    facts["revoked_key"] = made["api_key"]
    keys("revoke", facts["revoked_key"].split("_")[1][:8])
    # Metrics of a minute are written, and a head of the audit chain is signed.
    time.sleep(65)
    serve.stop()
    serve.start()
    facts["stopped_job"] = _Filling(serve, "", folder).job(EPOCHS)
    trainer_at_work(serve, facts["stopped_job"], STEPS)
    serve.kill()
    receiver.shutdown()
    (folder / FACTS).write_text(json.dumps(facts, indent=1))


def main() -> None:
    """Make it, and pack it."""
    folder = Path(tempfile.mkdtemp())
    made_in(folder)
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for name in (FACTS, "data"):
            archive.add(folder / name, name)
    PACKED.write_bytes(packed.getvalue())
    shutil.rmtree(folder)
    sys.stdout.write(f"{PACKED.name}: {len(packed.getvalue())} bytes\n")


if __name__ == "__main__":
    main()
