"""Fine-tuning jobs of OpenAI's API, with their events and checkpoints."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import DatasetId, ModelId, ModelName, Reply, Tags, absent
from tuneship.contract.declaring.examples import BASE, MODEL, SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.ids import FineTuningJobId, own_id
from tuneship.contract.openai.lists import AfterId, PageSize
from tuneship.contract.openai.request_fields import NeutralFields, OpenAIRequest

AutoWhole = Annotated[int, Field(ge=1)] | Literal["auto"]


def _own(value: object) -> object:
    return own_id(value) if isinstance(value, str) else value


TrainingFileId = Annotated[
    DatasetId,
    BeforeValidator(_own),
    WithJsonSchema({"type": "string", "pattern": "^(file-|ds_)[0-9a-z]{20,32}$"}),
]


class SupervisedHyperparameters(OpenAIRequest):
    """OpenAI's hyperparameters, and those of tuneship beside them; what is absent is chosen by data and model."""

    n_epochs: AutoWhole = "auto"
    batch_size: AutoWhole = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto", description="Factor of the rate that `auto` chooses for this base model."
    )
    learning_rate: float | None = None
    warmup_steps: int | Literal["auto"] = "auto"
    lora_rank: int | None = None
    lora_alpha: int | None = None
    lora_dropout: float | None = None
    target_modules: list[str] | None = None
    early_stopping_patience: int | None = None

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.learning_rate is not None and self.learning_rate_multiplier != "auto":
            text = "must not be sent beside learning_rate"
            raise PydanticCustomError("conflict", text, {"param": "learning_rate_multiplier"})
        return self


class SupervisedOptions(OpenAIRequest):
    """The options of supervised training."""

    hyperparameters: SupervisedHyperparameters | None = None


class TuningMethod(OpenAIRequest):
    """How to train; only `supervised` is supported."""

    unsupported = frozenset({"dpo", "reinforcement"})

    type: Literal["supervised"]
    supervised: SupervisedOptions | None = None


class FineTuningJobCreate(OpenAIRequest):
    """A job as OpenAI's clients ask for it."""

    neutral: ClassVar[NeutralFields] = {"integrations": ([],)}

    model: ModelId
    training_file: TrainingFileId
    validation_file: TrainingFileId | None = None
    method: TuningMethod | None = None
    hyperparameters: SupervisedHyperparameters | None = None
    suffix: ModelName | None = None
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    metadata: Tags | None = None

    @property
    def chosen(self) -> SupervisedHyperparameters:
        """The hyperparameters, which may stand in two places."""
        options = self.method.supervised if self.method is not None else None
        inner = options.hyperparameters if options is not None else None
        return inner or self.hyperparameters or SupervisedHyperparameters()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.hyperparameters is not None and self.chosen != self.hyperparameters:
            text = "must be the same as those in method"
            raise PydanticCustomError("conflict", text, {"param": "hyperparameters"})
        return self


class JobFailure(Reply):
    """Why a job failed; `param` is the field whose content is at fault."""

    code: str
    message: str
    param: str | None = None


class ShownHyperparameters(Reply):
    """The hyperparameters that are in force."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float


class ShownOptions(Reply):
    """The options that are in force."""

    hyperparameters: ShownHyperparameters


class ShownMethod(Reply):
    """The method of a job."""

    type: Literal["supervised"] = "supervised"
    supervised: ShownOptions


class FineTuningJob(Reply):
    """A job. `organization_id` is the client, `trained_tokens` is not measured."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
    training_file: str
    validation_file: str | None
    result_files: list[str]
    hyperparameters: ShownHyperparameters
    method: ShownMethod
    seed: int
    metadata: dict[str, str] | None
    error: JobFailure | None
    trained_tokens: int | None = None
    estimated_finish: int | None = None
    integrations: list[Any] = Field(default_factory=list)
    user_provided_suffix: str | None


class FineTuningJobs(Reply):
    """A page of jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool


class MetricsData(Reply):
    """The numbers of one step; what was not measured there is left out."""

    step: int
    total_steps: int
    train_loss: float
    valid_loss: Annotated[float | None, Field(exclude_if=absent)] = None
    valid_mean_token_accuracy: Annotated[float | None, Field(exclude_if=absent)] = None


class FineTuningJobEvent(Reply):
    """One event of a job: a sentence, or the numbers of a step."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"] = "message"
    data: MetricsData | dict[str, Any] = Field(default_factory=dict[str, Any])


class FineTuningJobEvents(Reply):
    """A page of events, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningJobEvent]
    has_more: bool


class CheckpointMetrics(Reply):
    """The numbers of the step whose state was kept."""

    step: int
    train_loss: float
    valid_loss: float
    valid_mean_token_accuracy: float


class FineTuningJobCheckpoint(Reply):
    """The state of a job that was kept as its model."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: CheckpointMetrics


class FineTuningJobCheckpoints(Reply):
    """The checkpoints of a job: one of a job that has completed, else none."""

    object: Literal["list"] = "list"
    data: list[FineTuningJobCheckpoint]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


EXAMPLE_JOB: dict[str, Any] = {
    "id": f"ftjob-{SUFFIX}",
    "object": "fine_tuning.job",
    "created_at": 1_772_366_400,
    "finished_at": 1_772_367_000,
    "model": BASE,
    "fine_tuned_model": MODEL,
    "organization_id": "radiology",
    "status": "succeeded",
    "training_file": f"file-{SUFFIX}",
    "validation_file": None,
    "result_files": [f"file-res-{SUFFIX}"],
    "hyperparameters": {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 1.0},
    "method": {
        "type": "supervised",
        "supervised": {
            "hyperparameters": {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 1.0}
        },
    },
    "seed": 42,
    "metadata": None,
    "error": None,
    "trained_tokens": None,
    "estimated_finish": None,
    "integrations": [],
    "user_provided_suffix": "icd-chapters",
}
EXAMPLE_EVENT: dict[str, Any] = {
    "id": f"ftevent-{SUFFIX}-4-2",
    "object": "fine_tuning.job.event",
    "created_at": 1_772_366_400,
    "level": "info",
    "message": "Fine-tuning job started",
    "type": "message",
    "data": {},
}


@openai_operation(
    "POST",
    "fine_tuning/jobs",
    scope="jobs:write",
    changes=True,
    example=Example(
        {
            "job": {
                "model": BASE,
                "training_file": f"file-{SUFFIX}",
                "suffix": "icd-chapters",
                "method": {
                    "type": "supervised",
                    "supervised": {"hyperparameters": {"n_epochs": 3}},
                },
            }
        },
        EXAMPLE_JOB,
    ),
)
def openai_create_job(job: FineTuningJobCreate) -> FineTuningJob:
    """Queue a fine-tuning job. What waiting does not cure is refused with 422."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "fine_tuning/jobs",
    scope="jobs:read",
    example=Example(reply={"object": "list", "data": [EXAMPLE_JOB], "has_more": False}),
)
def openai_list_jobs(
    after: AfterId | None = None, limit: PageSize = 20, metadata: Tags | None = None
) -> FineTuningJobs:
    """List jobs, newest first; `metadata[key]=value` keeps those with this entry."""
    raise NotImplementedError


@openai_operation(
    "GET", "fine_tuning/jobs/{job_id}", scope="jobs:read", example=Example(reply=EXAMPLE_JOB)
)
def openai_get_job(job_id: FineTuningJobId) -> FineTuningJob:
    """Fetch one job."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "fine_tuning/jobs/{job_id}/cancel",
    scope="jobs:write",
    changes=True,
    example=Example(reply={**EXAMPLE_JOB, "status": "cancelled", "fine_tuned_model": None}),
)
def openai_cancel_job(job_id: FineTuningJobId) -> FineTuningJob:
    """Cancel a job; its processes may end some seconds later."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "fine_tuning/jobs/{job_id}/pause",
    scope="jobs:write",
    example=Example(reply=EXAMPLE_JOB),
)
def openai_pause_job(job_id: FineTuningJobId) -> FineTuningJob:
    """Refused: jobs cannot be paused here."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "fine_tuning/jobs/{job_id}/resume",
    scope="jobs:write",
    example=Example(reply=EXAMPLE_JOB),
)
def openai_resume_job(job_id: FineTuningJobId) -> FineTuningJob:
    """Refused: jobs cannot be paused here."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "fine_tuning/jobs/{job_id}/events",
    scope="logs:read",
    example=Example(reply={"object": "list", "data": [EXAMPLE_EVENT], "has_more": False}),
)
def openai_list_job_events(
    job_id: FineTuningJobId, after: AfterId | None = None, limit: PageSize = 20
) -> FineTuningJobEvents:
    """List the log and the measured steps of a job, newest first."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "fine_tuning/jobs/{job_id}/checkpoints",
    scope="jobs:read",
    example=Example(
        reply={
            "object": "list",
            "data": [],
            "has_more": False,
            "first_id": None,
            "last_id": None,
        }
    ),
)
def openai_list_job_checkpoints(
    job_id: FineTuningJobId, after: AfterId | None = None, limit: PageSize = 10
) -> FineTuningJobCheckpoints:
    """List the state of a completed job that was kept as its model."""
    raise NotImplementedError
