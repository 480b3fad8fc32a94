"""Measures the cost of orchestration: a whole release through Prefect, then the same calls by a bare httpx script.

    python benchmarks/pipeline.py

Both run against a real service in an empty folder, one after the other. The comparison leaves out the time in the
service and deliberate pauses (between two polls or looks). Every call of the release is recorded and sent again, with
the ids of the second service; unless both got the same answers, nothing is printed. The requests of the traffic driver
are load, not calls of the pipeline, and are not repeated.
"""

import argparse
import json
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from measuring.running import example_rows, running
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOCAL_STORAGE_PATH,
    temporary_settings,
)

from flows.forms.release_form import ReleaseParameters
from flows.script.local_processes import prefect_server
from flows.tune_and_deploy import tune_and_deploy
from tuneship.client import Client
from tuneship.prefect.connection import connect, disconnect
from tuneship.settings import ClientSettings, embedded_service_environment

ID = re.compile(r"\b(?:ds|ft|dep|cep)_([0-9a-z]{24})\b")
SENT_AGAIN = ("content-type", "idempotency-key", "if-match", "accept")
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Call:
    """One request as it was sent, with its answer."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    status: int
    answer: bytes

    @property
    def kind(self) -> tuple[str, str, int]:
        """Method, path without ids, and status: equal in both runs."""
        return self.method, ID.sub("{id}", self.path.partition("?")[0]), self.status

    @property
    def state(self) -> str | None:
        """The status of the resource that was read; None for other calls."""
        if self.method != "GET" or self.status != httpx.codes.OK:
            return None
        resource = json.loads(self.answer)
        return resource.get("status") if isinstance(resource, dict) else None


@dataclass
class Spent:
    """The seconds of one run."""

    whole: float = 0.0
    in_service: float = 0.0
    waiting: float = 0.0

    @property
    def left(self) -> float:
        """The seconds outside of the service and of deliberate pauses."""
        return self.whole - self.in_service - self.waiting


@dataclass
class Recorder(httpx.BaseTransport):
    """Sends each request, records it with its answer, and adds up the time until the answer is read."""

    spent: Spent
    calls: list[Call] = field(default_factory=list)
    inner: httpx.HTTPTransport = field(default_factory=httpx.HTTPTransport)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the whole answer, so that the time in the service is complete."""
        content = request.read()
        begun = time.perf_counter()
        response = self.inner.handle_request(request)
        answer = response.read()
        self.spent.in_service += time.perf_counter() - begun
        headers = {name: request.headers[name] for name in SENT_AGAIN if name in request.headers}
        path = request.url.raw_path.decode()
        self.calls.append(
            Call(request.method, path, headers, content, response.status_code, answer)
        )
        return response


@contextmanager
def pauses_counted(spent: Spent) -> Generator[None]:
    """Count every `time.sleep` of this thread, in which the flow runs, as a deliberate pause."""
    # Prefect's own threads sleep too, which is not a pause of the flow.
    sleep, flow_thread = time.sleep, threading.current_thread()

    def counted(seconds: float) -> None:
        begun = time.perf_counter()
        sleep(seconds)
        if threading.current_thread() is flow_thread:
            spent.waiting += time.perf_counter() - begun

    time.sleep = counted
    try:
        yield
    finally:
        time.sleep = sleep


def small_release(folder: Path, rows: int) -> ReleaseParameters:
    """A small first release: base model against tuned model, with the pipeline's own traffic."""
    for name in ("hospital_a.jsonl", "validation.jsonl"):
        (folder / name).write_bytes(b"".join(example_rows(name, rows)))
    return ReleaseParameters.model_validate(
        {
            "model_name": "bench",
            "data": {
                "files": [str(folder / "hospital_a.jsonl")],
                "validation_file": str(folder / "validation.jsonl"),
            },
            "hyperparameters": {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3},
            "endpoint": {"name": "bench"},
            "evaluation": {"max_rows": 0},
            "canary": {
                "steps": [50, 100],
                "interval": "1s",
                "look_every_seconds": 1.0,
                "bake_looks": 3,
                "latency_gates": None,
                "traffic": {
                    "prompts": str(folder / "validation.jsonl"),
                    "requests_per_second": 15,
                    "max_tokens": 8,
                },
            },
        }
    )


def run_release(release: ReleaseParameters, settings: ClientSettings) -> tuple[Spent, list[Call]]:
    """Run the release by its flow, and record its calls."""
    spent = Spent()
    recorder = Recorder(spent)
    connect(settings, Client(settings, transport=recorder))
    begun = time.perf_counter()
    try:
        with pauses_counted(spent):
            result = tune_and_deploy(release)
    finally:
        disconnect()
    spent.whole = time.perf_counter() - begun
    if result.outcome not in ("promoted", "rolled_back"):
        raise SystemExit(f"the release ended as {result.outcome} ({result.reason})")
    return spent, recorder.calls


def repeat_calls(calls: list[Call], settings: ClientSettings) -> tuple[Spent, list[Call]]:
    """Send the same requests in the same order, each once its resource has the state that was read."""
    spent = Spent()
    recorder = Recorder(spent)
    names: dict[str, str] = {}
    own = {
        "authorization": f"Bearer {settings.api_key.get_secret_value() if settings.api_key else ''}",
        "x-client-id": settings.client_id or "",
    }
    begun = time.perf_counter()
    with (
        httpx.Client(transport=recorder, trust_env=False, timeout=PATIENCE_S) as http,
        httpx.Client(trust_env=False, timeout=PATIENCE_S, headers=own) as waiter,
    ):
        for call in calls:
            url = settings.url.rstrip("/") + _renamed(call.path, names)
            content = _renamed(call.content.decode(), names).encode()
            if call.state is not None:
                spent.waiting += _wait_for(waiter, url, call.state)
            http.request(call.method, url, content=content, headers=own | call.headers)
            _map_ids(call.answer, recorder.calls[-1].answer, names)
    spent.whole = time.perf_counter() - begun
    return spent, recorder.calls


def _wait_for(http: httpx.Client, url: str, state: str) -> float:
    begun = time.perf_counter()
    while http.get(url).json().get("status") != state:
        passing = state in ("queued", "processing", "validating", "creating", "running")
        if passing or time.perf_counter() - begun > PATIENCE_S:
            break  # a transient state may have passed already
        time.sleep(0.05)
    return time.perf_counter() - begun


def _renamed(text: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def _map_ids(old: bytes, new: bytes, names: dict[str, str]) -> None:
    """Map the ids of the first service to those of the second; a model's name contains the id of its job."""
    before, after = ID.findall(old.decode()), ID.findall(new.decode())
    if len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            names.setdefault(one, other)


def compare(first: list[Call], second: list[Call]) -> None:
    """Raise SystemExit unless both runs made the same calls."""
    did, did_again = Counter(call.kind for call in first), Counter(call.kind for call in second)
    if did != did_again:
        raise SystemExit(f"not the same work: {did - did_again} against {did_again - did}")


def tasks_at(prefect: Mapping[str, str]) -> int:
    """The number of task runs on the Prefect server, which is reached by these variables."""
    url = f"{prefect['PREFECT_API_URL']}/task_runs/count"
    user, _, password = prefect["PREFECT_API_AUTH_STRING"].partition(":")
    counted: Any = httpx.post(url, json={}, auth=(user, password), trust_env=False).json()
    return int(counted)


def report(ours: Spent, theirs: Spent, calls: int, tasks: int) -> None:
    """Print a line for each run and their ratio."""
    print(f"{'':12} {'whole s':>9} {'service s':>10} {'waiting s':>10} {'left s':>8}")
    for name, spent in (("release", ours), ("bare httpx", theirs)):
        row = f"{spent.whole:9.2f} {spent.in_service:10.2f} {spent.waiting:10.2f} {spent.left:8.2f}"
        print(f"{name:12} {row}")
    each = 1000 * (ours.left - theirs.left) / tasks
    print(f"{calls} calls, {tasks} task runs: {each:.0f} ms more for each task run")
    working = (ours.whole - ours.waiting) / (theirs.whole - theirs.waiting)
    print(
        f"{working:.1f} x the bare script, without waiting; {ours.left / theirs.left:.0f} x in what is left"
    )


def main() -> None:
    """Release, repeat, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {"TUNESHIP_RECORDS": f"{name}/records", "TUNESHIP_REPORTS": f"{name}/reports"}
        os.environ.update(own)  # noqa: TID251 - where the flow's own settings are read from
        environment = embedded_service_environment() | {"PREFECT_HOME": f"{name}/prefect"}
        with (
            prefect_server(environment, folder / "prefect.log") as prefect,
            running(folder / "first") as first,
            running(folder / "second") as second,
        ):
            with temporary_settings(
                {
                    PREFECT_API_URL: prefect["PREFECT_API_URL"],
                    PREFECT_API_AUTH_STRING: prefect["PREFECT_API_AUTH_STRING"],
                    PREFECT_LOCAL_STORAGE_PATH: f"{name}/results",
                }
            ):
                ours, calls = run_release(small_release(folder, rows), first.settings)
            theirs, again = repeat_calls(calls, second.settings)
            compare(calls, again)
            report(ours, theirs, len(calls), tasks_at(prefect))


if __name__ == "__main__":
    main()
