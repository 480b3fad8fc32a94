"""The parameters of a release: the form of `tune_and_deploy` in the Prefect UI, and the file `release.yaml`.

Every field means the same as in the API; a field that is left out keeps its default. Knows no service. Next:
`flows/tune_and_deploy.py`.
"""

import hashlib
from collections.abc import Callable, Mapping
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictFloat,
    StrictInt,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from flows.forms.model_card_form import CardStatements
from tuneship.contract.common import (
    ONE_LINE,
    ComplianceMode,
    ModelId,
    ModelName,
    Name,
    StrictModel,
    Tags,
)
from tuneship.contract.deployments import DeploymentCreate, DeploymentSecuritySettings
from tuneship.contract.evaluations import EvaluationCreate, EvaluationSettings
from tuneship.contract.graders import MAXIMUM_GRADERS, Grader
from tuneship.contract.jobs import (
    Comparison,
    ComputeConfig,
    Hyperparameters,
    JobCreate,
    JobSecuritySettings,
)
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.gates.plan import CanaryPlan, CanaryRules
from tuneship.gates.training.training_gates import TrainingRules
from tuneship.settings import TrackingSettings
from tuneship.tracking.targets import server_url

MAX_HYPERPARAMETER_SETS = 10
# Rows on which exact matches are counted, unless the release says how many.
EXACT_MATCH_ROWS = 200
# Key of the validation context: the folder at which relative paths start, that of a script's params file.
DIRECTORY = "directory"


def beside_parameters(file: str, info: ValidationInfo) -> str:
    """Resolve a path of a params file, relative to that file; elsewhere it stays as given.

    Raises ValueError for a file that does not exist.
    """
    path = Path(folder_beside_parameters(file, info))
    is_known = DIRECTORY in (info.context or {})
    # Reported before any service is started.
    if is_known and not (path.is_file() or has_magic(str(path))):
        raise ValueError(f"{path}: no such file")
    return str(path)


def folder_beside_parameters(folder: str, info: ValidationInfo) -> str:
    """Resolve the path of a folder, which may be missing, like `beside_parameters`."""
    context: dict[str, Any] = info.context or {}
    return str(Path(context.get(DIRECTORY, "")) / Path(folder).expanduser())


LocalFile = Annotated[str, Field(min_length=1), AfterValidator(beside_parameters)]
ServerUrl = Annotated[str, AfterValidator(server_url)]
LocalFolder = Annotated[str, Field(min_length=1), AfterValidator(folder_beside_parameters)]


def _without_defaults(schema: dict[str, Any]) -> None:
    for about in schema["properties"].values():
        about.pop("default", None)


def _in_order(*names: str) -> Callable[[dict[str, Any]], None]:
    """Set the order of a form: Prefect's UI sorts by `position`; fields that are not named come last."""

    def sort(schema: dict[str, Any]) -> None:
        fields = schema["properties"]
        for position, name in enumerate(
            [*names, *(field for field in fields if field not in names)]
        ):
            fields[name]["position"] = position

    return sort


def _fraction_or_steps(value: float) -> float:
    # As everywhere in the API, 1 is a whole epoch and not every step.
    if 0 < value <= 1 or (isinstance(value, int) and value >= 2):
        return value
    raise ValueError("must be a fraction in (0, 1] or an integer of at least 2")


class TrainingData(StrictModel):
    """JSON Lines files, datasets that the service has already, or both; more than one are merged in this order."""

    model_config = ConfigDict(
        json_schema_extra=_in_order("files", "validation_file", "dataset_ids")
    )

    files: list[LocalFile] = Field(
        default_factory=list[str],
        description="JSON Lines files; a name with `*`, `?` or `[` stands for all that match, by name.",
    )
    dataset_ids: list[str] = Field(
        default_factory=list[str],
        description="Datasets of the service (`ds_...`), after the files.",
    )
    dataset_tags: Tags = Field(
        default_factory=dict[str, str],
        description="All processed datasets of the service that carry all these tags, oldest first.",
    )
    format: DatasetFormat = Field(
        default="instruction", description="instruction: instruction and response; or conversation."
    )
    validation_file: LocalFile | None = Field(
        default=None,
        description="JSON Lines file that no training sees; releases are compared on it.",
    )
    validation_dataset_id: str | None = Field(
        default=None, description="The same as a dataset of the service."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not (self.files or self.dataset_ids or self.dataset_tags):
            raise ValueError("one of files, dataset_ids and dataset_tags is needed")
        if self.validation_file and self.validation_dataset_id:
            raise ValueError("only one of validation_file and validation_dataset_id may be given")
        return self


class SecuritySettings(StrictModel):
    """Safeguards of the jobs and deployments of a release. A field that is left out is not sent."""

    compliance_mode: ComplianceMode | None = Field(
        default=None,
        description="hipaa turns all others on; needs TLS, or the service's own machine, and an API key of at most 90"
        " days.",
    )
    network_isolation: bool | None = Field(
        default=None, description="The processes that train and serve have no network."
    )
    encryption_level: Literal["standard", "maximum"] | None = Field(
        default=None,
        description="Every stored file is encrypted at either level; maximum asks for it by name.",
    )
    audit_logging: bool | None = Field(
        default=None, description="Reads, generations and refusals are in the audit chain, too."
    )
    private_endpoints: bool | None = Field(
        default=None,
        description="Deployments only: they answer to the service's private networks, and the run must be in one.",
    )

    @property
    def of_job(self) -> JobSecuritySettings:
        """The settings of a job; a field that is left out is not sent, so that it contradicts no mode."""
        settings = self.model_dump(exclude_none=True, exclude={"private_endpoints"})
        return JobSecuritySettings.model_validate(settings)

    @property
    def of_deployment(self) -> DeploymentSecuritySettings:
        """The settings of a deployment."""
        return DeploymentSecuritySettings.model_validate(self.model_dump(exclude_none=True))


class DeploymentSettings(StrictModel):
    """Settings of the deployments that serve the tuned model."""

    compute_type: str = Field(default="cpu", description="cpu or gpu.")
    instance_type: str = Field(default="local", description="`local` on one's own machine.")
    region: str = Field(default="local", description="`local` on one's own machine.")
    min_replicas: int = Field(default=1, ge=0, le=64, description="Serving processes at least.")
    max_replicas: int = Field(default=1, ge=0, le=64, description="Serving processes at most.")
    auto_scaling: bool = Field(default=False, description="Between the two by load.")
    tags: Tags = Field(
        default_factory=dict[str, str],
        description="Tags of the candidate's deployment, fault tags of a drill among them.",
    )


def _name_first(schema: dict[str, Any]) -> None:
    _in_order("name", "id")(schema)
    schema["properties"]["name"].pop("default", None)  # else the form shows no place to type it


class EndpointChoice(StrictModel):
    """The canary endpoint whose traffic moves to the new model."""

    model_config = ConfigDict(json_schema_extra=_name_first)

    id: str | None = Field(default=None, description="An endpoint that exists (`cep_...`).")
    name: Name | None = Field(default=None, description="By name; made at the first release.")
    baseline_deployment_id: str | None = Field(
        default=None,
        description="What serves now, where the service does not say it (no extensions).",
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.id is None) == (self.name is None):
            raise ValueError("exactly one of id and name is needed")
        return self


class ReleaseEvaluation(EvaluationSettings):
    """Held-out examples that both models answer before any traffic moves, and the result that the new model must reach.

    Without graders, exact matches on validation rows are reported and decide nothing.
    """

    model_config = ConfigDict(
        json_schema_extra=_in_order("file", "dataset_id", "graders", "slice_by", "margin")
    )

    file: LocalFile | None = Field(
        default=None,
        description="JSON Lines file of held-out examples; default: the validation data of the release.",
    )
    dataset_id: str | None = Field(
        default=None, description="The same as a dataset of the service (`ds_...`)."
    )
    graders: Annotated[list[Grader], Field(max_length=MAXIMUM_GRADERS)] = Field(
        default_factory=list[Grader],
        description="How answers are scored, each with a name and a type such as string_check.",
    )
    max_examples: int = Field(
        default=1000, ge=0, le=100_000, description="Examples at most, in a random order; 0: off."
    )
    max_tokens: int = Field(
        default=64, ge=1, le=4096, description="Longest answer, also of the smoke test."
    )
    on_inconclusive: Literal["continue", "hold"] = Field(
        default="continue",
        description="Where the examples cannot decide: continue with a note, or hold as a training gate does.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file and self.dataset_id:
            raise ValueError("only one of file and dataset_id may be given")
        return self

    @property
    def deciding(self) -> tuple[str, ...]:
        """The names of the gating graders; none where nothing is graded."""
        return super().deciding if self.graders else ()

    @property
    def exact_match_rows(self) -> int:
        """The number of validation rows for counting exact matches when no grader decides."""
        if self.graders:
            return 0
        is_chosen = "max_examples" in self.model_fields_set
        return self.max_examples if is_chosen else EXACT_MATCH_ROWS

    @property
    def decides(self) -> bool:
        """Whether the release depends on the answers."""
        return bool(self.graders) and self.max_examples > 0

    def order(self, name: str, dataset_id: str, candidate: str, baseline: str) -> EvaluationCreate:
        """The create request of the evaluation."""
        own = {"file", "dataset_id", "on_inconclusive"}
        settings = self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=own)
        about: dict[str, Any] = {"name": name, "dataset_id": dataset_id, "candidate": candidate}
        # A release has another default than the service.
        about |= {"baseline": baseline, "max_tokens": self.max_tokens}
        return EvaluationCreate.model_validate({**settings, **about})


class Tracking(StrictModel):
    """Trackers into which the release is written. A field that is left out is taken from the worker's settings."""

    mlflow_url: ServerUrl | None = Field(
        default=None, description="An MLflow server, e.g. http://host:5000."
    )
    mlflow_experiment: str | None = Field(
        default=None, min_length=1, max_length=200, pattern=ONE_LINE, description="Its experiment."
    )
    tensorboard_dir: LocalFolder | None = Field(
        default=None, description="The log folder of TensorBoard."
    )
    wandb_dir: LocalFolder | None = Field(
        default=None, description="Where offline runs of Weights & Biases are written."
    )
    wandb_project: str | None = Field(
        default=None, min_length=1, max_length=128, pattern=ONE_LINE, description="Their project."
    )
    tracking_timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Seconds until all trackers are done; then they are ended, and the release continues.",
    )

    @property
    def settings(self) -> TrackingSettings:
        """The settings of this release: those of the process, overridden by its own choices."""
        return TrackingSettings.model_validate(
            TrackingSettings().model_dump() | self.model_dump(exclude_none=True)
        )


class HyperparameterSet(Hyperparameters):
    """The hyperparameters of one of several jobs; fields that are left out are those of `hyperparameters`."""

    # The form of Prefect's UI sends every default that it knows of, as if a person had chosen it.
    model_config = ConfigDict(json_schema_extra=_without_defaults)


class ReleaseParameters(StrictModel):
    """One release: data, training, gates, deployment, canary."""

    # Field -> its title in the form: what the group decides, and its name in a file. The form begins with what a
    # person must say. Each of these groups is closed until somebody opens it; a closed one is sent as null, which
    # means its defaults.
    GROUPS: ClassVar[Mapping[str, str]] = {
        "hyperparameters": "How to train: hyperparameters",
        "compute_config": "Where to train: compute_config",
        "training_gates": "When a training is good enough: training_gates",
        "deployment": "How the model is served: deployment",
        "canary": "How the traffic moves, and when it returns: canary",
        "evaluation": "Whether its answers are right: evaluation",
        "security_settings": "Safeguards: security_settings",
        "tracking": "Where it is written too: tracking",
        "model_card": "What people must know: model_card",
    }

    model_config = ConfigDict(
        json_schema_extra=_in_order("model_name", "data", "endpoint", "base_model", "model")
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema for the form in Prefect's UI; files and saved deployments are validated as before."""
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)["properties"]
        fields["data"].pop("default", None)  # with a default of null it would not show what to say
        for name, title in cls.GROUPS.items():
            group = {"$ref": fields[name].pop("$ref")}
            handler.resolve_ref_schema(group)["title"] = "change"  # the label of the button
            closed = {"type": "null", "title": "keep the defaults"}
            meant = cls.model_fields[name].description
            fields[name] |= {"title": title, "description": meant, "anyOf": [closed, group]}
            fields[name]["default"] = None
        return schema

    data: TrainingData | None = Field(
        default=None,
        description="What to train on: files or datasets. None where `model` is given.",
    )
    base_model: ModelId = Field(default="tuneship-tiny", description="The model that is tuned.")
    model_name: ModelName = Field(description="Name of the tuned model.")
    model: ModelId | None = Field(
        default=None, description="A tuned model that exists (`ft:...`): release it, train nothing."
    )
    hyperparameters: Hyperparameters = Field(
        default_factory=Hyperparameters, description="How to train."
    )
    hyperparameter_sets: list[HyperparameterSet] = Field(
        default_factory=list[HyperparameterSet],
        max_length=MAX_HYPERPARAMETER_SETS,
        description="Train one job for each set, side by side, and release the best by validation loss; what a set"
        " leaves out is taken from `hyperparameters`. Empty: one job.",
    )
    validation_frequency: Annotated[StrictInt | StrictFloat, AfterValidator(_fraction_or_steps)] = (
        Field(default=0.1, description="Fraction of an epoch (0, 1], or every N steps.")
    )
    compute_config: ComputeConfig = Field(
        default_factory=ComputeConfig, description="Where to train, for how long at most."
    )
    training_gates: TrainingRules = Field(
        default_factory=TrainingRules, description="What a training must show to be deployed."
    )
    deployment: DeploymentSettings = Field(
        default_factory=DeploymentSettings, description="How the tuned model is served."
    )
    security_settings: SecuritySettings = Field(
        default_factory=SecuritySettings,
        description="Safeguards of the jobs and deployments that this release makes.",
    )
    endpoint: EndpointChoice = Field(description="Where the traffic moves.")
    canary: CanaryRules = Field(
        default_factory=CanaryRules, description="How the traffic moves, and when it returns."
    )
    evaluation: ReleaseEvaluation = Field(
        default_factory=ReleaseEvaluation,
        description="Whether the answers to held-out examples are still right.",
    )
    tracking: Tracking = Field(
        default_factory=Tracking,
        description="MLflow, TensorBoard and Weights & Biases: where the release is written besides its report.",
    )
    model_card: CardStatements = Field(
        default_factory=CardStatements,
        description="What only people can say about the model, for its model card.",
    )
    run_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern=ONE_LINE,
        description="Makes a repeated run continue where it was stopped; default: from these parameters.",
    )
    force: bool = Field(
        default=False, description="Release again what was rolled back in the last 24 hours."
    )

    @model_validator(mode="before")
    @classmethod
    def _closed_groups_keep_their_defaults(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        return {
            name: one for name, one in fields.items() if one is not None or name not in cls.GROUPS
        }

    @model_validator(mode="after")
    def _has_something_to_release(self) -> Self:
        if (self.data is None) == (self.model is None):
            raise ValueError("exactly one of data and model is needed")
        return self

    @model_validator(mode="after")
    def _has_examples_to_evaluate(self) -> Self:
        sources = [self.evaluation.file, self.evaluation.dataset_id]
        if self.data is not None:
            sources += [self.data.validation_file, self.data.validation_dataset_id]
        if self.evaluation.decides and not any(sources):
            raise ValueError("evaluation.graders need evaluation.file or evaluation.dataset_id")
        return self

    @model_validator(mode="after")
    def _sets_differ(self) -> Self:
        if len({one.model_dump_json() for one in self.settings}) != len(self.settings):
            raise ValueError("hyperparameter_sets must differ")
        return self

    @model_validator(mode="after")
    def _prompts_beside_parameters(self, info: ValidationInfo) -> Self:
        if self.canary.traffic is not None:
            prompts = beside_parameters(self.canary.traffic.prompts, info)
            self.canary.traffic.prompts = prompts
        return self

    @property
    def settings(self) -> list[Hyperparameters]:
        """The hyperparameters of every job."""
        if not self.hyperparameter_sets:
            return [self.hyperparameters]
        # Only fields that were given: the defaults of a set must not replace what is common to all.
        common = self.hyperparameters.model_dump(exclude_unset=True)
        return [
            Hyperparameters.model_validate(common | one.model_dump(exclude_unset=True))
            for one in self.hyperparameter_sets
        ]

    @property
    def validation_file(self) -> Path | None:
        """The file of the validation rows, if there is one."""
        file = self.data.validation_file if self.data else None
        return Path(file) if file else None

    def digest(self) -> str:
        """SHA-256 of all parameters that are not their default and that change the release itself."""
        # Without defaults, so that a field of a later version does not make another release of the same file.
        beside = {"run_key", "force", "tracking", "model_card"}
        text = self.model_dump_json(exclude=beside, exclude_defaults=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def job(
        self,
        dataset_id: str,
        validation_dataset_id: str | None,
        settings: Hyperparameters,
        comparison: Comparison | None = None,
    ) -> JobCreate:
        """The create request of one job of this release."""
        return JobCreate(
            base_model=self.base_model,
            dataset_id=dataset_id,
            validation_dataset_id=validation_dataset_id,
            model_name=self.model_name,
            hyperparameters=settings,
            validation_frequency=self.validation_frequency,
            compute_config=self.compute_config,
            security_settings=self.security_settings.of_job,
            comparison=comparison,
        )

    def deploy(self, model: str, suffix: str, tags: Tags) -> DeploymentCreate:
        """The create request of a deployment of this model, with a unique name."""
        settings = self.deployment.model_dump(exclude={"tags"})
        own = {
            "model_name": model,
            "deployment_name": f"{self.model_name}-{suffix}",
            "tags": tags,
            "security_settings": self.security_settings.of_deployment,
        }
        return DeploymentCreate.model_validate(settings | own)

    def plan(
        self, endpoint_id: str | None, baseline_deployment_id: str, candidate_deployment_id: str
    ) -> CanaryPlan:
        """The plan of the rollout from one deployment to another."""
        return CanaryPlan(
            **self.canary.model_dump(),
            endpoint_id=endpoint_id,
            endpoint_name=None if endpoint_id else self.endpoint.name,
            baseline_deployment_id=baseline_deployment_id,
            candidate_deployment_id=candidate_deployment_id,
        )
