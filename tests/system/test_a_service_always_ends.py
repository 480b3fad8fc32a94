"""SIGTERM ends `tuneship serve` in time and in order whatever is stuck in it; the log names the stuck thread."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import yaml

from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.processes import ROOT, Serve, rows_file, running_deployment
from tests.support.waiting import PATIENCE_S, children, is_alive, until
from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.deployments import DeploymentCreate
from tuneship.service.catalogues.base_models import SHIPPED

pytestmark = pytest.mark.slow
LEFT_BEHIND = "a thread is stuck and is left behind: "
StartService = Callable[..., Serve]


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[StartService]:
    made: list[Serve] = []

    def start(**settings: Any) -> Serve:
        made.append(Serve(tmp_path / "data", **settings))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def with_fifo(path: Path) -> None:
    """Replace the file by a FIFO, so that opening it blocks for ever, as on a network file system that hangs."""
    path.unlink()
    os.mkfifo(path)


def stuck(serve: Serve) -> list[str]:
    lines = serve.log.read_text().splitlines()
    return [line.partition(LEFT_BEHIND)[2] for line in lines if LEFT_BEHIND in line]


def ended(serve: Serve, *, signals: int = 1) -> int:
    workers = children(serve.process.pid)
    for _ in range(signals):
        serve.process.send_signal(signal.SIGTERM)
        until(lambda: serve.process.poll() is not None or is_draining(serve))
    code = serve.process.wait(PATIENCE_S)
    until(lambda: not any(is_alive(one) for one in workers))
    serve.stop()  # closes the client
    return code


def is_draining(serve: Serve) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{serve.url}/v1/models", timeout=5).status_code == 503
    return True


def test_nothing_is_stuck(start_service: StartService) -> None:
    serve = start_service()
    running_deployment(serve.client(), "d", "tuneship-tiny")
    assert ended(serve) == 0
    assert LEFT_BEHIND not in serve.log.read_text()


def test_a_deployments_files_hang(start_service: StartService, tmp_path: Path) -> None:
    """Let the tokenizer file of a base model hang; reading it once held the interpreter's lock and so every thread."""
    base = tmp_path / "base"
    shutil.copytree(SHIPPED / "tuneship-tiny", base)
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text(yaml.safe_dump({"models": [{"id": "hangs", "path": str(base)}]}))
    serve = start_service(model_catalogue=str(catalogue))
    client = serve.client()
    sound = running_deployment(client, "sound", "tuneship-tiny")
    client.models.get("hangs")  # now its files that requests read have been read
    with_fifo(base / "tokenizer.json")
    hung = client.deployments.create(DeploymentCreate(model_name="hangs", deployment_name="h")).id
    running_deployment(client, "later", "tuneship-tiny")  # other deployments are loaded meanwhile

    assert ended(serve) == 0
    (line,) = stuck(serve)
    place, _, stack = line.partition(": ")
    assert place == "deployment files (DeploymentKeeper._checked_model)"
    assert "base_models:tokenizer:" in stack
    # The same rows are there, and the deployment that hung is tried again.
    shutil.copy(SHIPPED / "tuneship-tiny" / "tokenizer.json", base / "again")
    (base / "again").replace(base / "tokenizer.json")
    serve.start()
    after = serve.client()
    until(lambda: after.deployments.get(hung).status == "running")
    assert after.deployments.get(sound).status == "running"


def test_a_request_hangs(start_service: StartService, tmp_path: Path) -> None:
    serve = start_service()
    client = serve.client()
    ids = [uploaded(client, rows_file(tmp_path / f"{n}.jsonl", 4 + n)) for n in range(2)]
    (file,) = (serve.data_dir / "blobs" / "datasets" / ids[0]).iterdir()
    with_fifo(file)
    asking = threading.Thread(target=merge, args=[serve, ids], daemon=True)
    asking.start()
    fifo = until(lambda: read_by(file))
    try:
        assert ended(serve, signals=2) == 0
    finally:
        os.close(fifo)
    assert any(line.startswith("tuneship-file_") for line in stuck(serve))


def uploaded(client: Client, file: Path) -> str:
    with file.open("rb") as content:
        return client.datasets.upload(DatasetUpload(name="d", format="instruction"), content).id


def merge(serve: Serve, ids: list[str]) -> None:
    body = {"dataset_ids": ids, "name": "both"}
    with suppress(httpx.HTTPError):
        httpx.post(
            f"{serve.url}/v1/datasets/merge", json=body, headers=serve.headers, timeout=PATIENCE_S
        )


def read_by(fifo: Path) -> int:
    """Return the write end of the FIFO, for which its reader then waits; 0 while there is no reader."""
    with suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    return 0


@pytest.mark.postgres
def test_the_database_stands_still(start_service: StartService, postgres: Cluster) -> None:
    url = postgres.new_database()
    serve = start_service(database_url=url)
    deployment = running_deployment(serve.client(), "d", "tuneship-tiny")
    stopped = set[int]()
    try:
        # The service may replace a connection meanwhile.
        while backends := backends_of(postgres, url) - stopped:
            for one in backends:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGSTOP)
            stopped |= backends
        assert stopped
        until(lambda: is_unanswered(serve, deployment))  # so at least this request is stuck
        assert ended(serve, signals=2) == 0
    finally:
        for one in stopped:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
    # Where the service has last read the key too long ago, the request already waits for that.
    assert any(line.startswith("tuneship-request_") or "api_keys:" in line for line in stuck(serve))
    serve.start()
    assert serve.client().deployments.get(deployment).status == "running"


def is_unanswered(serve: Serve, deployment: str) -> bool:
    """Whether a request that reads the database times out; the service still waits for the database then."""
    try:
        httpx.get(f"{serve.url}/v1/deployments/{deployment}", headers=serve.headers, timeout=2)
    except httpx.ReadTimeout:
        return True
    return False


def backends_of(cluster: Cluster, url: str) -> set[int]:
    name = sa.make_url(url).database
    query = f"select pid from pg_stat_activity where datname = '{name}'"  # noqa: S608 - the name is ours
    return {row[0] for row in cluster.run(query)}


# A service in which the function `stands_still` is called as soon as it is ready.
PLANTED = """
import asyncio, ctypes, threading, time
from tuneship.service import serve, service_server
from tuneship.service.context.timing import ServiceTiming
from tuneship.settings import ServiceSettings
startup = service_server.ServiceServer.startup
async def planted(self, sockets=None):
    await startup(self, sockets)
    asyncio.get_running_loop().call_later(0.5, stands_still)
service_server.ServiceServer.startup = planted
def stuck_for_ever():
    while True:
        time.sleep(1)
def holds_the_lock():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, with Python's lock held, and no signal ends it
def holds_the_lock_in_a_thread():
    threading.Thread(target=holds_the_lock).start()
stands_still = NAME
serve.serve(ServiceSettings(port=0), timing=ServiceTiming(TIMING))
"""


@pytest.fixture
def start_planted(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Return a function that starts such a service on the same data, and waits until it is ready."""
    made: list[subprocess.Popen[str]] = []

    def start_program(name: str, timing: str) -> "subprocess.Popen[str]":
        settings = {"DATA_DIR": str(tmp_path / "data"), "PRELOAD_BASE_MODELS": "true"}
        with (tmp_path / "log").open("a") as log:
            program = PLANTED.replace("NAME", name).replace("TIMING", timing)
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", program],
                cwd=ROOT,
                env=os.environ | {f"TUNESHIP_{name}": value for name, value in settings.items()},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        return process

    yield start_program
    for process in made:
        process.kill()
        process.communicate()


def test_the_event_loop_itself_is_stuck(
    start_planted: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """Check the last resort: the log has the stacks of all threads, without values, and the exit code is 1."""
    process = start_planted("stuck_for_ever", "drain_s=1, rest_s=1")
    until(lambda: is_silent(tmp_path / "data"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 1
    assert "in stuck_for_ever" in (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "data" / "service.json").read_text())["pid"] == process.pid


IN_A_THREAD = pytest.param("holds_the_lock_in_a_thread", marks=pytest.mark.soak)


@pytest.mark.parametrize("name", ["holds_the_lock", IN_A_THREAD])
def test_pythons_lock_is_held(
    start_planted: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, name: str
) -> None:
    """After SIGTERM the service is gone with its workers, although none of its Python runs, and starts again."""
    process = start_planted(name, "drain_s=1, rest_s=1")
    until(lambda: is_silent(tmp_path / "data"))
    workers = until(lambda: children(process.pid))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == -signal.SIGABRT
    until(lambda: not any(is_alive(one) for one in workers))
    said = (tmp_path / "log").read_text()
    assert "it has not ended 3 s after a signal" in said
    assert "in holds_the_lock" in said
    again = start_planted("asyncio.Event", "")
    again.send_signal(signal.SIGTERM)
    assert again.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("name", ["stuck_for_ever", "holds_the_lock", IN_A_THREAD])
def test_a_service_that_stands_still_is_ended_without_a_signal(
    start_planted: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, name: str
) -> None:
    process = start_planted(name, "stalled_s=2")
    assert process.wait(PATIENCE_S) == -signal.SIGABRT
    said = (tmp_path / "log").read_text()
    assert "its event loop has not moved for 2 s" in said
    assert f"in {name.removesuffix('_in_a_thread')}" in said


# A service that does not end, whose event loop moves, and which takes a second for its last words.
SLOW_LAST_WORDS = """
import os, signal, time
from tuneship.host.guard import Guard
guard = Guard(60.0, 0.1)
def write_last_words(*_):
    for _ in range(10):
        guard.beat()
        time.sleep(0.1)
    os._exit(7)
signal.signal(signal.SIGABRT, write_last_words)
signal.signal(signal.SIGTERM, lambda *_: None)
os.kill(os.getpid(), signal.SIGTERM)
while True:
    guard.beat()
    time.sleep(0.1)
"""


def test_a_service_whose_event_loop_moves_has_time_for_its_last_words() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SLOW_LAST_WORDS]
    process = subprocess.run(
        command, cwd=ROOT, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    assert b"it has not ended 0 s after a signal" in process.stderr
    assert process.returncode == 7


def test_a_service_that_was_stopped_goes_on(
    start_planted: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    process = start_planted("asyncio.Event", "stalled_s=2")
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # longer than it may stand still by itself
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert not is_silent(tmp_path / "data")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def is_silent(data: Path) -> bool:
    """Whether the service does not answer."""
    url = json.loads((data / "service.json").read_text())["url"]
    try:
        httpx.get(f"{url}/healthz", timeout=2)
    except httpx.HTTPError:
        return True
    return False
