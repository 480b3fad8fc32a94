"""Real workers and the operator's commands work with files in a bucket."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.objects.object_server import ObjectServer
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tuneship.cli.main import app
from tuneship.contract.generation import Generate

pytestmark = pytest.mark.slow

PROMPT = Generate(prompt="What is case 7?", max_tokens=4, temperature=0)


def command(*arguments: str, **settings: str) -> Result:
    environment = {f"TUNESHIP_{name.upper()}": value for name, value in settings.items()}
    return CliRunner().invoke(app, list(arguments), env=environment)


def test_a_model_is_trained_served_backed_up_and_restored(
    tmp_path: Path, bucket: str, object_server: ObjectServer
) -> None:
    data, backup, new = tmp_path / "data", tmp_path / "backup", tmp_path / "new"
    serve = Serve(data, blob_url=bucket)
    try:
        client = serve.client()
        job = ended_job(client, start_job(client, rows_file(tmp_path / "rows.jsonl", 64)))
        assert job.fine_tuned_model is not None, job.error
        deployment = running_deployment(client, "d", job.fine_tuned_model)
        answer = client.deployments.generate(deployment, PROMPT).completion

        place = ("--data-dir", str(data))
        done = command("backup", str(backup), *place, blob_url=bucket)
        assert done.exit_code == 0, done.output
        done = command("check", *place, blob_url=bucket)
        assert done.exit_code == 0, done.output
        export = (job.fine_tuned_model, str(tmp_path / "plain"))
        done = command("models", "export", *export, *place, blob_url=bucket)
        assert done.exit_code == 0, done.output

        # Without its cache the service starts again and downloads what it needs.
        serve.stop()
        shutil.rmtree(data / "cache")
        serve.start()
        client = serve.client()
        assert client.deployments.generate(deployment, PROMPT).completion == answer
    finally:
        serve.stop()

    done = command("restore", str(backup), "--data-dir", str(new), blob_url=bucket)
    assert (done.exit_code, "is not empty" in done.stderr) == (1, True), done.output
    other = object_server.place()
    shutil.copy(data / "master.key", tmp_path / "master.key")
    keys = {"master_key_file": str(tmp_path / "master.key"), "blob_url": other}
    done = command("restore", str(backup), "--data-dir", str(new), **keys)
    assert done.exit_code == 0, done.output
    assert object_server.objects(other)
    serve = Serve(new, **keys)
    try:
        client = serve.client()
        assert client.deployments.generate(deployment, PROMPT).completion == answer
    finally:
        serve.stop()


def test_a_start_that_is_refused_says_why_and_leaves_nothing(
    tmp_path: Path, bucket: str, object_server: ObjectServer
) -> None:
    serve = Serve(tmp_path / "one", blob_url=bucket)
    serve.stop()
    before = object_server.objects(bucket)
    for url, reason in ((bucket, "belong to the installation"), ("s3://no/1", "cannot be kept")):
        folder = tmp_path / "two"
        done = command("serve", "--port", "0", "--data-dir", str(folder), blob_url=url)
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.output
        assert reason in done.stderr
        assert not (folder / "master.key").exists()
        assert not (folder / "tuneship.sqlite").exists()
    assert object_server.objects(bucket) == before
    # A bucket address that contains credentials is refused, and the secret is not printed.
    url = "s3://somebody:secret@bucket/1"
    done = command("serve", "--port", "0", "--data-dir", str(tmp_path / "two"), blob_url=url)
    assert (done.exit_code, "secret" in done.output) == (1, False)
    assert "credentials" in done.stderr
