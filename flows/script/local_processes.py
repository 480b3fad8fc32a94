"""The processes that a plain script starts for itself: a service and a Prefect server.

Both run in a session of their own, so that Ctrl-C in the terminal reaches the script alone, which needs them until its
clean-up is done. Next: `flows/script/main.py`.
"""

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prefect.exceptions import PrefectHTTPStatusError

from flows.shared.signals import uninterrupted
from tuneship.client import ApiError, Client, ServiceUnreachable
from tuneship.host.process_start import still_runs
from tuneship.settings import (
    ClientSettings,
    PipelineSettings,
    embedded_service_environment,
    written_url,
)

PREFECT_PROGRAM = Path(__file__).with_name("prefect_server.py")
READY_WITHIN_S = 120.0
STOP_WITHIN_S = 40.0
# Exit code of `tuneship serve` when another one holds the data directory.
ALREADY_RUNNING = 6


# Settings of every Prefect server started here: no telemetry, and batch sizes at which SQLite does not answer 503.
PREFECT_SERVER = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
}

REFUSED_BY_PREFECT = (
    "the Prefect server of PREFECT_API_URL asks for its string: set PREFECT_API_AUTH_STRING to it"
    " (that of `make up` is in prefect-password in TUNESHIP_RUN_DIR, else in ~/.tuneship/run)"
)


def is_refused(failure: BaseException) -> bool:
    """Whether a Prefect server refused the caller's password, or asked for one."""
    unauthorized = httpx.codes.UNAUTHORIZED.value
    return (
        isinstance(failure, PrefectHTTPStatusError) and failure.response.status_code == unauthorized
    )


def new_auth_string() -> str:
    """Draw the user and password of a Prefect server, in the form of its setting."""
    return f"tuneship:{secrets.token_urlsafe(32)}"


def closed_server(url: str, auth_string: str) -> dict[str, str]:
    """Settings of a Prefect server whose API, at `url`, answers only callers with this password."""
    page = url.removesuffix("/api")
    return PREFECT_SERVER | {
        "PREFECT_SERVER_API_AUTH_STRING": auth_string,
        # Prefect's default lets the pages of every site read its answers.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"{page},{page.replace('127.0.0.1', 'localhost')}",
        # The UI's pages ask the API at this address; its default is another port.
        "PREFECT_SERVER_UI_API_URL": url,
    }


def prefect_variables(url: str, auth_string: str) -> dict[str, str]:
    """The environment variables with which another process reaches such a server."""
    return {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": auth_string}


class CompanionFailed(Exception):
    """A process that the script needs did not become ready; the message has its last line."""


@contextmanager
def embedded_service(
    settings: PipelineSettings, environment: Mapping[str, str] | None = None
) -> Generator[ClientSettings]:
    """Start `tuneship serve` on the pipeline's data directory, or use the one that already runs there.

    A service that is ending, such as that of a killed script, is waited for. Raises `CompanionFailed`.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log = settings.log_file or settings.data_dir / "service.log"
    end, reached = time.monotonic() + READY_WITHIN_S, None
    with ExitStack() as started:
        while reached is None:
            url = started.enter_context(_service_process(settings, environment, log))
            reached = (
                settings_at(url, settings.data_dir)
                if url
                else _reach_running(settings.data_dir, end)
            )
        yield reached


@contextmanager
def _service_process(
    settings: PipelineSettings, environment: Mapping[str, str] | None, log: Path
) -> Generator[str | None]:
    """Run a service while the block runs; yields its address, or None when another one holds the directory."""
    serve = [sys.executable, "-m", "tuneship.cli.main", "serve"]
    with log.open("ab") as output:
        service = subprocess.Popen(  # noqa: S603 - our own program
            [*serve, "--port", "0", "--die-with-parent", "--data-dir", str(settings.data_dir)],
            stdout=subprocess.PIPE,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=dict(environment or embedded_service_environment()),
            start_new_session=True,
            text=True,
        )
    with _terminated_at_exit(service):
        # This returns at the latest when the process ends, then with an empty line.
        line = service.stdout.readline() if service.stdout else ""
        if line.startswith("ready "):
            yield line.split()[1]
            return
        code = service.wait(READY_WITHIN_S)
        if code != ALREADY_RUNNING:
            lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            last_line = lines[-1] if lines else "no message"
            raise CompanionFailed(
                f"the embedded service ended with code {code}: {last_line} (log: {log})"
            )
        yield None


def running_service(data_dir: Path) -> ClientSettings | None:
    """Reach the service that runs on this directory; None where none runs, or it is ending."""
    try:
        written: Any = json.loads((data_dir / "service.json").read_text())
        # Another program may have taken the port since: it must not be sent the key.
        if not still_runs(written):
            return None
        return _reach_running(data_dir, time.monotonic() + READY_WITHIN_S)
    except (OSError, ValueError, AttributeError, CompanionFailed):
        return None


def _reach_running(data_dir: Path, end: float) -> ClientSettings | None:
    """Reach the service that holds this directory; None, after a pause, where it does not answer and may be ending."""
    url = written_url(data_dir)
    if url is None:
        raise CompanionFailed(
            f"another service holds {data_dir}, and its service.json does not name its URL"
        )
    settings = settings_at(url, data_dir)
    try:
        with Client(settings) as client:
            client.with_options(tries=1).models.list(limit=1)
    except ServiceUnreachable as error:
        # A certificate that is not trusted, for example, is reported by the run's own first call.
        is_ending = error.retryable
    except ApiError as error:
        # A service that is ending answers 503 to everything, and then nothing.
        is_ending = error.status == httpx.codes.SERVICE_UNAVAILABLE.value
    else:
        is_ending = False
    if not is_ending:
        return settings
    if time.monotonic() > end:
        raise CompanionFailed(f"another service holds {data_dir}, and does not answer at {url}")
    time.sleep(0.5)
    return None


def settings_at(url: str, data_dir: Path) -> ClientSettings:
    """The client settings for the service of a data directory at this address."""
    credentials = ClientSettings.from_credentials(data_dir / "credentials.json")
    return credentials.model_copy(update={"url": url})


@contextmanager
def prefect_server(environment: Mapping[str, str], log: Path) -> Generator[dict[str, str]]:
    """Run a Prefect server on a free port of this machine; yields the environment variables that its clients need."""
    auth_string = new_auth_string()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        url = f"http://127.0.0.1:{port}/api"
        listener.set_inheritable(True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            server = subprocess.Popen(  # noqa: S603 - our own program
                # By its path: `-m` would search this project in the working directory, which may be any.
                [sys.executable, "-P", str(PREFECT_PROGRAM), str(listener.fileno())],
                stdout=output,
                stderr=output,
                stdin=subprocess.PIPE,  # the server ends when this pipe closes
                env={**environment, **closed_server(url, auth_string)},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
    with _terminated_at_exit(server):
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            if server.poll() is not None or time.monotonic() > deadline:
                raise CompanionFailed(f"the Prefect server did not start (log: {log})")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False, timeout=5.0).is_success:
                    break
            time.sleep(0.1)
        yield prefect_variables(url, auth_string)


@contextmanager
def _terminated_at_exit(process: "subprocess.Popen[Any]") -> Generator[None]:
    """Send SIGTERM at the end, and SIGKILL if that takes too long; a second Ctrl-C does not interrupt this."""
    try:
        yield
    finally:
        with uninterrupted():
            process.terminate()
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
