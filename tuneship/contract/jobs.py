"""Fine-tuning jobs on the wire (§2.1, §3, §4.1): create, get, list, cancel, metrics, logs and their stream."""

from collections.abc import AsyncGenerator, Generator
from enum import StrEnum
from typing import Annotated, Any, Literal, overload

from pydantic import Field, StrictFloat, StrictInt, field_validator

from tuneship.contract.common import (
    ComplianceMode,
    CreateRequest,
    DatasetId,
    EncryptionLevel,
    Int64,
    JobId,
    Limit,
    LogLimit,
    ModelId,
    ModelName,
    Offset,
    Pagination,
    Reply,
    Tags,
    Timestamp,
    absent,
)
from tuneship.contract.declaring import examples
from tuneship.contract.declaring.limits import MAX_LORA_RANK
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.pages import by_after
from tuneship.contract.declaring.verbs import Asynchronous, Blocking, C_co, Pages, Resource, Verb
from tuneship.contract.errors import (
    DatasetError,
    InstanceTypeUnavailable,
    InvalidRequestError,
    ModelNotFound,
    QuotaExceeded,
    ResourceNotFound,
)
from tuneship.contract.reports.job_reports import JobLogEntry, JobLogs, JobMetrics, JobStep


class JobStatus(StrEnum):
    """States of a job; `completed`, `failed` and `cancelled` never change.

    A `queued` job becomes `running`, then `completed` or `failed`; it may also fail at once. A `running` job is
    `queued` again when the service or its worker has died: it continues from its last checkpoint, without a second
    `started` event, and is `failed` after three attempts without progress. A cancelled job is `cancelling` until its
    processes are gone.
    """

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


MOVES: dict[JobStatus, frozenset[JobStatus]] = {
    # running -> queued: the service restarted, or the worker's lease was lost; the job resumes from its checkpoint.
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.FAILED, JobStatus.CANCELLING}),
    JobStatus.RUNNING: frozenset(
        {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLING, JobStatus.QUEUED}
    ),
    JobStatus.CANCELLING: frozenset({JobStatus.CANCELLED}),
    JobStatus.COMPLETED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}
ENDED = frozenset(state for state, following in MOVES.items() if not following)
ALIVE = frozenset(MOVES) - ENDED


# The service chooses by the data and the model; the record shows what it chose.
Auto = Literal["auto"]


class Hyperparameters(CreateRequest):
    """Hyperparameters of a job. The record always holds the values in force, the defaults among them.

    `auto` lets the service choose by published rules from the data and the model.
    """

    learning_rate: Annotated[float, Field(gt=0, le=1)] | Auto = Field(
        default=2e-4, description="Highest step size, reached after the warm-up."
    )
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = Field(
        default=8, description="Examples in one step."
    )
    epochs: Annotated[int, Field(ge=1, le=10_000)] | Auto = Field(
        default=3, description="Passes over the training examples."
    )
    warmup_steps: Annotated[Int64, Field(ge=0)] | Auto = Field(
        default=0,
        description="Steps in which the rate rises to its highest; at most the steps of the job.",
    )
    lora_rank: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_LORA_RANK,
            description="Inner size of the two matrices that are trained beside each layer.",
        ),
    ] = 16
    lora_alpha: Annotated[
        int | None,
        Field(
            ge=1,
            le=2048,
            description="Scale of what these matrices add: alpha divided by the rank; default: twice the rank.",
        ),
    ] = None
    lora_dropout: Annotated[
        float,
        Field(ge=0, lt=1, description="Share of their inputs left out while training, at random."),
    ] = 0.05
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]], Field(min_length=1)
    ] = Field(
        default=["all-linear"],
        description="Layers that get such matrices; default: `all-linear`, every linear one.",
    )
    seed: Annotated[
        int,
        Field(
            ge=0,
            le=2**31 - 1,
            description="Seed of the initial weights and of the order of examples.",
        ),
    ] = 42
    early_stopping_patience: Annotated[
        int | None,
        Field(
            ge=1,
            le=10_000,
            description="The job ends after this many consecutive measurements without a new lowest validation loss; "
            "default: never early.\n\n"
            "Such a job is `completed` with its best state, as always: `total_steps` becomes the number of steps done, "
            "`current_epoch` stays below `total_epochs`, and the log says why. Any new lowest value counts, however "
            "close. The record has this field only if it was sent.",
        ),
    ] = None


class ComputeConfig(CreateRequest):
    """The machine to train on, and the longest time that training may take."""

    instance_type: Annotated[
        str,
        Field(
            min_length=1,
            max_length=64,
            description="A name from `GET /v1/instance-types`. Any other name, and a type that this installation does "
            "not have, is 409 `instance_type_unavailable`.",
        ),
    ] = "local"
    instance_count: Annotated[int, Field(ge=1, le=64)] = 1
    max_runtime_hours: Annotated[int, Field(ge=1, le=720)] = 24


class JobSecuritySettings(CreateRequest):
    """Safeguards. One that the installation cannot enforce is refused by name, never accepted and ignored.

    The refusal is a 422 whose detail has the code `not_enforced`; `GET /healthz` lists what is enforced. A job that was
    accepted earlier fails with that reason if a restart has lost the safeguard.
    """

    network_isolation: bool = False
    encryption_level: EncryptionLevel = "standard"
    audit_logging: bool = False
    compliance_mode: ComplianceMode = "none"


FineTuningMethod = Literal["lora"]
# Methods that other services of this kind have, and that this release does not train.
NAMED_METHODS = frozenset({"full", "dpo"})


class Comparison(CreateRequest):
    """Asks for losses by validation row in the job's metrics, for judging the tuned model beside another one."""

    model: ModelId | None = Field(
        default=None,
        description="A tuned model of the same base model, measured on the same rows at the end of the job.",
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0,
        description="Draws the third of the validation rows that is measured while it trains, and so chooses the "
        "checkpoint; the others judge it.",
    )


class JobCreate(CreateRequest):
    """A job as a client asks for it."""

    base_model: ModelId
    dataset_id: DatasetId
    validation_dataset_id: Annotated[
        DatasetId | None,
        Field(
            description="Examples that the model is measured on. Default: a tenth of the training examples, at least "
            "one, is kept out of the training.\n\n"
            "These are always the same ones. The field stays null, and the log has a warning."
        ),
    ] = None
    fine_tuning_method: Annotated[
        FineTuningMethod,
        Field(description="`full` and `dpo` are known names, which this release refuses (422)."),
    ] = "lora"
    model_name: ModelName
    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)
    validation_frequency: Annotated[
        StrictInt | StrictFloat,
        Field(
            description="Fraction of an epoch (0, 1] (1 is once an epoch), or every N steps for an integer of 2 or "
            "more.",
            json_schema_extra={
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                    {"type": "integer", "minimum": 2, "maximum": 2**63 - 1},
                ]
            },
        ),
    ] = 0.1
    compute_config: ComputeConfig = Field(default_factory=ComputeConfig)
    security_settings: JobSecuritySettings = Field(default_factory=JobSecuritySettings)
    comparison: Comparison | None = Field(
        default=None,
        description="Additive. Null: no losses by row, and all rows choose.\n\n"
        "The metrics of the completed job have the losses of at most 2,000 rows that chose and 2,000 that judge. With "
        "fewer than 16 validation rows there are none.",
    )
    tags: Tags = Field(default_factory=dict)

    @field_validator("fine_tuning_method", mode="before")
    @classmethod
    def _trained_here(cls, value: Any) -> Any:
        if isinstance(value, str) and value in NAMED_METHODS:
            raise ValueError("must be lora: this release trains LoRA adapters only")
        return value

    @field_validator("validation_frequency")
    @classmethod
    def _fraction_or_steps(cls, value: float) -> float:
        if 0 < value <= 1 or (isinstance(value, int) and 2 <= value < 2**63):
            return value
        raise ValueError("must be a fraction in (0, 1] or an integer of at least 2")


class JobError(Reply):
    """The reason why a job failed; `code` is `fine_tuning_error`."""

    code: str
    reason: Annotated[
        str,
        Field(
            description="For programs: `max_runtime_exceeded`, `out_of_memory`, `loss_not_finite`, `no_progress`, "
            "`data_unreadable`, `not_enforced` (a setting of `security_settings`, after a restart) or `internal`."
        ),
    ]
    message: str


class JobCreated(Reply):
    """A job in the reply to create; `security_settings` is not echoed (§2.1)."""

    id: str
    base_model: str
    dataset_id: str
    validation_dataset_id: str | None = None
    fine_tuning_method: str
    model_name: str
    status: Annotated[str, Field(description="A `JobStatus`.")]
    created_at: Timestamp
    updated_at: Timestamp
    validation_frequency: int | float
    hyperparameters: dict[str, Any]
    compute_config: dict[str, Any]
    comparison: Annotated[Comparison | None, Field(exclude_if=absent)] = None
    tags: dict[str, str] = Field(default_factory=dict)


class Job(JobCreated):
    """A job in the reply to get."""

    fine_tuned_model: Annotated[
        str | None,
        Field(
            description="Of a completed job: the id of its model, which is the checkpoint with the lowest validation "
            "loss, not the last one."
        ),
    ] = None
    started_at: Timestamp | None = None
    completed_at: Annotated[Timestamp | None, Field(exclude_if=absent)] = None
    current_epoch: int = 0
    total_epochs: int = 0
    current_step: int = 0
    total_steps: int = 0
    training_loss: float | None = None
    validation_loss: float | None = None
    ends_learnt: Annotated[
        float | None,
        Field(
            description="Of a completed job: share of the validation examples behind whose answers the end of the turn "
            "was the likeliest token. A model that has not learnt it writes until `max_tokens`."
        ),
    ] = None
    devices: Annotated[
        list[str] | None,
        Field(description="The GPUs on which it trains or has trained; null: the processor."),
    ] = None
    security_settings: dict[str, Any] = Field(default_factory=dict)
    queue_position: Annotated[
        int | None,
        Field(
            description="While queued: 1 is the next to start. A forecast.\n\n"
            "Interrupted jobs go first. Then clients take turns: the one with the fewest running jobs, among those "
            "the one whose last start is the longest ago; a client's own jobs keep their order."
        ),
    ] = None
    tokens_per_second: Annotated[
        float | None,
        Field(description="Recent training speed, without padding; null until measured."),
    ] = None
    estimated_completion_at: Annotated[
        Timestamp | None,
        Field(description="While running: estimated from the measured time of its steps."),
    ] = None
    error: Annotated[JobError | None, Field(exclude_if=absent)] = None


class JobSummary(Reply):
    """A job in a list (§2.1); only a completed one has `completed_at`."""

    id: str
    base_model: str
    model_name: str
    fine_tuned_model: str | None = None
    status: str
    created_at: Timestamp
    updated_at: Timestamp
    completed_at: Annotated[Timestamp | None, Field(exclude_if=absent)] = None
    fine_tuning_method: str
    tags: dict[str, str] = Field(default_factory=dict)


class JobPage(Reply):
    """One page of jobs, newest first."""

    jobs: list[JobSummary]
    pagination: Pagination


class JobCancelled(Reply):
    """The answer to cancel; the job is `cancelled` once its processes are gone."""

    id: str
    status: str
    updated_at: Timestamp


@operation(
    "POST",
    "/v1/fine-tuning/jobs",
    scope="jobs:write",
    status=201,
    errors=(
        ModelNotFound,
        ResourceNotFound,
        DatasetError,
        (DatasetError, 409),
        InstanceTypeUnavailable,
        QuotaExceeded,
    ),
    example=Example(
        examples.JOB_REQUESTS,
        examples.QUEUED_JOB,
    ),
)
def create_job(job: JobCreate) -> JobCreated:
    """Queue a fine-tuning job (§4.1)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/fine-tuning/jobs/{job_id}",
    scope="jobs:read",
    headers=("X-API-Profile",),
    example=Example(reply=examples.COMPLETED_JOB),
)
def get_job(job_id: JobId) -> Job:
    """Fetch one job (§4.1).

    The profiles `full` and `simplified` leave out the fields that other services of this kind do not have, such as
    `queue_position`.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/fine-tuning/jobs",
    scope="jobs:read",
    example=Example(reply={"jobs": [examples.JOB_ITEM], "pagination": examples.PAGE}),
)
def list_jobs(
    limit: Limit = 20,
    offset: Offset = 0,
    status: JobStatus | None = None,
    base_model: ModelId | None = None,
    tags: Tags | None = None,
) -> JobPage:
    """List jobs, newest first (§4.1)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/fine-tuning/jobs/{job_id}/cancel",
    scope="jobs:write",
    errors=((InvalidRequestError, 409),),
    example=Example(
        reply={"id": examples.JOB, "status": "cancelling", "updated_at": examples.LATER}
    ),
)
def cancel_job(job_id: JobId) -> JobCancelled:
    """Stop a queued or running job (§4.1).

    Cancelling it again gives the same answer and no second event; a job that has ended is 409.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/fine-tuning/jobs/{job_id}/metrics",
    scope="metrics:read",
    example=Example(reply=examples.JOB_METRICS),
)
def get_job_metrics(job_id: JobId, evaluated_only: bool = False) -> JobMetrics:
    """Read losses, learning rate, accuracy and perplexity by step (§4.1), live while the job trains.

    `evaluated_only` returns only the steps at which the model was measured: a repeated value is no new evidence.
    The log as a stream has every step, also of a job whose metrics are `thinned`.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/fine-tuning/jobs/{job_id}/logs",
    scope="logs:read",
    headers=("Last-Event-ID",),
    example=Example(
        reply={
            "logs": [{"timestamp": examples.NOON_MS, "level": "info", "message": "job queued"}],
            "pagination": {"after": "MTIz"},
        },
        streams={
            "text/event-stream": examples.JOB_LOG_EVENTS,
            "application/x-ndjson": examples.JOB_LOG_LINES,
        },
    ),
)
def get_job_logs(
    job_id: JobId, limit: LogLimit = 100, after: str | None = None, stream: bool = False
) -> JobLogs:
    """Read the job's log, oldest first (§4.1).

    With `stream` it is sent while it is written, as server-sent events (`log`, `metrics`, at the end `done`, or `error`
    when the key ends), or as one JSON object a line for `Accept: application/x-ndjson`, without an end mark. A comment
    is sent every 15 seconds. A stream continues behind `Last-Event-ID` or `after`; `limit` does not bound it.

    A service that shuts down ends the stream without `done`: connect again. Steps that a resumed job reports again are
    not sent again.
    """
    raise NotImplementedError


class Jobs(Resource[C_co]):
    """Fine-tuning jobs."""

    create = Verb(create_job)
    get = Verb(get_job)
    list = Verb(list_jobs)
    iterate = Pages(list_jobs, lambda page: page.jobs)
    cancel = Verb(cancel_job)
    metrics = Verb(get_job_metrics)
    logs = Verb(get_job_logs)
    iterate_logs = Pages(get_job_logs, lambda page: page.logs, by_after)

    @overload
    def follow_logs(
        self: "Jobs[Blocking]", job_id: str, after: str | None = None
    ) -> Generator[JobLogEntry | JobStep]: ...
    @overload
    def follow_logs(
        self: "Jobs[Asynchronous]", job_id: str, after: str | None = None
    ) -> AsyncGenerator[JobLogEntry | JobStep]: ...
    def follow_logs(self: "Jobs[Any]", job_id: str, after: str | None = None) -> Any:
        """Yield log lines and training steps as they are written, over broken connections, to the job's end.

        Leaving the loop early closes the connection; with an `AsyncClient`, use `contextlib.aclosing`.
        """
        return self.client.follow_job(job_id, after)
