"""The cluster for trying on one machine: what it chooses is kept and private, and its services get valid settings."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from deployments import cluster_parts
from deployments.background_processes import NotStarted
from deployments.cluster import PARTS, TrialCluster, descendants
from deployments.cluster_parts import (
    DATABASE_USER,
    SERVICES,
    Place,
    balancer,
    objects,
    postgres,
    ray_head,
    service,
)
from tests.support.package_index import need_package_index
from tests.support.service.processes import ROOT
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


def test_balancer_and_nodes_get_the_loopback_address_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_parts, "_tool", lambda name: name)
    balancer(place)
    (site,) = re.findall(
        r"^http://.*\n(?: .*\n)*}", (place.folder / "Caddyfile").read_text(), re.MULTILINE
    )
    assert "\n  bind 127.0.0.1\n" in site
    for name in ("-ip=127.0.0.1", "-ip.bind=127.0.0.1"):
        assert name in objects(place).command
    head = ray_head(place)
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"} <= {*head.command}
    assert head.environment["RAY_AUTH_MODE"] == "token"
    for one in SERVICES:
        assert "--host" not in service(place, one).command  # by default it is the loopback address


CALL_AS_SOMEBODY_ELSE = """
import os, sys
import psycopg
os.setuid(65533)
try:
    psycopg.connect(host=sys.argv[1], user=sys.argv[2], dbname="postgres")
except psycopg.OperationalError as refusal:
    sys.exit(str(refusal))
"""


@pytest.mark.slow
def test_postgresql_lets_in_only_the_user_who_started_the_cluster(
    request: pytest.FixtureRequest,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tuneship-"))
    folder.chmod(0o755)  # root's PostgreSQL runs as a user who may not enter pytest's folders
    request.addfinalizer(lambda: shutil.rmtree(folder))
    place = Place(folder, 1, {})
    sockets = Path(place.choices.sockets)
    request.addfinalizer(lambda: shutil.rmtree(sockets, ignore_errors=True))
    program = postgres(place)
    process = subprocess.Popen(program.command, env=program.environment, cwd="/")
    try:
        until(program.is_ready)
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        with psycopg.connect(host=str(sockets), user=DATABASE_USER, dbname="postgres") as opened:
            rules = opened.execute("select distinct auth_method from pg_hba_file_rules").fetchall()
        assert rules == [("peer",)]
        if os.getuid() == 0:
            sockets.chmod(0o711)
            command = [sys.executable, "-c", CALL_AS_SOMEBODY_ELSE, sockets, DATABASE_USER]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert 'Peer authentication failed for user "tuneship"' in done.stderr
    finally:
        process.terminate()
        process.wait(30)


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
        credentials = ClientSettings.from_credentials(folder / "service-1" / "credentials.json")
        with Client(credentials.model_copy(update={"url": f"http://127.0.0.1:{port}"})) as client:
            made = client.deployments.create(
                DeploymentCreate(model_name="tuneship-tiny", deployment_name="trial")
            ).id
            until(lambda: client.deployments.get(made).status == "running")
            everything = [
                one for pid in started.values() if pid for one in (pid, *descendants(pid))
            ]
            listening = addresses_of(everything)
            assert len(listening) > len(PARTS)
            assert [one for one in listening if not one.is_loopback] == []
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


def addresses_of(processes: Sequence[int]) -> list[IPv4Address | IPv6Address]:
    """The addresses at which processes listen; an IPv4 address in its IPv6 form counts as the one that it is."""
    found = list[IPv4Address | IPv6Address]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    address = ip_address(one.laddr.ip)
                    found.append(getattr(address, "ipv4_mapped", None) or address)
    return found


def installed(folder: Path) -> Path:
    """Install the extra `cluster` into an environment of its own, as `make up-cluster` does; return its programs."""
    command = ["make", f"PYTHON={sys.executable}", f"VENV={folder}", str(folder / "cluster.stamp")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    return folder / "bin"
