"""With `encryption_level: maximum` no tenant data is on the disk in plain, and deleted data cannot be decrypted."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from tests.support.objects.files import contents_below, paths_below
from tests.support.service.in_process import LINES, Service, jsonl
from tests.support.service.processes import Serve, ended_job
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.datasets import DatasetMerge, DatasetUpload, DatasetValidate
from tuneship.contract.deployments import DeploymentCreate, DeploymentSecuritySettings
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import Hyperparameters, Job, JobCreate, JobSecuritySettings
from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.access.data_keys import KeyGone, keyring_of
from tuneship.serving.adapters import read_adapter
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database, sqlite_url

MAXIMUM: dict[str, Any] = {"security_settings": {"encryption_level": "maximum"}}
CANARY = f"CANARY{uuid4().hex}"
# Words that give data away: the user's text, names of tensors, and a prompt from the check of an adapter.
TELLTALE = (CANARY.encode(), b"lora_A", b"base_model.model", b"Which of these comes first")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    made = Serve(
        tmp_path / "data",
        master_key_file=str(tmp_path / "elsewhere"),
        inline_dataset_bytes="8192",
    )
    try:
        yield made
    finally:
        made.stop()


def leaks(serve: Serve) -> list[tuple[Path, bytes]]:
    """Return the files that hold plain data, each with the word found."""
    contents = contents_below(serve.data_dir) | {serve.log: serve.log.read_bytes()}
    return [
        (file, word) for file, content in contents.items() for word in TELLTALE if word in content
    ]


def upload(client: Client, examples: int) -> str:
    content = b"".join(
        jsonl({"instruction": f"{CANARY} {n}", "response": f"{n % 4} {CANARY}"})
        for n in range(examples)
    )
    client.datasets.validate(DatasetValidate(format="instruction"), BytesIO(content))
    form = DatasetUpload(name="d", format="instruction")
    made = client.datasets.upload(form, BytesIO(content)).id
    until(lambda: client.datasets.get(made).status == "processed")
    return made


def train(client: Client, dataset: str, *, epochs: int = 4) -> str:
    return client.jobs.create(
        JobCreate(
            base_model="tuneship-tiny",
            dataset_id=dataset,
            model_name="m",
            validation_frequency=2,
            hyperparameters=Hyperparameters(epochs=epochs, batch_size=8, learning_rate=1e-3),
            security_settings=JobSecuritySettings(encryption_level="maximum"),
        )
    ).id


def keys(serve: Serve) -> dict[str, bytes]:
    with closing(sqlite3.connect(serve.data_dir / "tuneship.sqlite")) as connection:
        return dict(connection.execute("select object_id, wrapped from object_keys"))


def trained_over_a_kill(serve: Serve, client: Client, dataset: str) -> Job:
    job_id = train(client, dataset)
    until(lambda: client.jobs.get(job_id).current_step > 4)
    (trainer,) = serve.workers("tuneship.training")
    os.kill(trainer, signal.SIGSTOP)  # stop it while a checkpoint is on the disk
    written = {file.name for file in paths_below(serve.data_dir / "work" / job_id)}
    assert "tensors.safetensors" in written
    assert leaks(serve) == []
    os.kill(trainer, signal.SIGKILL)
    job = ended_job(client, job_id)
    assert job.status == "completed", job.error
    assert client.jobs.metrics(job_id).steps == list(range(1, job.total_steps + 1))
    messages = [entry.message for entry in client.jobs.logs(job_id).logs]
    assert any("resumes from its checkpoint" in message for message in messages)
    return job


def export(serve: Serve, model: str, exported: Path) -> None:
    command = (sys.executable, "-W", "ignore", "-m", "tuneship.cli.main", "models", "export")
    subprocess.run(
        [*command, model, str(exported), "--data-dir", str(serve.data_dir)],
        env=os.environ | {"TUNESHIP_MASTER_KEY_FILE": str(serve.data_dir.parent / "elsewhere")},
        check=True,
    )
    assert read_adapter(exported)
    assert b"lora_A" in (exported / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_no_file_ever_holds_what_a_tenant_gave_and_deletion_is_for_good(
    serve: Serve, tmp_path: Path
) -> None:
    client = serve.client()
    # The small one is processed at once, the big one in the background.
    small, big = upload(client, 32), upload(client, 64)
    merged = client.datasets.merge(DatasetMerge(dataset_ids=[small, big], name="both")).id
    until(lambda: client.datasets.get(merged).status == "processed")
    assert leaks(serve) == []

    job = trained_over_a_kill(serve, client, merged)
    assert job.fine_tuned_model is not None
    deployment = client.deployments.create(
        DeploymentCreate(
            model_name=job.fine_tuned_model,
            deployment_name="d",
            security_settings=DeploymentSecuritySettings(encryption_level="maximum"),
        )
    ).id
    until(lambda: client.deployments.get(deployment).status != "creating")
    assert client.deployments.get(deployment).status == "running"
    answer = client.deployments.generate(
        deployment, Generate(prompt=f"{CANARY} 1", max_tokens=8, stop=[CANARY])
    )
    assert answer.deployment_id == deployment  # the completion itself may be empty
    assert leaks(serve) == []
    assert len(list((serve.data_dir / "blobs" / "models").rglob("*.safetensors"))) == 1

    export(serve, job.fine_tuned_model, tmp_path / "exported")

    before = keys(serve)
    objects = [name for name in before if not name.startswith("tenants/")]
    assert len(objects) == 4, "three datasets and a model; the checkpoints' key went with the job"
    client_id = client.settings.client_id
    shutil.copytree(serve.data_dir / "blobs", tmp_path / "stolen")
    client.deployments.delete(deployment)
    until(lambda: client.deployments.get(deployment).status == "deleted")
    client.models.delete(job.fine_tuned_model)
    for dataset in (small, big, merged):
        client.datasets.delete(dataset)
    assert [name for name in keys(serve) if not name.startswith("tenants/")] == []
    assert not contents_below(serve.data_dir / "blobs")

    def holds_a_key() -> bool:
        whole = b"".join(contents_below(serve.data_dir).values())
        return any(before[name] in whole for name in objects)

    until(lambda: not holds_a_key())
    assert leaks(serve) == []
    serve.stop()
    master = bytes.fromhex((tmp_path / "elsewhere").read_text())
    database = Database(sqlite_url(serve.data_dir / "tuneship.sqlite"))
    with database.read() as connection:
        for name in objects:
            with pytest.raises(KeyGone):
                keyring_of(master).find(connection, client_id, name)
    database.close()
    copies = contents_below(tmp_path / "stolen").values()
    assert not any(word in content for content in copies for word in TELLTALE)


def test_an_object_without_its_key_is_used_by_nobody(start: Callable[..., Service]) -> None:
    service = start(concurrent_jobs=1)
    tuned, running, dataset = service.model(), service.job(), service.dataset()
    made = service.deployment("d", model_name=tuned)
    waiting = service.job(dataset_id=dataset)
    with service.database.write() as connection:
        row = rows.fetch(connection, tables.models, tuned, client_id=None)
        assert row is not None
        service.parts.keyring.destroy(connection, row["blob"], f"datasets/{dataset}")
    gone = "the key of a stored file is gone"
    why = f"the files of the model cannot be read: {gone}"

    refused = service.call(
        "POST", "/v1/deployments", json={"model_name": tuned, "deployment_name": "new"}
    )
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == why
    merge = {"dataset_ids": [dataset, service.dataset()], "name": "n"}
    assert service.call("POST", "/v1/datasets/merge", json=merge).status_code == 404

    service.call("PATCH", f"/v1/deployments/{made}", json={"tags": {}})
    service.until(lambda: service.deployment_status(made) == "failed")
    error = service.call("GET", f"/v1/deployments/{made}").json()["error"]
    assert error["message"] == f"the model cannot be served: {why}"

    service.call("POST", f"/v1/fine-tuning/jobs/{running}/cancel")
    service.trainer_of(running).code = 0
    service.until(lambda: service.job_status(waiting) == "failed")
    error = service.call("GET", f"/v1/fine-tuning/jobs/{waiting}").json()["error"]
    assert (error["reason"], error["message"]) == ("data_unreadable", gone)


def test_a_key_opens_its_own_object_only(service: Service) -> None:
    one, two = (f"datasets/{service.dataset()}" for _ in range(2))
    table = tables.object_keys
    with service.database.write() as connection:
        query = sa.select(table.c.wrapped).where(table.c.object_id == two)
        wrapped = connection.scalar(query)
        change = sa.update(table).where(table.c.object_id == one)
        connection.execute(change.values(wrapped=wrapped))
        with pytest.raises(ObjectDamaged):
            service.parts.keyring.find(connection, "alice", one)
        assert service.parts.keyring.find(connection, "alice", two)
    job = service.call(
        "POST",
        "/v1/fine-tuning/jobs",
        json={
            "base_model": "tuneship-tiny",
            "model_name": "m",
            "dataset_id": one.removeprefix("datasets/"),
        },
    ).json()["id"]
    service.until(lambda: service.job_status(job) == "failed")
    error = service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()["error"]
    assert (error["reason"], "damaged" in error["message"]) == ("data_unreadable", True)
    assert service.job(dataset_id=two.removeprefix("datasets/")), "the other one is as it was"


def test_exchanged_files_stop_their_deployment_and_no_other(service: Service) -> None:
    tuned, fine = service.model(), service.model()
    with service.database.read() as connection:
        folders = [
            service.parts.blobs.path_of(row["blob"])
            for name in (tuned, fine)
            if (row := rows.fetch(connection, tables.models, name, client_id=None))
        ]
    for file in folders[1].iterdir():
        shutil.copy(file, folders[0] / file.name)
    body = {"model_name": tuned, "deployment_name": "exchanged"}
    refused = service.call("POST", "/v1/deployments", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "deployment_error")
    service.deployment("fine", model_name=fine)


def test_an_order_for_a_process_is_in_no_file_and_no_argument(service: Service) -> None:
    job = service.job(dataset_id=service.dataset(content=jsonl(*LINES)))
    service.until(lambda: service.job_status(job) == "running")
    trainer = service.trainer()
    keys = trainer.order.keys
    assert None not in (keys.training, keys.checkpoints, keys.adapter)
    assert keys.training is not None
    assert keys.training not in (trainer.folder / "spec.json").read_text()
    assert keys.training not in repr(trainer.order)
    assert keys.training not in " ".join(trainer.spec.arguments)
