"""Start `tuneship serve` as a user does, with its real workers, and find them in the operating system."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from tests.support.waiting import PATIENCE_S, until
from tuneship.cli.commands.keys import opened
from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.declaring.scopes import scopes_of
from tuneship.contract.deployments import DeploymentCreate, DeploymentSecuritySettings
from tuneship.contract.jobs import (
    ENDED,
    ComputeConfig,
    Hyperparameters,
    Job,
    JobCreate,
    JobSecuritySettings,
)
from tuneship.settings import ClientSettings
from tuneship.training.spec import PROGRESS_FILE

ROOT = Path(__file__).parents[3]
Starter = Callable[..., "subprocess.Popen[str]"]
COLOURS = ("red", "green", "blue", "black")


def start(module: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Run a module as a program; `options` are passed to Popen."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


class Serve:
    """A service process on a data folder, which can be started again on the same folder after a kill."""

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        preload: bool = False,
        starter: Starter = start,
        **settings: str,
    ) -> None:
        self.data_dir = data_dir
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self._options = options
        self._preload = preload
        # The function for the next start, e.g. one whose host lacks a feature.
        self.starter = starter
        self._settings = {f"TUNESHIP_{name.upper()}": value for name, value in settings.items()}
        self._clients: list[Client] = []
        self.process = self.start()

    def start(self) -> "subprocess.Popen[str]":
        command = ("tuneship.cli.main", "serve", "--port", "0", "--data-dir", str(self.data_dir))
        with self.log.open("a") as log:
            self.process = self.starter(
                *command,
                *self._options,
                env=os.environ
                | {
                    "PYTHONPATH": str(ROOT),
                    "TUNESHIP_PRELOAD_BASE_MODELS": str(self._preload).lower(),
                    "TUNESHIP_CONTROL_REQUESTS_PER_MINUTE": "0",  # because tests poll faster than people
                    **self._settings,
                },
                stderr=log,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"{line} {self.log.read_text()[-2000:]}"
        self.url = line.split()[1]
        return self.process

    @property
    def settings(self) -> ClientSettings:
        """The address and the local key, as another program would find them."""
        return ClientSettings.from_credentials(self.data_dir / "credentials.json")

    def settings_with(self, scopes: str) -> ClientSettings:
        """The same with a key of these scopes, as `tuneship keys create` makes one."""
        with opened(self.data_dir) as keys:
            key = keys.issue("local", scopes_of(scopes), None)
        return self.settings.model_copy(update={"api_key": SecretStr(key)})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request with the local key."""
        settings = self.settings
        key = settings.api_key.get_secret_value()
        return {"Authorization": f"Bearer {key}", "X-Client-ID": settings.client_id}

    def client(self) -> Client:
        self._clients.append(Client(self.settings))
        return self._clients[-1]

    def openai_variables(self) -> dict[str, str]:
        """The environment of a program that was written for OpenAI."""
        kept = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
        key = self.settings.api_key.get_secret_value()
        return kept | {"OPENAI_BASE_URL": f"{self.url}/openai/v1", "OPENAI_API_KEY": key}

    def kill(self) -> None:
        """Kill the process, as a power failure would."""
        self.process.kill()
        self._wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._wait()

    def _wait(self) -> None:
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for client in self._clients:
            client.close()
        self._clients.clear()

    def workers(self, module: str) -> list[int]:
        """Process ids of this service's running workers."""
        found: list[int] = []
        for one in Path("/proc").glob("[0-9]*"):
            try:
                command = (one / "cmdline").read_bytes().split(b"\0")
                state, parent, *_ = (one / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended
            is_child = int(parent) == self.process.pid
            is_ours = is_child or str(self.data_dir).encode() in b" ".join(command)
            if module.encode() in command and is_ours and state != "Z":
                found.append(int(one.name))
        return found


@contextmanager
def served(data_dir: Path, **settings: str) -> Iterator[Serve]:
    """Start a service, and kill it in the end."""
    service = Serve(data_dir, **settings)
    try:
        yield service
    finally:
        service.kill()


def rows_file(path: Path, count: int) -> Path:
    lines = [
        {"instruction": f"What is case {n} {COLOURS[n % 4]}?", "response": COLOURS[(n + 1) % 4]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start_job(
    client: Client,
    file: Path,
    *,
    epochs: int = 1,
    isolated: bool = False,
    instance_type: str = "local",
) -> str:
    """Start a job on the rows of `file`; with 64 rows an epoch has 8 steps."""
    with file.open("rb") as opened:
        dataset = client.datasets.upload(DatasetUpload(name="d", format="instruction"), opened)
    return client.jobs.create(
        JobCreate(
            base_model="tuneship-tiny",
            dataset_id=dataset.id,
            model_name="m",
            validation_frequency=1.0,
            hyperparameters=Hyperparameters(epochs=epochs, batch_size=8, learning_rate=1e-3),
            security_settings=JobSecuritySettings(network_isolation=isolated),
            compute_config=ComputeConfig(instance_type=instance_type),
        )
    ).id


def trainer_at_work(serve: Serve, job_id: str, steps: int) -> int:
    """Wait until a job's first attempt has done more than `steps` steps; return its process id.

    The steps are counted in its progress file, because the service may read that file late.
    """
    folder = serve.data_dir / "work" / job_id / "attempt-1"
    (trainer,) = until(lambda: serve.workers(str(folder)))
    file = folder / PROGRESS_FILE
    until(lambda: file.is_file() and file.read_text().count('"kind": "step"') > steps)
    return trainer


def ended_job(client: Client, job_id: str) -> Job:
    until(lambda: client.jobs.get(job_id).status in ENDED)
    return client.jobs.get(job_id)


def running_deployment(
    client: Client, name: str, model: str, *, isolated: bool = False, **tags: str
) -> str:
    settings = DeploymentSecuritySettings(network_isolation=isolated)
    made = client.deployments.create(
        DeploymentCreate(
            model_name=model, deployment_name=name, tags=tags, security_settings=settings
        )
    ).id
    until(lambda: client.deployments.get(made).status != "creating")
    assert client.deployments.get(made).status == "running"
    return made
