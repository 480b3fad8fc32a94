"""Settings, built once in a composition root (`cli.py`, `tasks/api.py`) and passed on as arguments.

The only module that reads the environment (prefix `TUNESHIP_`). Every setting has a default: `tuneship serve` and the
flows work without any configuration.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

HOME = Path("~/.tuneship").expanduser()
WORKER_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "HF_HOME",
    "HF_HUB_CACHE",
    "CUDA_VISIBLE_DEVICES",
    "SYSTEMROOT",
)
"""What a worker process may see of the environment: no database address, no key."""


class ServiceSettings(BaseSettings):
    """What `tuneship serve` runs with."""

    model_config = SettingsConfigDict(env_prefix="TUNESHIP_", extra="ignore")

    data_dir: Path = HOME / "data"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0 takes a free port.")] = 8700
    public_url: str | None = Field(
        default=None, description="Base of the URLs in answers; default: host and port."
    )
    database_url: SecretStr | None = Field(
        default=None, description="SQLAlchemy URL; default: SQLite in the data directory."
    )
    model_catalogue: Path | None = Field(
        default=None, description="YAML file that lists further base models."
    )
    allow_fault_injection: bool = False
    control_requests_per_minute: Annotated[int, Field(ge=0)] = 600
    generate_requests_per_minute: Annotated[int, Field(ge=0)] = 1200
    generate_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    maximum_active_jobs: Annotated[int, Field(ge=1)] = 10
    maximum_deployments: Annotated[int, Field(ge=1)] = 50
    maximum_datasets: Annotated[int, Field(ge=1)] = 1000
    maximum_dataset_bytes: Annotated[int, Field(ge=1)] = 50 << 30
    concurrent_jobs: Annotated[
        int, Field(ge=1, description="Training processes at the same time.")
    ] = 1
    replica_processes: Annotated[
        int, Field(ge=1, description="Serving processes of one base model at most.")
    ] = 4
    preload_base_models: bool = Field(
        default=True, description="Load the shipped base model when the service starts."
    )


class ClientSettings(BaseSettings):
    """How the client reaches a service."""

    model_config = SettingsConfigDict(env_prefix="TUNESHIP_", extra="ignore")

    url: str = ""
    api_key: SecretStr = SecretStr("")
    client_id: str = ""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    read_timeout_s: Annotated[float, Field(gt=0)] = 150.0
    tries: Annotated[int, Field(ge=1, le=20)] = 2

    @classmethod
    def from_credentials(cls, file: Path) -> "ClientSettings":
        """Read the file that a service wrote at its first start (`<data_dir>/credentials.json`)."""
        fields = json.loads(file.read_text())
        return cls(url=fields["base_url"], api_key=fields["api_key"], client_id=fields["client_id"])


class PipelineSettings(BaseSettings):
    """Where the flows keep what must survive them."""

    model_config = SettingsConfigDict(env_prefix="TUNESHIP_", extra="ignore")

    records: Path = Field(
        default=HOME / "records", description="Roll-out records; workers and guard share it."
    )
    reports: Path = Field(default=HOME / "reports", description="Markdown reports and plots.")
    data_dir: Path = HOME / "data"
    log_file: Path | None = Field(
        default=None, description="Where the embedded service logs; default: in its data directory."
    )


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The minimal environment of a worker process, plus `extra`."""
    kept = {name: os.environ[name] for name in WORKER_ENVIRONMENT if name in os.environ}
    return {**kept, **extra}


def embedded_service_environment() -> dict[str, str]:
    """The environment of a service that a script starts for itself: its own, unchanged."""
    return dict(os.environ)


def refuse_telemetry() -> None:
    """Tell Prefect and others to report nothing home. Prefect looks at its first import, so a script says it before."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
