"""Settings, built once in a composition root (`cli/main.py`, `prefect/connection.py`) and passed on as arguments.

The only module that reads the environment (prefix `TUNESHIP_`). Every setting has a default: `tuneship serve` and the
flows work without any configuration.
"""

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

HOME = Path("~/.tuneship").expanduser()
CLUSTER_NOTICE_S = 5.0
# The fields that answers have: those of the full reference, of the short one (§4.9), or both.
ApiProfile = Literal["full", "simplified", "auto"]


def _split_list(value: object) -> object:
    """Split `a, b` from the environment into a list."""
    if not isinstance(value, str):
        return value
    return [item.strip() for item in value.split(",") if item.strip()]


def _split_command(value: object) -> object:
    """Split a command from the environment as a shell does."""
    return shlex.split(value) if isinstance(value, str) else value


Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(_split_list)]
Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Command = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_command)]
# The variables that worker processes get: no database address and no key.
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
    "CUDA_DEVICE_ORDER",
    "SYSTEMROOT",
)


class _Settings(BaseSettings):
    """Settings that the environment may give."""

    model_config = SettingsConfigDict(
        env_prefix="TUNESHIP_", extra="ignore", validate_by_name=True, validate_by_alias=True
    )


class AddressSettings(_Settings):
    """Addresses to listen on, and those that may connect."""

    host: str = Field(default="127.0.0.1", description="The address to listen on; 0.0.0.0: all.")
    port: Annotated[int, Field(ge=0, le=65535, description="0 takes a free port.")] = 8700
    public_url: str | None = Field(
        default=None, description="Base of the URLs in answers; default: host and port."
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file of the certificate and its chain; with it only TLS is spoken.",
    )
    tls_key: Path | None = Field(default=None, description="PEM file of the certificate's key.")
    trusted_proxies: Networks = Field(
        default=(), description="Proxies whose X-Forwarded-For is believed, as networks."
    )
    maximum_connections: Annotated[int, Field(ge=16)] | None = Field(
        default=None,
        description="Open connections at the same time; default: what the limit of open files allows, 4096 at most.",
    )
    private_networks: Networks = Field(
        default=(IPv4Network("127.0.0.0/8"), IPv6Network("::1/128")),
        description="Who reaches deployments with `private_endpoints`.",
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        return self


class FileSettings(_Settings):
    """Files and folders of the service, and the room for them."""

    data_dir: Path = Field(
        default=HOME / "data", description="The service's database, keys, datasets and models."
    )
    master_key_file: Path | None = Field(
        default=None,
        description="The secret that all others come from, made at the first start; default: `master.key` in the data "
        "directory. Elsewhere, a copy of the data directory opens nothing.",
    )
    blob_url: str = Field(
        default="",
        description="Where datasets and models are kept, e.g. `s3://bucket/prefix`; default: the data directory. "
        "Credentials come from the cloud's own variables (AWS_ACCESS_KEY_ID, ...).",
    )
    blob_cache_bytes: Annotated[
        int,
        Field(
            ge=1, description="Local copies of files that are kept in a bucket; files in use stay."
        ),
    ] = 20 << 30
    minimum_free_disk_bytes: Annotated[
        int, Field(ge=0, description="Below this, or the share, uploads are refused (503).")
    ] = 2 << 30
    minimum_free_disk_share: Annotated[
        float, Field(ge=0, lt=1, description="The same as a share of the disk.")
    ] = 0.05
    audit_heads: Path | None = Field(
        default=None,
        description="File of the audit chain's signed heads; default: in the data directory. Elsewhere is safer.",
    )

    @property
    def master_key(self) -> Path:
        """The path of the master key."""
        return self.master_key_file or self.data_dir / "master.key"

    @model_validator(mode="after")
    def _check_blob_url(self) -> Self:
        # Messages and logs name the URL, so it must hold nothing that opens the bucket. The texts do not repeat it.
        place = urlsplit(self.blob_url)
        if "@" in place.netloc or place.query or place.fragment:
            raise ValueError(
                "blob_url must be a bucket and a prefix only: give credentials in the cloud's own variables"
            )
        if self.blob_url and (place.scheme not in ("s3", "gs", "az") or not place.netloc):
            raise ValueError("blob_url must begin with s3://, gs:// or az:// and name a bucket")
        return self


class DatabaseSettings(_Settings):
    """The database, and the connections to it."""

    database_url: SecretStr | None = Field(
        default=None, description="SQLAlchemy URL; default: SQLite in the data directory."
    )
    database_listen_url: SecretStr | None = Field(
        default=None,
        description="The same Postgres without the pooler that database_url leads through, for the connections that "
        "need a session: messages between members, and the lock of a service on its database.",
    )
    database_connections: Annotated[
        int,
        Field(
            ge=8,
            le=1000,
            description="Connections to Postgres at the same time; urgent work, messages between members and the lock "
            "have up to 11 more.",
        ),
    ] = 72

    @property
    def listen_url(self) -> str | None:
        """The URL of the database that bypasses a pooler; None without one."""
        url = self.database_listen_url
        return url.get_secret_value() if url else None

    @model_validator(mode="after")
    def _check_listen_url(self) -> Self:
        if self.database_listen_url is None:
            return self
        for name in ("database_listen_url", "database_url"):
            url: SecretStr | None = getattr(self, name)
            if url is None or not url.get_secret_value().startswith("postgresql"):
                raise ValueError(
                    f"database_listen_url is for a Postgres, and {name} does not begin with postgresql"
                )
        return self


class CatalogueSettings(_Settings):
    """The offered models and machines, in addition to the shipped ones."""

    model_catalogue: Path | None = Field(
        default=None, description="YAML file (models.yaml) that lists further base models."
    )
    instance_catalogue: Path | None = Field(
        default=None, description="YAML file that lists further instance types and regions."
    )


class ApiSettings(_Settings):
    """The offer of the APIs, and the form of their answers."""

    api_profile: ApiProfile = Field(
        default="auto",
        description="Form of the answers: `full`, `simplified`, or by what a request looks like.",
    )
    client_profiles: dict[str, ApiProfile] = Field(
        default_factory=dict[str, ApiProfile],
        description="Profiles of single clients, by client id (JSON).",
    )
    created_status: Literal[200, 201] = Field(
        default=201, description="Status of every create; 200 for clients that test for it."
    )
    openai: bool = Field(
        default=True,
        description="Offer OpenAI's API below `/openai/v1`, with the keys of this service.",
    )
    openai_serve: Literal["own", "never"] = Field(
        default="own",
        description="`own`: a model that no deployment serves gets one that sleeps when it is idle, when OpenAI's API "
        "is asked for it; `never`: it has to be deployed.",
    )
    export_hipaa_models: bool = Field(
        default=False,
        description="Let models that were trained in hipaa mode be exported, by the API and the command.",
    )
    allow_fault_injection: bool = Field(
        default=False,
        description="Let tags of a deployment make it slow or faulty, for drills. Not for production.",
    )


class ConsoleSettings(_Settings):
    """The pages for people, below `/console`."""

    console: bool = Field(default=True, description="Offer the console below `/console`.")
    console_idle_minutes: Annotated[int, Field(ge=1, le=15)] = Field(
        default=15, description="Minutes without any use after which a person is signed out."
    )
    console_hours: Annotated[int, Field(ge=1, le=24)] = Field(
        default=12, description="Hours after which a person has to sign in again."
    )
    console_plaintext: bool = Field(
        default=False,
        description="Let people sign in over plain HTTP from other machines: for a trial behind a balancer that speaks "
        "no TLS.",
    )
    four_eyes: bool = Field(
        default=False,
        description="Nobody may promote a release by a key that announced it or sent its lines, nor by another key of "
        "the same person or label. In hipaa mode always.",
    )
    oidc_issuer: str = Field(
        default="",
        description="A provider of OpenID Connect with which people sign in to the console, e.g. "
        "`https://login.example.org/realms/clinic`; as the provider writes it. Default: none.",
    )
    oidc_client_id: str = Field(
        default="", description="The name under which the provider knows this service."
    )
    oidc_client_secret_file: Path | None = Field(
        default=None,
        description="File with the secret that the provider gave this service; default: a client without a secret.",
    )
    oidc_groups_file: Path | None = Field(
        default=None,
        description="YAML file that says which tenant and scopes the groups of the provider have here "
        "(docs/console.md).",
    )
    oidc_groups_claim: str = Field(
        default="groups", min_length=1, description="The claim that holds a person's groups."
    )
    oidc_scopes: Hosts = Field(
        default=("profile",),
        description="Scopes that the provider is asked for, beside `openid`, separated by commas.",
    )
    oidc_ca_file: Path | None = Field(
        default=None,
        description="PEM file of the authority that signed the provider's certificate.",
    )

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        if not self.oidc_issuer:
            given = (self.oidc_client_secret_file, self.oidc_groups_file, self.oidc_ca_file)
            if self.oidc_client_id or any(given):
                raise ValueError("oidc_client_id and the other settings of it need oidc_issuer")
            return self
        place = urlsplit(self.oidc_issuer)
        is_here = place.scheme == "http" and place.hostname in LOOPBACK
        if not (place.scheme == "https" or is_here) or not place.hostname:
            raise ValueError("oidc_issuer must begin with https:// and name a host")
        if "@" in place.netloc or place.query or place.fragment:
            raise ValueError("oidc_issuer must be an address only")
        if not self.console:
            raise ValueError("oidc_issuer needs the console")
        if not self.oidc_client_id or self.oidc_groups_file is None:
            raise ValueError("oidc_issuer needs oidc_client_id and oidc_groups_file")
        return self


class LimitSettings(_Settings):
    """Limits of one tenant."""

    control_requests_per_minute: Annotated[
        int,
        Field(ge=0, description="Requests of all kinds but generations, in a minute; 0: no limit."),
    ] = 600
    generate_requests_per_minute: Annotated[
        int, Field(ge=0, description="Generations in a minute; 0: no limit.")
    ] = 1200
    generate_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds after which a generation is ended.")
    ] = 120.0
    maximum_active_jobs: Annotated[
        int, Field(ge=1, description="Jobs that are queued or train.")
    ] = 10
    maximum_active_batches: Annotated[
        int, Field(ge=1, description="Batches that are not done.")
    ] = 20
    maximum_active_evaluations: Annotated[
        int, Field(ge=1, description="Evaluations that are not done.")
    ] = 4
    maximum_deployments: Annotated[
        int, Field(ge=1, description="Deployments that are not deleted.")
    ] = 50
    maximum_endpoints: Annotated[int, Field(ge=1, description="Canary endpoints included.")] = 500
    maximum_datasets: Annotated[int, Field(ge=1, description="Datasets.")] = 1000
    maximum_dataset_bytes: Annotated[
        int,
        Field(
            ge=1, description="Files of batches, imported models and unfinished uploads included."
        ),
    ] = 50 << 30
    inline_dataset_bytes: Annotated[
        int, Field(ge=0, description="Bigger files are checked after their upload is answered.")
    ] = 64 << 20
    maximum_webhooks: Annotated[int, Field(ge=1, description="Receivers of events.")] = 20


class WebhookSettings(_Settings):
    """The receivers of webhooks that may be called."""

    webhook_allow_cidrs: Networks = Field(
        default=(), description="Private networks whose webhook receivers may be called."
    )
    webhook_allow_http_hosts: Hosts = Field(
        default=(),
        description="Webhook receivers that may be called without TLS: `host` at any port, where its address is "
        "allowed as well, or `host:port`, which opens that receiver alone, also on a private address.",
    )


class TrainingSettings(_Settings):
    """The processes that train."""

    concurrent_jobs: Annotated[
        int, Field(ge=1, description="Training processes at the same time.")
    ] = 1
    training_devices: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Devices that a job learns on, each with a process: GPUs where there are any, else the "
            "processor's cores. On GPUs, isolated jobs need 1.",
        ),
    ] = 1
    preload_training: bool = Field(
        default=True,
        description="Load the libraries of trainings before the first job, which begins seconds earlier.",
    )


class ReplicaSettings(_Settings):
    """The processes that serve models."""

    preload_base_models: bool = Field(
        default=True, description="Load the shipped base model when the service starts."
    )
    replica_processes: Annotated[
        int, Field(ge=1, description="Serving processes of one base model at most.")
    ] = 4
    replica_cache_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Memory of one serving process for the texts that it works on (keys and values); "
            "0 takes its share of what is free when it starts.",
        ),
    ] = 0
    auto_scaling_queue_s: Annotated[
        float, Field(gt=0, description="A request that waits so long brings another replica.")
    ] = 1.0
    auto_scaling_idle_s: Annotated[
        float, Field(gt=0, description="A replica that is not needed for this long is ended.")
    ] = 300.0
    vllm_command: Annotated[
        Command,
        Field(
            min_length=1,
            description="Starts vLLM for base models with `runtime: vllm` in models.yaml.",
        ),
    ] = ("vllm", "serve")
    vllm_start_timeout_s: Annotated[
        float, Field(gt=0, le=900, description="Until a vLLM server must be ready.")
    ] = 600.0


class AgentSettings(_Settings):
    """The agents that run replicas and trainings, and the Ray clusters that start them."""

    agents: Literal["none", "local", "ray"] = Field(
        default="none",
        description="Where replicas of the built-in engine and trainings run: `none`, as processes of the service; "
        "`local`, by agents on this machine; `ray`, by agents on the nodes of a Ray cluster.",
    )
    ray_urls: Hosts = Field(
        default=(),
        description="Dashboards of Ray clusters, e.g. `https://head:8265`. Agents start on the first; those that an "
        "earlier service has left on any of them are ended.",
    )
    ray_token_file: Path | None = Field(
        default=None, description="File with the token of the clusters, which must require one."
    )
    ray_ca_file: Path | None = Field(
        default=None,
        description="PEM file of the authority that signed the dashboards' certificates.",
    )
    ray_plaintext: bool = Field(
        default=False,
        description="Send the token over http to another machine: for a private network only.",
    )
    agent_command: Annotated[
        Command, Field(min_length=1, description="Starts an agent on a node of a Ray cluster.")
    ] = ("python", "-m", "tuneship.agents.agent")
    agent_ports: Annotated[
        str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$", description="On which agents of Ray listen.")
    ] = "20000-20999"
    agent_cpus: Annotated[
        float, Field(gt=0, le=4096, description="Cores that Ray sets aside for one agent.")
    ] = 1.0
    agent_gpus: Annotated[
        float, Field(ge=0, le=64, description="GPUs that Ray sets aside for one agent.")
    ] = 0.0
    agent_memory_bytes: Annotated[
        int, Field(ge=0, description="Memory that Ray sets aside for one agent; 0: none.")
    ] = 0
    agent_start_timeout_s: Annotated[
        float, Field(gt=0, le=900, description="Until an agent must listen on a node.")
    ] = 120.0

    @model_validator(mode="after")
    def _check_ray(self) -> Self:
        if self.agents != "ray":
            given = (self.ray_urls, self.ray_token_file, self.ray_ca_file)
            if any(given) or self.ray_plaintext:
                raise ValueError("ray_urls and the other settings of Ray need agents=ray")
            return self
        if not self.ray_urls or self.ray_token_file is None:
            raise ValueError("agents=ray needs ray_urls and ray_token_file")
        for url in self.ray_urls:
            place = urlsplit(url)
            if place.scheme not in ("http", "https") or not place.hostname:
                raise ValueError("ray_urls must begin with http:// or https:// and name a host")
            # Logs name the addresses.
            if "@" in place.netloc or place.query or place.fragment:
                raise ValueError("ray_urls must be addresses only: the token belongs into a file")
            is_open = place.scheme == "http" and place.hostname not in LOOPBACK
            if is_open and not self.ray_plaintext:
                raise ValueError(
                    "ray_urls must begin with https://, or ray_plaintext allow the token to be read on the way"
                )
        return self


class TracingSettings(_Settings):
    """The collector of spans."""

    otlp_endpoint: str = Field(
        default="",
        validation_alias=AliasChoices("TUNESHIP_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        description="An OpenTelemetry collector that takes OTLP over HTTP, e.g. `http://127.0.0.1:4318`: spans of "
        "requests and jobs are sent there. Also OTEL_EXPORTER_OTLP_ENDPOINT. Needs `tuneship[otel]`.",
    )

    @model_validator(mode="after")
    def _check_otlp_endpoint(self) -> Self:
        place = urlsplit(self.otlp_endpoint)
        if self.otlp_endpoint and (place.scheme not in ("http", "https") or not place.netloc):
            raise ValueError("otlp_endpoint must begin with http:// or https:// and name a host")
        # The exporter logs the address.
        if "@" in place.netloc or place.query or place.fragment:
            raise ValueError(
                "otlp_endpoint must be an address only: give credentials in OTEL_EXPORTER_OTLP_HEADERS"
            )
        return self


class ServiceSettings(
    AddressSettings,
    FileSettings,
    DatabaseSettings,
    CatalogueSettings,
    ApiSettings,
    ConsoleSettings,
    LimitSettings,
    WebhookSettings,
    TrainingSettings,
    ReplicaSettings,
    AgentSettings,
    TracingSettings,
):
    """The settings of `tuneship serve`: all groups, and those of a cluster, most of which its members share."""

    cluster: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name of the cluster that this service is a member of: several services on one Postgres and one "
        "bucket (docs/cluster.md). Needs database_url, blob_url, public_url and master_key_file.",
    )
    drain_notice_s: Annotated[float, Field(ge=0, le=600)] | None = Field(
        default=None,
        description="Seconds for which a service that was asked to end continues while `/readyz` says that it will, so "
        "that a balancer sends it nothing more; default: 5 in a cluster, else 0.",
    )

    @property
    def notice_s(self) -> float:
        """Seconds of notice before the drain."""
        if self.drain_notice_s is not None:
            return self.drain_notice_s
        return 0.0 if self.cluster is None else CLUSTER_NOTICE_S

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.cluster is None:
            return self
        database = self.database_url.get_secret_value() if self.database_url else ""
        missing = [
            name
            for name, is_there in (
                ("TUNESHIP_DATABASE_URL, of a Postgres", database.startswith("postgresql")),
                ("TUNESHIP_BLOB_URL", self.blob_url),
                ("TUNESHIP_MASTER_KEY_FILE", self.master_key_file),
                ("TUNESHIP_PUBLIC_URL", self.public_url),
            )
            if not is_there
        ]
        if missing:
            raise ValueError(f"TUNESHIP_CLUSTER needs {' and '.join(missing)}")
        return self


class ClientSettings(_Settings):
    """The client's settings for reaching a service."""

    url: str = Field(default="", description="The address of the service, e.g. https://host:8700.")
    api_key: SecretStr = Field(default=SecretStr(""), description="A key of that service.")
    client_id: str = Field(default="", description="The tenant that the key belongs to.")
    connect_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds to wait for a connection.")
    ] = 5.0
    read_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds to wait for the next part of an answer.")
    ] = 150.0
    tries: Annotated[
        int,
        Field(
            ge=1, le=20, description="How often a request is sent that fails for a passing reason."
        ),
    ] = 2
    ca_file: Path | None = Field(
        default=None,
        description="PEM file of a private authority that signed the service's certificate.",
    )

    @classmethod
    def from_credentials(cls, file: Path) -> "ClientSettings":
        """Read the file that a service wrote at its first start (`<data_dir>/credentials.json`)."""
        fields = json.loads(file.read_text())
        return cls(url=fields["base_url"], api_key=fields["api_key"], client_id=fields["client_id"])


def written_url(data_dir: Path) -> str | None:
    """The address that the last service on a data directory wrote down; it may have ended since."""
    try:
        return str(json.loads((data_dir / "service.json").read_text())["url"])
    except (OSError, ValueError, KeyError):
        return None


class PipelineSettings(_Settings):
    """The folders in which the flows keep records and reports."""

    records: Path = Field(
        default=HOME / "records", description="Rollout records; workers and guard share it."
    )
    reports: Path = Field(default=HOME / "reports", description="Markdown reports and plots.")
    data_dir: Path = Field(
        default=HOME / "data", description="The service's database, keys, datasets and models."
    )
    log_file: Path | None = Field(
        default=None, description="Where the embedded service logs; default: in its data directory."
    )


class TrackingSettings(_Settings):
    """The trackers that the pipeline and `tuneship jobs export` write into; one without a place is not used."""

    mlflow_url: str | None = Field(
        default=None, description="An MLflow server, e.g. http://host:5000."
    )
    mlflow_experiment: str = Field(default="tuneship", description="The experiment of its runs.")
    tensorboard_dir: Path | None = Field(
        default=None, description="The log folder of TensorBoard, as for `tensorboard --logdir`."
    )
    wandb_dir: Path | None = Field(
        default=None, description="Where offline runs of Weights & Biases are written."
    )
    wandb_project: str = Field(default="tuneship", description="The project of those runs.")
    tracking_timeout_s: Annotated[
        float, Field(gt=0, le=3600, description="Until all trackers are done; then they are ended.")
    ] = 120.0


class LocalSettings(_Settings):
    """The settings of the processes that `make up` starts on one machine, in addition to the service."""

    run_dir: Path = Field(default=HOME / "run", description="Process ids and logs of what runs.")
    prefect_dir: Path = Field(
        default=HOME / "prefect", description="The Prefect server's database."
    )
    prefect_port: Annotated[
        int, Field(ge=1, le=65535, description="Where the Prefect server of `make up` listens.")
    ] = 4200
    bridge_port: Annotated[
        int,
        Field(ge=1, le=65535, description="Where the service's webhooks become Prefect events."),
    ] = 8701
    bridge_secret_file: Path = Field(
        default=HOME / "webhook.json", description="The webhook's id and its signing secret."
    )


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker process: `WORKER_ENVIRONMENT` and `extra`."""
    inherited = {name: os.environ[name] for name in WORKER_ENVIRONMENT if name in os.environ}
    return {**inherited, **extra}


def embedded_service_environment() -> dict[str, str]:
    """The environment of a service that a script starts for itself: the script's own, unchanged."""
    return dict(os.environ)


def faults_in(error: ValidationError) -> str:
    """Name the environment variables that an error is about, each with its rule, and never with its value."""
    return "; ".join(map(_fault, error.errors(include_input=False, include_context=False)))


def _fault(problem: ErrorDetails) -> str:
    rule = problem["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    rule = rule.replace("Input should be", "must be")
    if not problem["loc"]:  # a rule about several settings names them itself
        return rule
    return f"TUNESHIP_{problem['loc'][0]} ".upper() + rule


def unknown_variables() -> list[str]:
    """Variables of the environment that look like settings and are none, each with the nearest one."""
    groups = (ServiceSettings, ClientSettings, PipelineSettings, TrackingSettings, LocalSettings)
    known = {f"TUNESHIP_{name.upper()}" for group in groups for name in group.model_fields}
    found: list[str] = []
    for name in sorted(os.environ):
        # Kubernetes gives the address of a service called tuneship in variables of the second form.
        if (
            name in known
            or not name.startswith("TUNESHIP_")
            or re.search(r"_SERVICE_|_PORT_\d", name)
        ):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return found


def service_variables(settings: ClientSettings) -> dict[str, str]:
    """The environment variables with which another process reaches a service."""
    variables = {
        "TUNESHIP_URL": settings.url,
        "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": settings.client_id,
    }
    if settings.ca_file is not None:
        variables["TUNESHIP_CA_FILE"] = str(settings.ca_file)
    return variables


def use_service(settings: ClientSettings) -> None:
    """Set a service in this process's environment, for a flow that runs in it."""
    os.environ.update(service_variables(settings))


def turn_off_telemetry() -> None:
    """Switch telemetry off, Prefect's and that of others.

    Prefect and others read these variables when they are first imported, so scripts call this before.
    """
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # MLflow knows DO_NOT_TRACK too, but only with the value "true", which others do not know.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
