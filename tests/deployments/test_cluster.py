"""The cluster for trying on one machine: what it chooses is kept and private, and its services get valid settings."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments import cluster_parts
from deployments.background_processes import NotStarted
from deployments.cluster import PARTS, TrialCluster, descendants
from deployments.cluster_parts import SERVICES, Place, service
from tests.support.package_index import need_package_index
from tests.support.processes import ROOT
from tests.support.waiting import free_port, until
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.generation import Generate
from tuneship.settings import ClientSettings, ServiceSettings


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Place(tmp_path, 1, {})


def test_the_next_start_finds_the_same_ports_and_secrets(place: Place) -> None:
    again = Place(place.folder, 2, {})
    assert again.choices == place.choices
    ports = list(place.choices.ports.values())
    assert len(set(ports)) == len(ports) >= len(SERVICES)
    assert again.url.endswith(":2")


def test_secrets_can_be_read_by_their_owner_alone(place: Place) -> None:
    secrets = (place.choices.objects_secret, place.choices.ray_token)
    holders = [
        file
        for file in place.folder.iterdir()
        if file.is_file() and any(secret in file.read_text() for secret in secrets)
    ]
    assert holders
    for file in (*holders, place.master_key_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def settings_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    for name in [name for name in os.environ if name.startswith("TUNESHIP_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return ServiceSettings()


def test_services_differ_in_port_and_folder_alone_and_take_more_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, 1, {"TUNESHIP_MAXIMUM_WEBHOOKS": "30", "TUNESHIP_CLUSTER": "other"})
    monkeypatch.setenv("AWS_PROFILE", "of-somebody-else")
    programs = [service(place, name) for name in SERVICES]
    assert len({tuple(one.environment.items()) for one in programs}) == 1
    assert len({tuple(one.command) for one in programs}) == len(SERVICES)
    assert "AWS_PROFILE" not in programs[0].environment
    settings = settings_of(programs[0].environment, monkeypatch)
    assert (settings.cluster, settings.maximum_webhooks) == ("trial", 30)
    assert settings.public_url == place.url


def test_a_library_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> object:
        return None if name == "ray" else object()

    monkeypatch.setattr(cluster_parts, "find_spec", find_spec)
    with pytest.raises(NotStarted, match=r"^ray missing: pip install 'tuneship\[cluster\]'$"):
        TrialCluster(tmp_path, 1).up()
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.soak
@pytest.mark.long
def test_a_cluster_starts_answers_survives_a_service_and_ends_without_a_trace(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_package_index()
    tools = installed(tmp_path / "env")
    outer = Path(tempfile.mkdtemp(prefix="tuneship-"))
    outer.chmod(0o755)  # root's PostgreSQL runs as a user who may not enter pytest's folders
    request.addfinalizer(lambda: shutil.rmtree(outer, ignore_errors=True))
    folder, port = outer / "cluster", free_port()
    command = [tools / "python", "-m", "deployments.cluster"]
    choices = ["--folder", str(folder), "--port", str(port)]

    def run(verb: str) -> str:
        done = subprocess.run(
            [*command, verb, *choices], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        run("up")
        cluster = TrialCluster(folder, port)
        started = {name: cluster.process(name) for name in PARTS}
        assert None not in started.values()
        everything = [one for pid in started.values() if pid for one in (pid, *descendants(pid))]
        credentials = ClientSettings.from_credentials(folder / "service-1" / "credentials.json")
        with Client(credentials.model_copy(update={"url": f"http://127.0.0.1:{port}"})) as client:
            made = client.deployments.create(
                DeploymentCreate(model_name="tuneship-tiny", deployment_name="trial")
            ).id
            until(lambda: client.deployments.get(made).status == "running")
            ask = Generate(prompt="Which chapter is eczema in?", max_tokens=4, temperature=0)
            answer = client.deployments.generate(made, ask).completion
            os.kill(started["service-2"] or 0, 9)
            for _ in range(2 * len(SERVICES)):
                assert client.deployments.generate(made, ask).completion == answer
        run("up")
        assert cluster.process("service-2") not in (None, started["service-2"])
    finally:
        run("down")
    assert not [pid for pid in everything if Path(f"/proc/{pid}/cwd").exists()]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)


def installed(folder: Path) -> Path:
    """Install the extra `cluster` into an environment of its own; return its programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    quiet: list[Any] = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    wanted = ["-e", ROOT / "packaging" / "client", "-e", f"{ROOT}[cluster]"]
    subprocess.run([*quiet, *wanted], check=True, timeout=1200)
    return folder / "bin"
