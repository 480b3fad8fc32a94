"""The client that every task uses, and which of its errors Prefect should try again.

Where the client comes from: `connect(settings)` by a script that started its own service, else the environment
(`TUNESHIP_URL`, `TUNESHIP_API_KEY`, `TUNESHIP_CLIENT_ID`), else the credentials file of the local service.
"""

import hashlib
import json
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from tuneship.client import ApiError, BadResponse, Client, ServiceUnreachable
from tuneship.settings import ClientSettings, PipelineSettings

_connected: list[Client] = []


def connect(settings: ClientSettings) -> None:
    """Use this service from now on in this process."""
    disconnect()
    _connected.append(Client(settings))


def disconnect() -> None:
    """Forget the service; the next task reads the environment again."""
    while _connected:
        _connected.pop().close()


def api() -> Client:
    """The client of this process. Raises `ServiceUnreachable` when nothing says where the service is."""
    if not _connected:
        connect(_settings_from_surroundings())
    return _connected[0]


def _settings_from_surroundings() -> ClientSettings:
    settings = ClientSettings()
    if settings.url:
        return settings
    credentials = PipelineSettings().data_dir / "credentials.json"
    if not credentials.is_file():
        raise ServiceUnreachable(
            "no service is known: set TUNESHIP_URL, TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID,"
            " or start one with `tuneship serve`"
        )
    return ClientSettings.from_credentials(credentials)


def transient(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition: only what the service says is worth another try, or no answer at all."""
    try:
        state.result()
    except ApiError as error:
        return error.retryable
    except ServiceUnreachable:
        return True
    except BadResponse:
        return False
    except Exception:  # noqa: BLE001 - any other error is a fault of the flow, never worth a retry
        return False
    return False


RETRIES: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": exponential_backoff(backoff_factor=0.5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": transient,
}
"""Options of every task that calls the service: 3 tries of 2 requests each, with jitter."""


def idempotency_key(run_key: str, step: str, content: Any = None) -> str:
    """One key for one create of one run: the same again after a crash, so the service makes it once."""
    text = json.dumps([run_key, step, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
