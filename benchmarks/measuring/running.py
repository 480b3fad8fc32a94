"""Starts a real `tuneship serve` for benchmarks, and tunes and deploys through its HTTP address."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.jobs import ENDED, Hyperparameters, Job, JobCreate, JobStatus
from tuneship.settings import ClientSettings

UNLIMITED = {
    "TUNESHIP_GENERATE_REQUESTS_PER_MINUTE": "0",
    "TUNESHIP_CONTROL_REQUESTS_PER_MINUTE": "0",
}
EXAMPLES = Path(__file__).parents[2] / "examples" / "icd10cm"


@dataclass(frozen=True)
class Running:
    """A running service."""

    pid: int
    data_dir: Path
    settings: ClientSettings
    # Settings of the service, e.g. its catalogue; commands on its data need the same.
    environment: Mapping[str, str]


@contextmanager
def running(data_dir: Path, environment: dict[str, str] | None = None) -> Generator[Running]:
    """A service on a free port that runs for the time of a `with` block."""
    command = [sys.executable, "-m", "tuneship.cli.main", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=UNLIMITED | (environment or {}),
    )
    try:
        if process.stdout is None or not process.stdout.readline().startswith("ready"):
            raise SystemExit("the service did not start")
        settings = ClientSettings.from_credentials(data_dir / "credentials.json")
        yield Running(process.pid, data_dir, settings, environment or {})
    finally:
        process.terminate()
        process.wait(timeout=60)


def example_rows(source: str, rows: int) -> list[bytes]:
    """The first rows of an example file."""
    return (EXAMPLES / source).read_bytes().splitlines(keepends=True)[:rows]


def example_questions(count: int) -> list[str]:
    """Random questions of the validation rows, the same in every run."""
    rows = example_rows("validation.jsonl", 500)
    return [json.loads(line)["instruction"] for line in random.Random(1).sample(rows, count)]


def upload(client: Client, name: str, lines: Iterable[bytes]) -> str:
    """Upload a dataset of these lines; returns its id."""
    with tempfile.TemporaryFile() as file:
        file.writelines(lines)
        file.seek(0)
        return client.datasets.upload(DatasetUpload(name=name, format="instruction"), file).id


def tune(client: Client, request: JobCreate) -> Job:
    """Run a job to its end."""
    job_id = client.jobs.create(request).id
    while (found := client.jobs.get(job_id)).status not in ENDED:
        time.sleep(0.02)
    if found.status != JobStatus.COMPLETED:
        raise SystemExit(f"the job ended as {found.status}")
    return found


def job_on(training: str, validation: str, base_model: str = "tuneship-tiny") -> JobCreate:
    """A request for one epoch, with a learning rate for a small model."""
    return JobCreate(
        base_model=base_model,
        dataset_id=training,
        validation_dataset_id=validation,
        model_name="bench",
        hyperparameters=Hyperparameters(epochs=1, batch_size=16, learning_rate=1e-3),
        validation_frequency=1,
    )


def exported(service: Running, model: str, directory: Path) -> Path:
    """Export the adapter of a tuned model for peft; `directory` must not exist."""
    command = [sys.executable, "-m", "tuneship.cli.main", "models", "export", model, str(directory)]
    command += ["--data-dir", str(service.data_dir)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=dict(service.environment))
    return directory


def deploy(client: Client, model: str, name: str, replicas: int = 1) -> str:
    """Deploy a model and wait until all its replicas run; returns the deployment's id."""
    made = client.deployments.create(
        DeploymentCreate(
            model_name=model, deployment_name=name, min_replicas=replicas, max_replicas=replicas
        )
    )
    while client.deployments.get(made.id).current_replicas < replicas:
        time.sleep(0.01)
    return made.id


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its living descendants."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for file in children for child in file.read_text(encoding="ascii").split()]
    return own_cpu_seconds(pid) + sum(cpu_seconds(child) for child in below)


def own_cpu_seconds(pid: int) -> float:
    """CPU time of a process since its start, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
