"""A backup is taken while 32 clients upload and delete; a restored copy has everything acknowledged before it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import jsonl
from tests.support.service.processes import (
    ROOT,
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import until, until_async
from tuneship.contract.generation import Generate
from tuneship.store.installation.backup_format import read_manifest

pytestmark = [pytest.mark.both_databases(postgres="soak"), pytest.mark.slow, pytest.mark.long]
CLIENTS = 32
PROMPT = Generate(prompt="What is case 7?", max_tokens=4, temperature=0)
# Numbers of uploads answered before the first backup, and between it and the second.
BEFORE, BETWEEN = 64, 64


class Load:
    """32 clients that upload and delete, and the times of their answers."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=300,
            trust_env=False,
            limits=httpx.Limits(max_connections=CLIENTS),
        )
        self.created: dict[str, float] = {}
        self.to_be_deleted: dict[str, float] = {}
        self.deleted: dict[str, float] = {}
        self.ended = False

    async def client(self, number: int) -> None:
        deletes = False
        while not self.ended:
            content = jsonl({"instruction": f"case {number}", "response": "x" * 20_000})
            files = {"file": ("x.jsonl", content, "application/jsonl")}
            form = {"name": "n", "format": "instruction"}
            answer = await self._http.post("/v1/datasets", data=form, files=files)
            if answer.status_code != 201:
                assert answer.status_code in (429, 503), answer.text
                await asyncio.sleep(0.05)
                continue
            self.created[answer.json()["id"]] = time.monotonic()
            if deletes:
                await self._delete(answer.json()["id"])
            deletes = not deletes  # every second dataset is deleted at once

    async def _delete(self, dataset: str) -> None:
        self.to_be_deleted[dataset] = time.monotonic()
        answer = await self._http.delete(f"/v1/datasets/{dataset}")
        assert answer.status_code == 200, answer.text
        self.deleted[dataset] = time.monotonic()

    async def run(self, meanwhile: Callable[[], Any]) -> None:
        async with self._http:
            clients = [asyncio.create_task(self.client(number)) for number in range(CLIENTS)]
            try:
                await meanwhile()
            finally:
                self.ended = True
                await asyncio.gather(*clients)


def command(
    data_dir: Path, settings: dict[str, str], *arguments: str
) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-m", "tuneship.cli.main", *arguments, "--data-dir", str(data_dir)]
    environment = {f"TUNESHIP_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_everything_acknowledged_before_a_backup_under_load_is_restored_and_answers(
    tmp_path: Path, database_settings: Callable[[], dict[str, Any]]
) -> None:
    chosen, other = database_settings(), database_settings()
    serve = Serve(tmp_path / "data", minimum_free_disk_bytes="0", **chosen)
    try:
        client = serve.client()
        job = ended_job(client, start_job(client, rows_file(tmp_path / "rows.jsonl", 64)))
        assert job.fine_tuned_model is not None, job.error
        deployment = running_deployment(client, "d", job.fine_tuned_model)
        expected = client.deployments.generate(deployment, PROMPT).completion
        arguments = ("keys", "create", "--client-id", "local", "--scopes", "admin", "--json")
        key = json.loads(command(serve.data_dir, chosen, *arguments).stdout)["api_key"]
        headers = {"Authorization": f"Bearer {key}", "X-Client-ID": "local"}
        load = Load(serve.url, headers)
        begun = asyncio.run(backed_up_twice(load, serve, tmp_path / "backup", chosen))
    finally:
        serve.stop()
    # A dataset that is deleted while the backup runs may be in it or not, but row and file agree.
    due = {one for one, at in load.created.items() if at < begun and one not in load.to_be_deleted}
    deleted = {one for one, at in load.deleted.items() if at < begun}
    assert len(due) > CLIENTS // 2
    assert deleted
    check_manifest(tmp_path / "backup", due, deleted)
    restored = tmp_path / "restored"
    other["master_key_file"] = str(serve.data_dir / "master.key")
    command(restored, other, "restore", str(tmp_path / "backup"))
    command(restored, other, "check")
    again = Serve(restored, **other)
    try:
        with httpx.Client(
            base_url=again.url, headers=headers, timeout=300, trust_env=False
        ) as http:
            assert {http.get(f"/v1/datasets/{one}").status_code for one in due} == {200}
            assert {http.get(f"/v1/datasets/{one}").status_code for one in deleted} == {404}
            path = f"/v1/deployments/{deployment}"
            until(lambda: http.get(path).json()["status"] == "running")
            answer = http.post(f"{path}/generate", json=PROMPT.model_dump(exclude_unset=True))
            assert answer.json()["completion"] == expected, answer.text
        assert "without a row" not in again.log.read_text()
    finally:
        again.stop()
    command(restored, other, "check")
    command(restored, other, "audit", "verify")


async def backed_up_twice(
    load: Load, serve: Serve, folder: Path, settings: dict[str, str]
) -> float:
    """Back up twice into the same folder under load; return when the second backup began."""
    begun = 0.0

    async def back_up() -> None:
        nonlocal begun
        for count in (BEFORE, BEFORE + BETWEEN):
            await until_async(lambda count=count: len(load.created) >= count)
            begun = time.monotonic()
            await asyncio.to_thread(command, serve.data_dir, settings, "backup", str(folder))

    await load.run(back_up)
    return begun


def check_manifest(folder: Path, due: set[str], deleted: set[str]) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.missing == []
    there = {path.split("/")[1] for path in manifest.files}
    assert due <= there
    assert not deleted & there
