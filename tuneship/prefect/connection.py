"""The client that every task uses: of the block that the task is given, else of this process.

Where the client of the process comes from: `connect(settings)` by a script that started its own service, else the
environment (`TUNESHIP_URL`, `TUNESHIP_API_KEY`, `TUNESHIP_CLIENT_ID`), else the block `tuneship-credentials/default` of
the Prefect server, else the credentials file of the local service.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_URL

from tuneship.client import Client, ServiceUnreachable, base_url
from tuneship.prefect.calls import CALL_DEADLINE_S
from tuneship.prefect.credentials import TuneshipCredentials
from tuneship.settings import ClientSettings, PipelineSettings, written_url

# For an upload: 20 GB at 1 MB/s.
UPLOAD_DEADLINE_S = 6 * 3600.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class _Connection:
    client: Client
    service: str


_connected: list[_Connection] = []
_before_disconnect: list[Callable[[], None]] = []


def before_disconnect(end: Callable[[], None]) -> Callable[[], None]:
    """Call `end`, which is returned, before the client of this process is closed.

    It ends a thread that uses the client: a connection that the thread is opening at that moment would stay open.
    """
    _before_disconnect.append(end)
    return end


def connect(settings: ClientSettings, client: Client | None = None) -> None:
    """Use this service from now on in this process; `client` is used instead of a new one."""
    disconnect()
    name = address = one_address(settings.url)
    # A service elsewhere keeps its address as its name, because other hosts do not have its data directory.
    if urlsplit(address).hostname in LOOPBACK:
        data_dir = PipelineSettings().data_dir.expanduser().resolve()
        written = written_url(data_dir)
        if written is not None and one_address(written) == address:
            name = str(data_dir)
    _connected.append(_Connection(client or Client(settings), name))


def disconnect() -> None:
    """Forget the service; the next task reads the environment again."""
    for end in _before_disconnect if _connected else ():
        end()
    while _connected:
        _connected.pop().client.close()


def api(deadline_s: float = CALL_DEADLINE_S) -> Client:
    """The client of this process, with a deadline this many seconds from now for all its calls.

    Past it a call raises `DeadlineExceeded`. Raises `ServiceUnreachable` when nothing says where the service is.
    """
    return _connection().client.with_options(ends_at=time.monotonic() + deadline_s)


def open_client() -> Client | None:
    """The client that this process works with by now; unlike `api` it looks for no service."""
    return _connected[0].client if _connected else None


@contextmanager
def connected(credentials: TuneshipCredentials | None) -> Generator[Callable[[], Client]]:
    """Yield a function that makes a client with a fresh deadline; without `credentials`, of this process's service."""
    if credentials is None:
        yield api
        return
    with credentials.get_client() as client:
        yield lambda: client.with_options(ends_at=time.monotonic() + CALL_DEADLINE_S)


def service_name() -> str:
    """The name of this service in the pipeline's records, which survives restarts. Raises like `api`.

    The service of this host's data directory is named after the directory, because one that a script starts takes
    another port each time; any other service is named by its address.
    """
    return _connection().service


def one_address(url: str) -> str:
    """The same spelling for all ways to write an address: `localhost`, `/v1`, a default port, a slash, upper case."""
    try:
        parts = urlsplit(base_url(url))
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # not an address; the first call will say so
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


def settings_from_surroundings() -> ClientSettings:
    """Settings from the first place that names a service, in the order above. Raises `ServiceUnreachable`."""
    settings = ClientSettings()
    if settings.url:
        return settings
    block: Any = None
    if PREFECT_API_URL.value():
        with suppress(ValueError):  # Prefect raises it for a block that does not exist
            block = TuneshipCredentials.load("default", validate=False)
    if block is not None:
        return block.client_settings()
    credentials = PipelineSettings().data_dir / "credentials.json"
    if not credentials.is_file():
        raise ServiceUnreachable(
            "no service is known: set TUNESHIP_URL, TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID,"
            " or start one with `tuneship serve`",
            retryable=False,
        )
    return ClientSettings.from_credentials(credentials)
