"""Unique texts are planted in everything that a caller sends, and searched for in everything that is stored.

The rule: a text (an example, a prompt, a stop text, a completion, a wrong body) appears in answers to its owner and
nowhere else; the dataset's file is encrypted and needs the key. A name that a caller chose (`ALLOWED`) appears in the
tables of its resource and in data derived from them, and in no log, unless it is part of an id.
"""

import base64
import json
import re
import sqlite3
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.objects.files import contents_below, paths_below
from tests.support.objects.opened import opened
from tests.support.service.processes import ROOT, Serve, rows_file
from tests.support.waiting import until
from tuneship.store.database import tables
from tuneship.store.database.database import Database, sqlite_url

pytestmark = pytest.mark.slow
# Texts that may be found nowhere.
TEXTS = (
    "instruction", "response", "turn", "prompt", "messages", "stop", "routing key", "file name",
    "wrong field", "wrong value", "wrong name", "wrong tag", "torn body", "broken line", "wrong format", "long prompt",
    "query", "key", "content type", "wrong url",
    "address", "batch prompt", "custom id", "held-out prompt", "held-out reference", "metadata",
)  # fmt: skip
TAGGED = {
    f"database: {table}" for table in ("datasets", "jobs", "models", "deployments", "evaluations")
}
# Places where a name may appear, apart from answers to its owner and the database file with its row.
ALLOWED: Mapping[str, set[str]] = {
    "dataset name": {"database: datasets"},
    "merged name": {"database: datasets"},
    "tag key": TAGGED,
    "tag value": TAGGED,
    "deployment name": {"database: deployments"},
    "endpoint name": {"database: endpoints"},
    "description": {"database: webhooks"},
    "grader's pattern": {"database: evaluations"},
    "evaluation name": {"database: evaluations"},
    "webhook path": {"database: webhooks"},
    "idempotency key": {"database: idempotency"},
    # It is part of the model's id, so it may appear wherever an id may.
    "model name": (TAGGED - {"database: datasets"})
    | {
        "database: batches",
        "database: events",
        "answers: events",
        "webhooks",
        "service log",
    }
    | {"database: audit", "answers: audit", "audit exports"},
}


REFUSED = 14
# Least length of a completion that cannot appear anywhere by chance.
LONG = 20
# Lists of resources that can be deleted, in a possible order of deletion.
DELETED = {
    "/v1/webhooks": "webhooks",
    "/v1/canary-endpoints": "canary_endpoints",
    "/v1/deployments": "deployments",
    "/v1/models": "models",
    "/v1/datasets": "datasets",
}


def mark(what: str) -> str:
    """Return a unique word that appears nowhere by chance and that every rule for names accepts."""
    return f"Q{re.sub('[^a-z]', '', what)}{uuid4().hex}"


def forms(text: str) -> list[bytes]:
    """Return the text as it may be written: in two encodings, in hexadecimal and in the three phases of base64."""
    plain = text.encode()
    turned = [base64.b64encode(b"x" * pad + plain)[4:-4] for pad in range(3)]
    return [plain, text.encode("utf-16-le"), plain.hex().encode(), *turned]


@dataclass
class Receiver:
    """A receiver of webhooks that keeps every delivery."""

    deliveries: list[bytes] = field(default_factory=list[bytes])
    port: int = 0

    def __enter__(self) -> "Receiver":
        kept = self.deliveries

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                kept.append(bytes(self.headers) + body)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass
class Way:
    """A caller that plants its marks in every step from upload to generation, and keeps every answer."""

    serve: Serve
    folder: Path
    receiver: Receiver
    marks: dict[str, str] = field(
        default_factory=lambda: {what: mark(what) for what in (*TEXTS, *ALLOWED)}
    )
    refusals: list[bytes] = field(default_factory=list[bytes])
    answers: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    commands: set[bytes] = field(default_factory=set[bytes])
    completions: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=self.serve.url, headers=self.serve.headers, timeout=60, trust_env=False
        )

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> httpx.Response:
        answer = self.http.request(method, path, **options)
        assert answer.status_code == status, f"{method} {path}: {answer.text}"
        sent = answer.content + repr(answer.headers.raw).encode()
        if status >= 400:
            self.refusals.append(sent)
        else:
            self.answers[path].append(sent)
        return answer

    def wait(self, path: str, status: str) -> dict[str, Any]:
        """Wait until the resource has this status; meanwhile record how the worker processes were called."""

        def has_it() -> bool:
            self.commands |= set(_commands(self.serve))
            return self.ask("GET", path).json()["status"] == status

        until(has_it)
        return self.ask("GET", path).json()

    # -- the steps --

    def upload(self, content: bytes, form: str, name: str) -> str:
        files = {"file": (f"{self.marks['file name']}.jsonl", content, "application/jsonl")}
        tags = {self.marks["tag key"]: self.marks["tag value"]}
        for path, status in (("/v1/datasets/validate", 200), ("/v1/datasets", 201)):
            data = {"format": form}
            if status == 201:
                data |= {"name": name, "tags": json.dumps(tags)}
            made = self.ask("POST", path, status, data=data, files=files)
        dataset = made.json()["id"]
        self.wait(f"/v1/datasets/{dataset}", "processed")
        return dataset

    def train(self) -> str:
        marks = self.marks
        rows = rows_file(self.folder / "rows.jsonl", 32).read_text()
        rows = rows.replace("What is", marks["instruction"]).replace("red", marks["response"])
        more = rows_file(self.folder / "more.jsonl", 32).read_text().replace("case", marks["turn"])
        name = marks["dataset name"]
        parts = [self.upload(one.encode(), "instruction", name) for one in (rows, more)]
        body = {"dataset_ids": parts, "name": marks["merged name"]}
        merged = self.ask("POST", "/v1/datasets/merge", 201, json=body).json()["id"]
        self.wait(f"/v1/datasets/{merged}", "processed")
        job = self.ask(
            "POST",
            "/v1/fine-tuning/jobs",
            201,
            json={
                "base_model": "tuneship-tiny",
                "dataset_id": merged,
                "model_name": marks["model name"],
                "tags": {marks["tag key"]: marks["tag value"]},
                "hyperparameters": {"epochs": 1, "batch_size": 8},
                "security_settings": {"audit_logging": True},
            },
        ).json()["id"]
        path = f"/v1/fine-tuning/jobs/{job}"
        model = self.wait(path, "completed")["fine_tuned_model"]
        for rest in ("", "/metrics", "/logs"):
            self.ask("GET", path + rest)
        return model

    def deploy(self, model: str, number: int) -> str:
        body = {
            "model_name": model,
            "deployment_name": f"{self.marks['deployment name']}-{number}",
            "tags": {self.marks["tag key"]: self.marks["tag value"]},
            "security_settings": {"audit_logging": True},
        }
        made = self.ask("POST", "/v1/deployments", 201, json=body).json()["id"]
        self.wait(f"/v1/deployments/{made}", "running")
        return made

    def split(self, deployments: list[str]) -> str:
        shares = [
            {"id": one, "traffic_percentage": share}
            for one, share in zip(deployments, (90, 10), strict=True)
        ]
        body = {"name": self.marks["endpoint name"], "deployments": shares}
        once = {"Idempotency-Key": self.marks["idempotency key"]}
        made = self.ask("POST", "/v1/canary-endpoints", 201, json=body, headers=once)
        return made.json()["id"]

    def generate(self, path: str) -> None:
        """Generate whole and streamed answers; the completions are texts to search for, too."""
        marks, wild = self.marks, {"max_tokens": 48, "temperature": 2.0}
        turns = [{"role": "user", "content": marks["messages"]}]
        for said in ({"prompt": marks["prompt"]}, {"messages": turns}):
            body = {**said, **wild, "stop": [marks["stop"]]}
            headers = {"X-Routing-Key": marks["routing key"]}
            answer = self.ask("POST", f"{path}/generate", json=body, headers=headers).json()
            if len(answer["completion"]) > LONG:
                self.completions.append(answer["completion"])
            with self.http.stream("POST", f"{path}/generate", json=body | {"stream": True}) as made:
                frames = made.read().decode()
            assert "event: done" in frames, frames
        self.ask("POST", f"{path}/embeddings", json={"input": [marks["prompt"]]})

    def answer_a_batch(self, model: str) -> None:
        """Have one prompt answered from a file; its answer is a text to search for, too."""
        body = {
            "model": model,
            "prompt": self.marks["batch prompt"],
            "max_tokens": 48,
            "temperature": 2.0,
        }
        line = {
            "custom_id": self.marks["custom id"],
            "method": "POST",
            "url": "/v1/completions",
            "body": body,
        }
        files = {"file": ("night.jsonl", json.dumps(line).encode())}
        sent = self.ask("POST", "/openai/v1/files", data={"purpose": "batch"}, files=files)
        order = {
            "input_file_id": sent.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        made = self.ask("POST", "/openai/v1/batches", json=order).json()["id"]
        output = self.wait(f"/openai/v1/batches/{made}", "completed")["output_file_id"]
        answer = self.ask("GET", f"/openai/v1/files/{output}/content").json()
        assert answer["custom_id"] == self.marks["custom id"]
        text = answer["response"]["body"]["choices"][0]["text"]
        if len(text) > LONG:
            self.completions.append(text)

    def evaluate(self, deployments: list[str]) -> None:
        """Have held-out examples answered and graded; both answers are texts to search for, too."""
        marks = self.marks
        prompt = marks["held-out prompt"]
        line = {
            "instruction": prompt,
            "response": marks["held-out reference"],
            "metadata": {"ward": marks["metadata"], "site": "A"},
        }
        dataset = self.upload(
            (json.dumps(line) + "\n").encode(), "instruction", marks["dataset name"]
        )
        graders = [
            {"name": "same", "type": "string_check"},
            {"name": "pattern", "type": "regex", "pattern": marks["grader's pattern"]},
            {"name": "ward", "type": "string_check", "reference": "{{item.metadata.ward}}"},
        ]
        order = {
            "name": marks["evaluation name"],
            "dataset_id": dataset,
            "graders": graders,
            "candidate": deployments[0],
            "baseline": deployments[1],
            "slice_by": ["site"],
            "cluster_by": "ward",
            "max_tokens": 48,
            "tags": {marks["tag key"]: marks["tag value"]},
        }
        path = "/v1/evaluations"
        made = self.ask("POST", path, 201, json=order).json()["id"]
        self.wait(f"{path}/{made}", "completed")
        self.ask("GET", f"{path}/{made}/results")
        self.ask("GET", f"{path}/{made}/comparison/{made}")
        greedy = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        for one in deployments:
            asked = {**greedy, "max_tokens": 48}
            answer = self.ask("POST", f"/v1/deployments/{one}/generate", json=asked).json()
            if len(answer["completion"]) > LONG:
                self.completions.append(answer["completion"])

    def go_wrong(self, deployment: str) -> None:
        """Send bodies, addresses and headers that are refused, each with its own mark."""
        marks = self.marks
        place = f"/v1/deployments/{deployment}"
        generate = f"{place}/generate"
        json_type = {"content-type": "application/json"}
        self.ask("POST", generate, 400, json={"prompt": "a", marks["wrong field"]: 1})
        self.ask("POST", generate, 422, json={"prompt": "a", "max_tokens": marks["wrong value"]})
        bad = {"input": "a", "pooling": marks["wrong value"]}
        self.ask("POST", f"{place}/embeddings", 422, json=bad)
        torn = f'{{"prompt": "{marks["torn body"]}'.encode()
        self.ask("POST", generate, 400, content=torn, headers=json_type)
        long = marks["long prompt"] * 500
        self.ask("POST", generate, 422, json={"prompt": long})
        wrong_name = {"model_name": "tuneship-tiny", "deployment_name": f"/{marks['wrong name']}"}
        self.ask("POST", "/v1/deployments", 422, json=wrong_name)
        self.ask("PATCH", place, 422, json={"tags": {"k": marks["wrong tag"] * 50}})
        self.ask("GET", f"/v1/datasets?{marks['query']}={marks['query']}", 400)
        self.ask("GET", f"/v1/deployments/{marks['address']}", 404)
        key = {"Authorization": f"Bearer {marks['key']}"}
        self.ask("GET", "/v1/datasets", 401, headers=key)
        typed = {"content-type": f"text/{marks['content type']}"}
        self.ask("POST", generate, 415, content=b"{}", headers=typed)
        hook = {"url": f"ftp://127.0.0.1/{marks['wrong url']}", "events": ["*"]}
        self.ask("POST", "/v1/webhooks", 422, json=hook)
        broken = f'{{"instruction": "{marks["broken line"]}"}}\n{marks["broken line"]}\n'
        for content, form in ((broken, "instruction"), (broken, marks["wrong format"])):
            files = {"file": ("x", content.encode(), "application/jsonl")}
            data = {"name": "n", "format": form}
            self.ask("POST", "/v1/datasets", 422, data=data, files=files)


def _commands(serve: Serve) -> Iterator[bytes]:
    """Yield how every worker process of the service was called, and with which environment."""
    for module in ("tuneship.training", "tuneship.serving"):
        for process in serve.workers(module):
            for name in ("cmdline", "environ"):
                try:
                    yield Path(f"/proc/{process}/{name}").read_bytes()
                except OSError:
                    continue  # the process has ended


def exported(serve: Serve, form: str) -> bytes:
    command = [sys.executable, "-m", "tuneship.cli.main", "audit", "export", "--format", form]
    return subprocess.run(
        [*command, "--data-dir", str(serve.data_dir)], cwd=ROOT, capture_output=True, check=True
    ).stdout


def rows_by_table(file: Path) -> dict[str, bytes]:
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        names = [
            row[0] for row in database.execute("select name from sqlite_master where type='table'")
        ]
        found = {
            name: repr(database.execute(f'select * from "{name}"').fetchall()).encode()  # noqa: S608
            for name in names
        }
    database.close()
    return found


def places_of(way: Way) -> dict[str, list[bytes]]:
    """Return everything that was stored or sent, by place."""
    serve, data, temporary = way.serve, way.serve.data_dir, way.folder / "temp"
    found: dict[str, list[bytes]] = defaultdict(list)
    for file, content in contents_below(data).items():
        kind = "worker logs" if file.is_relative_to(data / "logs") else "files"
        kind = "database file" if file.name.startswith("tuneship.sqlite") else kind
        found[kind].append(content)
    found["temporary files"] = list(contents_below(temporary).values())
    found["names of files"] = [
        str(one).encode() for one in (*paths_below(data), *paths_below(temporary))
    ]
    for table, rows in rows_by_table(data / "tuneship.sqlite").items():
        found[f"database: {table}"].append(rows)
    found["service log"].append(serve.log.read_bytes())
    found["webhooks"] = way.receiver.deliveries
    found["refusals"] = way.refusals
    found["processes"] = list(way.commands)
    found["audit exports"] = [exported(serve, form) for form in ("jsonl", "csv")]
    for path, sent in way.answers.items():
        last = path.partition("?")[0].rpartition("/")[2]
        if last in ("metrics", "logs", "events", "audit"):
            found[f"answers: {last}"] += sent
    return found


def hits(text: str, places: Mapping[str, list[bytes]]) -> set[str]:
    return {
        place
        for place, kept in places.items()
        if any(form in one for form in forms(text) for one in kept)
    }


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "temp").mkdir()
    with pytest.MonkeyPatch.context() as patch, Receiver() as receiver:
        patch.setenv("TMPDIR", str(folder / "temp"))
        serve = Serve(
            folder / "data",
            preload=True,
            webhook_allow_cidrs="127.0.0.0/8",
            webhook_allow_http_hosts="127.0.0.1",
        )
        made = Way(serve, folder, receiver)
        try:
            yield made
        finally:
            made.http.close()
            serve.stop()


@pytest.fixture(scope="module")
def planted(way: Way) -> Way:
    """Run all steps, up to the point where every kind of resource exists."""
    marks = way.marks
    hook = {
        "url": f"http://127.0.0.1:{way.receiver.port}/{marks['webhook path']}",
        "events": ["*"],
        "description": marks["description"],
    }
    way.ask("POST", "/v1/webhooks", 201, json=hook)
    model = way.train()
    deployments = [way.deploy(model, 1), way.deploy("tuneship-tiny", 2)]
    endpoint = way.split(deployments)
    for one in deployments:
        way.generate(f"/v1/deployments/{one}")
    way.generate(f"/v1/endpoints/{endpoint}")
    way.answer_a_batch(model)
    way.evaluate(deployments)
    for one in deployments:
        way.ask("GET", f"/v1/deployments/{one}/metrics?endpoint_id={endpoint}")
        way.ask("GET", f"/v1/deployments/{one}/logs")
    way.go_wrong(deployments[0])
    way.ask("GET", f"/v1/models/{model}")
    way.ask("GET", "/v1/events?limit=100")
    way.ask("GET", "/v1/audit?limit=100")
    until(lambda: any(b"deployment.status_changed" in one for one in way.receiver.deliveries))
    return way


def opened_datasets(data_dir: Path) -> bytes:
    """Return the datasets' files, decrypted with the master key."""
    database = Database(sqlite_url(data_dir / "tuneship.sqlite"))
    with database.read() as connection:
        found = opened(connection, data_dir, tables.datasets)
    database.close()
    return b"".join(found.values())


def test_the_texts_were_kept_where_they_belong(planted: Way) -> None:
    """Check that the search finds the texts where they belong, so that finding none elsewhere is a proof."""
    kept = opened_datasets(planted.serve.data_dir)
    for one in ("instruction", "response", "turn"):
        assert planted.marks[one].encode() in kept
    sent = b"".join(one for answers in planted.answers.values() for one in answers)
    assert planted.marks["prompt"].encode() in sent
    assert len(planted.refusals) == REFUSED
    assert planted.completions


def test_a_text_is_nowhere_else_and_a_name_only_with_its_resource(planted: Way) -> None:
    places = places_of(planted)
    assert all(places[one] for one in ("webhooks", "processes", "worker logs", "answers: metrics"))
    found = {what: hits(text, places) for what, text in planted.marks.items()}
    assert {what: found[what] for what in TEXTS} == {what: set() for what in TEXTS}
    for what, allowed in ALLOWED.items():
        assert found[what] - {"database file"} <= allowed, what
        assert found[what] & allowed, f"{what}: the search is blind"
    assert [hits(one, places) for one in planted.completions] == [set()] * len(planted.completions)


def test_after_everything_was_deleted_and_the_service_has_ended_no_text_is_left(
    planted: Way,
) -> None:
    serve, listed = planted.serve, planted.http.get
    for path, key in DELETED.items():

        def left(path: str = path, key: str = key) -> list[str]:
            """Return the ids that a caller created, which contain `:` or `_`; those of base models do not."""
            return [one["id"] for one in listed(path).json()[key] if re.search("[:_]", one["id"])]

        for one in left():
            planted.ask("DELETE", f"{path}/{one}")
        until(lambda left=left: not left())
    planted.http.close()
    serve.stop()
    kept = list(contents_below(serve.data_dir).values())
    places = places_of(planted) | {"any file": kept}
    found = {what: hits(planted.marks[what], places) for what in TEXTS}
    assert found == {what: set() for what in TEXTS}
