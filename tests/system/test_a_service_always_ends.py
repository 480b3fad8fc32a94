"""SIGTERM ends `tuneship serve` in time and in order whatever is stuck in it; the log names the stuck thread."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
import yaml

from tests.support.postgres_cluster import Cluster
from tests.support.processes import ROOT, Serve, rows_file, running_deployment
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

    def start(**settings: str) -> Serve:
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


def test_the_event_loop_itself_is_stuck(tmp_path: Path) -> None:
    """Check the last resort: the log has the stacks of all threads, without values, and the exit code is 1."""
    program = (
        "import signal, sys, time, asyncio\n"
        "from tuneship.service import serve\n"
        "from tuneship.service.common.timing import ServiceTiming\n"
        "from tuneship.settings import ServiceSettings\n"
        "startup = serve._Server.startup\n"
        "async def planted(self, sockets=None):\n"
        "    await startup(self, sockets)\n"
        "    asyncio.get_running_loop().call_soon(stuck_for_ever)\n"
        "def stuck_for_ever():\n"
        "    while True:\n"
        "        time.sleep(1)\n"
        "serve._Server.startup = planted\n"
        "serve.serve(ServiceSettings(port=0), timing=ServiceTiming(drain_s=1, rest_s=1))\n"
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            cwd=ROOT,
            env=os.environ
            | {
                "TUNESHIP_DATA_DIR": str(tmp_path / "data"),
                "TUNESHIP_PRELOAD_BASE_MODELS": "false",
            },
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline().startswith("ready ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1
    assert "in stuck_for_ever" in (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "data" / "service.json").read_text())["pid"] == process.pid
