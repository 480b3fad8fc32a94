"""One machine, everything running: `python -m deployments.local up|down|status` (`make up`, `make down`).

`up` starts the service, a Prefect server, a worker, and the bridge that makes the service's webhooks Prefect events; it
registers the flows and prints the addresses. What already runs stays. `down` ends exactly these. What the Prefect
server is set up with is in `deployments/set_up.py`. Its API answers to the worker, the bridge and whoever can read the
string in the run folder; the flows reach the service by a key with their own scopes (`deployments/flows_key.py`).
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import httpx
import typer
from pydantic import ValidationError

from deployments.background_processes import AtWork, NotStarted, ProcessFolder, answers, say
from deployments.commands import PROJECT, CommandFailed, run_module
from deployments.definitions import WORK_POOL, WORKER
from deployments.flows_key import FlowsKey
from deployments.webhook import ensure_webhook
from flows.script.local_processes import (
    closed_server,
    new_auth_string,
    prefect_variables,
    settings_at,
)
from tuneship.client import ApiError, Client, TuneshipError
from tuneship.host.durable import write_private
from tuneship.settings import (
    ClientSettings,
    LocalSettings,
    ServiceSettings,
    embedded_service_environment,
    faults_in,
    service_variables,
    written_url,
)

# In the order in which they start; they end in the other one.
NAMES = ("service", "prefect-server", "bridge", "worker")
# Flows take their service from the block, which has the newest key however long the worker runs.
BY_THE_BLOCK = {"TUNESHIP_URL": "", "TUNESHIP_API_KEY": "", "TUNESHIP_CLIENT_ID": ""}


def bridge_opened(local: LocalSettings) -> dict[str, str]:
    """The setting by which the service's webhooks may reach the bridge, and no other port of this machine.

    Every tenant may register webhooks, and other ports of this machine may answer without asking who calls.
    """
    return {"TUNESHIP_WEBHOOK_ALLOW_HTTP_HOSTS": f"127.0.0.1:{local.bridge_port}"}


class Local:
    """The processes of one machine."""

    def __init__(self, local: LocalSettings, service: ServiceSettings) -> None:
        """Prepare the processes; `up` starts them."""
        self._local = local
        self._service = service
        self._processes = ProcessFolder(local.run_dir)
        self._flows_key = FlowsKey(service.data_dir, local.run_dir / "flows-key")
        self._environment = embedded_service_environment() | {
            "PREFECT_HOME": str(local.prefect_dir),
            "DO_NOT_TRACK": "1",
        }
        # Flows, tasks and deployments need not be installed: the pipeline's processes find them in this project.
        paths = (str(PROJECT), self._environment.get("PYTHONPATH"))
        self._pipeline_path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    @property
    def prefect_url(self) -> str:
        """The Prefect server's API."""
        return f"http://127.0.0.1:{self._local.prefect_port}/api"

    @property
    def auth_file(self) -> Path:
        """The file (0600) with the string for which the Prefect server asks."""
        return self._local.run_dir / "prefect-password"

    @property
    def bridge_url(self) -> str:
        """The address to which the service sends its webhooks."""
        return f"http://127.0.0.1:{self._local.bridge_port}/"

    def up(self) -> None:
        """Start what does not run. Raises `NotStarted`, `AtWork`, `CommandFailed`, and what the client raises."""
        with self._processes.alone():
            self._refuse_another_project()
            self._refuse_taken_ports()
            self._ensure("service", self._start_service)
            client = self._client()
            # Before anything is ended: it fails beside a service of an earlier version or with other settings.
            flows = self._flows_settings(client.url)
            # Before the bridge starts: it reads the webhook's secret only then.
            self._connect_bridge(client)
            auth_string = self._auth_string()
            closed = closed_server(self.prefect_url, auth_string)
            self._ensure("prefect-server", lambda: self._start_prefect(closed))
            self._refuse_changed_string(auth_string)
            prefect = self._environment | prefect_variables(self.prefect_url, auth_string)
            # Before the worker starts: it needs its work pool.
            say("registering flows")
            # In a process of its own, because Prefect reads the environment when it is imported.
            failed = "the Prefect server could not be set up"
            run_module(failed, prefect | service_variables(flows), "deployments.set_up")
            self._flows_key.settle()
            self._ensure("bridge", lambda: self._start_bridge(prefect))
            self._ensure("worker", lambda: self._start_worker(prefect))
        self.status()

    def _refuse_another_project(self) -> None:
        """Note whose processes these are. Raises `NotStarted` while another project's run, which has other flows."""
        owner = self._local.run_dir / "project"
        other = owner.read_text().strip() if owner.is_file() else ""
        if other != str(PROJECT) and any(self._processes.running(name) for name in NAMES):
            whose = f"the project {other}" if other else "an earlier version"
            raise NotStarted(
                f"the processes of {whose} run: end them first (`down`), or give this project its own"
                " TUNESHIP_DATA_DIR, TUNESHIP_RUN_DIR, TUNESHIP_PREFECT_DIR, TUNESHIP_BRIDGE_SECRET_FILE and ports"
            )
        write_private(owner, f"{PROJECT}\n")

    def _auth_string(self) -> str:
        """Read the string for which the Prefect server asks; draw it at the first `up`, and when the file is lost.

        Raises `NotStarted` where the file holds something else.
        """
        kept = self.auth_file.read_text().strip() if self.auth_file.is_file() else ""
        if kept and ":" not in kept:
            raise NotStarted(f"{self.auth_file} needs one line of the form user:password")
        if not kept:
            # These processes use an old string or none, so they are ended before the new one is written: an `up` that
            # is killed here must not leave them running beside a file that does not fit.
            for name in ("worker", "bridge", "prefect-server"):
                if self._processes.stop(name):
                    say(f"{name} is started again, with a new string")
            kept = new_auth_string()
            write_private(self.auth_file, f"{kept}\n")
        return kept

    def _refuse_changed_string(self, auth_string: str) -> None:
        """Raises `NotStarted` where the running Prefect server asks for another string than that of the file."""
        user, _, password = auth_string.partition(":")
        version = f"{self.prefect_url}/version"
        # Whether it answers at all is seen when it is set up.
        with suppress(httpx.HTTPError):
            answer = httpx.get(version, auth=(user, password), trust_env=False, timeout=10.0)
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                raise NotStarted(
                    f"the running Prefect server asks for another string than the one in {self.auth_file}:"
                    " run `make down`, then `make up`"
                )

    def _flows_settings(self, url: str) -> ClientSettings:
        """Read the flows' settings. Raises `NotStarted` where the service's database cannot be opened."""
        try:
            return self._flows_key.settings(url)
        except typer.Exit:  # the reason has been printed
            pass
        if self._processes.running("service") is not None:
            raise NotStarted(
                "the flows' key is in the database of the running service, which has another version or other"
                " settings: run `make down`, then `make up`"
            )
        raise NotStarted(
            "the flows' key is in the database of the `tuneship serve` that already runs: start `make up` with its"
            " version and settings (TUNESHIP_DATABASE_URL, TUNESHIP_DATABASE_LISTEN_URL, TUNESHIP_MASTER_KEY_FILE)"
        )

    def _connect_bridge(self, client: ClientSettings) -> None:
        """Register the bridge's webhook. Raises `NotStarted` where a service started elsewhere may not call it."""
        try:
            is_new = ensure_webhook(client, self.bridge_url, self._local.bridge_secret_file)
        except ApiError as error:
            if error.code != "validation_error":
                raise
            [(name, value)] = bridge_opened(self._local).items()
            raise NotStarted(
                f"the `tuneship serve` that already runs may not call {self.bridge_url}: end it (a script's own"
                f" service ends with the script), or start it with {name}={value}"
            ) from None
        if is_new:  # it would check signatures with the old secret
            self._processes.stop("bridge")

    def _refuse_taken_ports(self) -> None:
        """Check all ports before anything is started. Raises `NotStarted`."""
        ports = {
            "service": (self._service.host, self._service.port, "TUNESHIP_PORT"),
            "prefect-server": ("127.0.0.1", self._local.prefect_port, "TUNESHIP_PREFECT_PORT"),
            "bridge": ("127.0.0.1", self._local.bridge_port, "TUNESHIP_BRIDGE_PORT"),
        }
        if self._processes.running("service") is None and self._is_served():
            del ports["service"]  # that service is used as it is
        for name, (host, port, setting) in ports.items():
            if self._processes.running(name) is not None:
                continue
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                socket.create_server((host, port), family=family).close()
            except OSError as error:
                why = os.strerror(error.errno or 0)
                raise NotStarted(f"port {port}: {why} ({setting} chooses another one)") from None

    def _is_served(self) -> bool:
        """Whether a service answers on the data directory, whoever started it."""
        url = written_url(self._service.data_dir)
        # The file outlives a service that was killed, so its address has to answer.
        return url is not None and answers(f"{url}/healthz")

    def _ensure(self, name: str, start: Callable[[], None]) -> None:
        if self._processes.running(name) is None:
            say(f"starting {name}")
            start()

    def _start_service(self) -> None:
        command = [sys.executable, "-m", "tuneship.cli.main", "serve"]
        service_file = self._service.data_dir / "service.json"
        if self._is_served():
            say("another `tuneship serve` on this data directory is used as it is")
            return
        # One that is left of a killed service would look like a service that is ready.
        service_file.unlink(missing_ok=True)
        environment = bridge_opened(self._local) | self._environment
        self._processes.start("service", command, environment, service_file.is_file)

    def _start_prefect(self, closed: dict[str, str]) -> None:
        # Not `prefect server start`: it would answer under any name that leads here.
        program = ("--factory", "flows.script.prefect_server:for_this_machine")
        address = ("--host", "127.0.0.1", "--port", str(self._local.prefect_port))
        self._processes.start(
            "prefect-server",
            [sys.executable, "-m", "uvicorn", *program, *address, "--log-level", "warning"],
            # The last setting saves memory in a server that is the only one of its process.
            self._environment | self._pipeline_path | closed | {"PREFECT__SERVER_FINAL": "1"},
            lambda: answers(f"{self.prefect_url}/health"),
        )

    def _start_bridge(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "deployments.bridge"]
        self._processes.start(
            "bridge",
            command,
            environment | self._pipeline_path,
            lambda: answers(self.bridge_url, 405),
        )

    def _start_worker(self, environment: dict[str, str]) -> None:
        failed = "runs of an earlier worker could not be ended"
        for line in run_module(failed, environment, "deployments.left_runs").splitlines():
            say(line)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL]
        # A worker has no address to ask; only its log says that it has started.
        log = self._processes.log("worker")
        before = log.stat().st_size if log.is_file() else 0
        own = BY_THE_BLOCK | self._pipeline_path | {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
        self._processes.start(
            "worker",
            [*command, "--name", WORKER],
            environment | own,
            lambda: b"started" in log.read_bytes()[before:].lower(),
        )

    def _client(self) -> ClientSettings:
        """Read how the service is reached. Raises `NotStarted` where its address is not written down."""
        data_dir = self._service.data_dir
        url = written_url(data_dir)
        if url is None:
            raise NotStarted(f"{data_dir / 'service.json'} does not name the service's URL")
        return settings_at(url, data_dir)

    def down(self) -> None:
        """End what `up` started, nothing else. Raises `AtWork`."""
        with self._processes.alone():
            for name in reversed(NAMES):
                say(f"{name}: {'stopped' if self._processes.stop(name) else 'was not running'}")

    def status(self) -> None:
        """Print which processes run, and their addresses."""
        if self._processes.running("service") is not None:
            say(f"service         {self._client().url}")
            say(f"credentials     {self._service.data_dir / 'credentials.json'}")
            # A service that was started elsewhere may be of another version, or have no console.
            with suppress(TuneshipError), Client(self._client()) as client:
                say(f"console         {client.sign_in_links.create().url} (once, for 10 minutes)")
        if self._processes.running("prefect-server") is not None:
            say(f"Prefect         {self.prefect_url.removesuffix('/api')}")
            say(f"sign in         with the line in {self.auth_file}")
        for name in NAMES:
            process = self._processes.running(name)
            state = f"process {process.pid}" if process else "not running"
            say(f"{name:<15} {state}, log {self._processes.log(name)}")


def main() -> NoReturn:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="deployments.local", description=__doc__)
    parser.add_argument("command", choices=("up", "down", "status"))
    chosen = parser.parse_args().command
    try:
        local = Local(LocalSettings(), ServiceSettings())
        {"up": local.up, "down": local.down, "status": local.status}[chosen]()
    except KeyboardInterrupt:
        sys.stderr.write(
            "interrupted; `make down` ends what runs, as does `python -m deployments.local down`\n"
        )
        sys.exit(130)
    except ValidationError as fault:
        sys.exit(f"a setting is not valid: {faults_in(fault)}")
    except ApiError as error:
        sys.exit(f"the service refused ({error.code}): {error.message}")
    except (NotStarted, AtWork, CommandFailed, TuneshipError) as failure:
        sys.exit(str(failure))
    except typer.Exit as said:
        sys.exit(said.exit_code)
    except OSError as fault:
        sys.exit(f"{fault.filename or 'this command'}: {fault.strerror}")
    sys.exit(0)


if __name__ == "__main__":
    main()
