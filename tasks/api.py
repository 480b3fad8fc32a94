"""The client that every task uses, and which of its errors Prefect should try again.

Where the client comes from: `connect(settings)` by a script that started its own service, else the environment
(`TUNESHIP_URL`, `TUNESHIP_API_KEY`, `TUNESHIP_CLIENT_ID`), else the block `tuneship-credentials/default` of the Prefect
server, else the credentials file of the local service.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.settings import PREFECT_API_URL
from prefect.tasks import exponential_backoff

from tasks.credentials import TuneshipCredentials
from tuneship.client import (
    ApiError,
    Client,
    DeadlineExceeded,
    ServiceUnreachable,
    TuneshipError,
    base_url,
)
from tuneship.settings import ClientSettings, PipelineSettings

# Of each try of a task, all its requests, pages and pauses together: the longest `Retry-After`
# (300 s) and two slow answers fit in. Kept by the client: Prefect's `timeout_seconds` stops a
# synchronous task in the main thread only, by an alarm that cuts whatever runs, and its error
# does not say that the service may have obeyed.
CALL_DEADLINE_S = 900.0
# Of a file on its way: 20 GB at 1 MB/s.
UPLOAD_DEADLINE_S = 6 * 3600.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class _Connection:
    client: Client
    service: str
    address: str


_connected: list[_Connection] = []


def connect(settings: ClientSettings, client: Client | None = None) -> None:
    """Use this service from now on in this process; `client`: one that the caller has built for it."""
    disconnect()
    address = one_address(settings.url)
    _connected.append(_Connection(client or Client(settings), _name_of(address), address))


def disconnect() -> None:
    """Forget the service; the next task reads the environment again."""
    while _connected:
        _connected.pop().client.close()


def api(deadline_s: float = CALL_DEADLINE_S) -> Client:
    """The client of this process, for one piece of work that must have its answers within so many seconds from now.

    Past it a call raises `DeadlineExceeded`. Raises `ServiceUnreachable` when nothing says where the service is.
    """
    return _connection().client.with_options(ends_at=time.monotonic() + deadline_s)


def service_name() -> str:
    """What the pipeline's records call this service; a name that its next start does not change. Raises like `api`.

    The service of this host's data directory has the directory's name, because a script's own one takes another port
    each time; every other service has its address.
    """
    return _connection().service


def service_address() -> str:
    """The address of this service, in its one spelling. Raises like `api`."""
    return _connection().address


def is_this_service(recorded: object) -> bool:
    """Whether a record's name of a service means this one; earlier releases wrote the address as it was typed."""
    named = str(recorded)
    return service_name() == (one_address(named) if is_address(named) else named)


def is_address(service: str) -> bool:
    """Whether a service's name is its address, or else its data directory."""
    return service.lower().startswith(("http://", "https://"))


def one_address(url: str) -> str:
    """One spelling for every way to write an address: `localhost`, `/v1`, a default port, a slash, upper case."""
    try:
        parts = urlsplit(base_url(url))
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # no address at all, as the first call will say
        return url
    if not host:
        return url
    host = LOOPBACK[0] if host in LOOPBACK else host
    at = f"[{host}]" if ":" in host else host
    if port not in (None, DEFAULT_PORTS.get(parts.scheme)):
        at = f"{at}:{port}"
    return f"{parts.scheme}://{at}{parts.path.rstrip('/')}"


def _connection() -> _Connection:
    if not _connected:
        connect(settings_from_surroundings())
    return _connected[0]


def _name_of(address: str) -> str:
    data_dir = PipelineSettings().data_dir.expanduser().resolve()
    if urlsplit(address).hostname not in LOOPBACK:
        return address  # known by itself, also to hosts without this data directory
    try:
        place = json.loads((data_dir / "service.json").read_text())
    except (OSError, ValueError):  # none has run there
        return address
    return str(data_dir) if one_address(str(place.get("url"))) == address else address


def settings_from_surroundings() -> ClientSettings:
    """The first place that knows a service. Raises `ServiceUnreachable`."""
    settings = ClientSettings()
    if settings.url:
        return settings
    stored = _stored_in_prefect()
    if stored is not None:
        return stored
    credentials = PipelineSettings().data_dir / "credentials.json"
    if not credentials.is_file():
        raise ServiceUnreachable(
            "no service is known: set TUNESHIP_URL, TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID,"
            " or start one with `tuneship serve`",
            retryable=False,
        )
    return ClientSettings.from_credentials(credentials)


def _stored_in_prefect() -> ClientSettings | None:
    """The block's credentials; none without a Prefect server, or where nobody has stored any."""
    if not PREFECT_API_URL.value():
        return None
    try:
        block: Any = TuneshipCredentials.load("default", validate=False)
    except ValueError:  # Prefect's word for a block that does not exist
        return None
    return block.client_settings()


def transient(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition: only what the service says is worth another try, or no whole answer at all.

    Prefect fixes its pauses before the run, so what the answer asks for (`Retry-After`) is waited for here.
    """
    try:
        state.result()
    except DeadlineExceeded:
        return False
    except ApiError as error:
        if error.retryable and error.retry_after:
            time.sleep(error.retry_after)
        return error.retryable
    except TuneshipError as error:
        return error.retryable
    except Exception:  # noqa: BLE001 - any other error is a fault of the flow, never worth a retry
        return False
    return False


# Options of every task that calls the service: 3 tries of 2 requests each, with jitter.
RETRIES: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": exponential_backoff(backoff_factor=0.5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": transient,
}
# Of each request of a task that waits: it is not repeated as a whole, so its client tries as
# often as the others.
POLL_TRIES = 6


def idempotency_key(run_key: str, step: str, content: Any = None) -> str:
    """One key for one create of one run: the same again after a crash, so the service makes it once."""
    text = json.dumps([run_key, step, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
