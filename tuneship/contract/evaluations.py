"""Evaluations on the wire (additive): two deployments answer the same held-out examples, and graders score them.

Only numbers are stored: scores, line numbers and the values of slices. `docs/evaluation.md` explains the verdict.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal, LiteralString, Self, cast

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import (
    CreateRequest,
    DatasetId,
    Deleted,
    DeploymentId,
    DeploymentOrEvaluationId,
    EvaluationId,
    Limit,
    LogLimit,
    Name,
    Offset,
    Pagination,
    Reply,
    StrictModel,
    Tags,
    Timestamp,
    absent,
)
from tuneship.contract.declaring.examples import (
    BASE,
    BASELINE,
    CANDIDATE,
    DATASET,
    EVALUATION,
    LATER,
    MODEL,
    NOON,
    OTHER_EVALUATION,
    PAGE,
)
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb, WaitVerb
from tuneship.contract.errors import (
    DatasetError,
    DeploymentError,
    InvalidRequestError,
    QuotaExceeded,
    ResourceNotFound,
    ValidationFailed,
)
from tuneship.contract.graders import Graders, gating_names

Verdict = Literal["pass", "reject", "hold"]
Outcome = Literal["win", "loss", "tie", "scored", "failed", "leaked", "too_long"]
MetadataField = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]


class EvaluationStatus(StrEnum):
    """States of an evaluation. The verdict is a field of its own: a completed evaluation may reject."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = (EvaluationStatus.QUEUED, EvaluationStatus.RUNNING)


class EvaluationSettings(StrictModel):
    """How answers are scored, and what a candidate must show."""

    graders: Annotated[
        Graders, Field(description="They score each answer, from 0 to 1; `loss` in nats.")
    ]
    gating: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            max_length=4,
            description="Names of the graders that decide; their scores are 0 or 1. Default: the first one.",
        ),
    ] = None
    margin: Annotated[
        float,
        Field(
            gt=0,
            le=0.1,
            description="Share of the examples by which the candidate may be worse and still pass.",
        ),
    ] = 0.03
    min_score: Annotated[
        float | None,
        Field(
            ge=0, le=1, description="A candidate with a lower score of a gating grader is rejected."
        ),
    ] = None
    slice_by: Annotated[
        list[MetadataField],
        Field(
            max_length=4, description="Fields of `metadata` whose values are judged on their own."
        ),
    ] = Field(default_factory=list[str])
    slice_margin: Annotated[
        float,
        Field(
            le=0.5,
            description="A slice may lose more than this share of its examples only by chance.",
        ),
    ] = 0.1
    min_slice: Annotated[
        int, Field(ge=10, le=100_000, description="Slices with fewer examples are not tested.")
    ] = 30
    cluster_by: Annotated[
        MetadataField | None,
        Field(description="A field of `metadata`, such as a patient, whose examples are related."),
    ] = None
    max_examples: Annotated[
        int, Field(ge=1, le=100_000, description="Drawn at random from the dataset.")
    ] = 1000
    seed: Annotated[int, Field(ge=0, lt=2**63, description="Of the random order.")] = 0
    stop_early: Annotated[
        bool, Field(description="End as soon as the candidate is surely worse than the margin.")
    ] = True
    max_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description="Longest answer; by default no more than the deployments allow. Answers are greedy.",
        ),
    ] = 256

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        try:
            _ = self.deciding
        except PydanticCustomError as error:
            place = {"param": "gating", **(error.context or {})}
            raise PydanticCustomError(
                cast("LiteralString", error.type),
                cast("LiteralString", error.message_template),
                place,
            ) from None
        if self.slice_margin < self.margin:
            text = "must not be below margin"
            raise PydanticCustomError("out_of_range", text, {"param": "slice_margin"})
        return self

    @property
    def deciding(self) -> tuple[str, ...]:
        """The names of the gating graders."""
        return gating_names(self.graders, self.gating)


class EvaluationCreate(EvaluationSettings, CreateRequest):
    """An evaluation as a client orders it."""

    name: Name
    dataset_id: Annotated[
        DatasetId,
        Field(
            description="The last turn of each example is the reference, all before it the prompt."
        ),
    ]
    candidate: Annotated[DeploymentId, Field(description="The deployment that is evaluated.")]
    baseline: Annotated[
        DeploymentOrEvaluationId | None,
        Field(
            description="A deployment to compare with, or an evaluation of the same examples whose stored scores are "
            "used. Without one there are scores and no comparison."
        ),
    ] = None
    tags: Tags = Field(default_factory=dict)

    @model_validator(mode="after")
    def _two_deployments(self) -> Self:
        if self.candidate == self.baseline:
            text = "must not be the candidate itself"
            raise PydanticCustomError("conflict", text, {"param": "baseline"})
        return self


class Score(Reply):
    """A model's mean score, or mean loss, with its 95 % interval."""

    score: float
    low: float
    high: float


class PairedReport(Reply):
    """Wins and losses of the candidate, and the 90 % interval of the difference. Null where there is no baseline."""

    wins: int | None = None
    losses: int | None = None
    ties: int | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_worse: Annotated[
        float | None, Field(description="Probability of as many losses by chance alone.")
    ] = None


class GraderReport(PairedReport):
    """The findings of one grader."""

    name: str
    measure: Annotated[
        Literal["score", "loss"],
        Field(
            description="`score`: means are shares, from 0 to 1, and higher is better. `loss`: they are nats a target "
            "token, and lower is better; a win is a lower loss."
        ),
    ] = "score"
    candidate: Score | None
    baseline: Score | None = None
    examples_needed: Annotated[
        int | None, Field(description="With so many an equal candidate passes in 80 % of cases.")
    ] = None
    verdict: Annotated[
        Verdict | None, Field(description="Null for graders that do not decide.")
    ] = None
    reason: str | None = None


class SliceReport(PairedReport):
    """The finding of a gating grader in one slice. A slice that is not rejected is not proven either."""

    field: str
    value: str
    grader: str
    examples: int
    verdict: Literal["no_harm_shown", "reject", "not_tested"]


class ExampleCounts(Reply):
    """How many examples were selected, and what became of them."""

    selected: int = 0
    leaked: Annotated[int, Field(description="Left out: a model was trained on them.")] = 0
    too_long: Annotated[int, Field(description="Left out: both models refuse them.")] = 0
    failed: Annotated[int, Field(description="Left out: no answer came.")] = 0
    scored: int = 0


class EvaluationSummary(Reply):
    """An evaluation in a list."""

    id: str
    name: str
    status: str
    dataset_id: str
    candidate: str
    baseline: str | None = None
    candidate_model: str
    baseline_model: str | None = None
    verdict: Verdict | None = None
    reason: str | None = None
    examples: ExampleCounts
    created_at: Timestamp
    started_at: Timestamp | None = None
    completed_at: Timestamp | None = None
    tags: dict[str, str] = Field(default_factory=dict)


class Evaluation(EvaluationSummary):
    """An evaluation with its settings and its report, which changes while it runs."""

    settings: EvaluationSettings
    graders: list[GraderReport] = Field(default_factory=list[GraderReport])
    slices: list[SliceReport] = Field(default_factory=list[SliceReport])
    sentence: Annotated[str | None, Field(description="The verdict in words.")] = None
    stopped_early: bool = False
    leaks_checked: Annotated[
        bool,
        Field(description="Whether the training data of both models were known and compared."),
    ] = False
    used_before: Annotated[
        int,
        Field(
            description="Earlier verdicts on the same content; after many it is no longer held out."
        ),
    ] = 0
    rule_version: str
    dataset_sha256: str
    record: Annotated[
        str | None,
        Field(
            exclude_if=absent,
            description="Of a completed one: rules and counts as JSON, from which the verdict can be decided again.",
        ),
    ] = None
    error: Annotated[dict[str, str] | None, Field(exclude_if=absent)] = None


class EvaluationPage(Reply):
    """One page of evaluations, newest first."""

    evaluations: list[EvaluationSummary]
    pagination: Pagination


class ExampleScores(Reply):
    """The scores of one example, of `loss` in nats. `outcome` is the candidate's by the first gating grader."""

    line: Annotated[int, Field(description="Of the dataset, from 1.")]
    outcome: Outcome
    candidate: dict[str, float] | None = None
    baseline: dict[str, float] | None = None
    slices: dict[str, str] = Field(default_factory=dict)


class ExampleScoresPage(Reply):
    """One page of results, in the random order of the evaluation."""

    results: list[ExampleScores]
    pagination: Pagination

    def frame(self) -> Any:
        """A pandas frame: one row an example by its line; columns such as `candidate_<grader>` and `slice_<field>`."""
        from tuneship.contract.declaring.frames import scores_frame  # noqa: PLC0415 - loads pandas

        return scores_frame([one.model_dump() for one in self.results])


class EvaluationComparison(Reply):
    """Two evaluations of the same examples, compared by their stored scores."""

    candidate: Annotated[str, Field(description="The evaluation of this path.")]
    baseline: str
    examples: int
    graders: list[GraderReport]
    slices: list[SliceReport]
    verdict: Verdict | None
    reason: str | None = None
    sentence: str | None = None


# Examples of the OpenAPI document.
EXAMPLE_RULES = {
    "graders": [{"name": "chapter", "type": "string_check", "operation": "eq"}],
    "slice_by": ["site"],
    "margin": 0.03,
}
EXAMPLE_SETTINGS = {
    "graders": [
        {
            "name": "chapter",
            "type": "string_check",
            "operation": "eq",
            "normalize": "space",
            "input": "{{sample.output_text}}",
            "reference": "{{item.reference}}",
        }
    ],
    "gating": None,
    "margin": 0.03,
    "min_score": None,
    "slice_by": ["site"],
    "slice_margin": 0.1,
    "min_slice": 30,
    "cluster_by": None,
    "max_examples": 1000,
    "seed": 0,
    "stop_early": True,
    "max_tokens": 256,
}
EXAMPLE_COMPARED = {
    "wins": 58,
    "losses": 62,
    "ties": 872,
    "difference": -0.004,
    "low": -0.022,
    "high": 0.014,
    "p_worse": 0.392,
}
EXAMPLE_GRADER = {
    "name": "chapter",
    "measure": "score",
    "candidate": {"score": 0.593, "low": 0.562, "high": 0.623},
    "baseline": {"score": 0.597, "low": 0.566, "high": 0.627},
    **EXAMPLE_COMPARED,
    "examples_needed": None,
    "verdict": "pass",
    "reason": None,
}
EXAMPLE_SLICE = {
    "field": "site",
    "value": "A",
    "grader": "chapter",
    "examples": 410,
    "wins": 22,
    "losses": 25,
    "ties": 363,
    "difference": -0.007,
    "low": -0.035,
    "high": 0.02,
    "p_worse": 0.385,
    "verdict": "no_harm_shown",
}
EXAMPLE_SUMMARY = {
    "id": EVALUATION,
    "name": "chapters, November",
    "status": "completed",
    "dataset_id": DATASET,
    "candidate": CANDIDATE,
    "baseline": BASELINE,
    "candidate_model": MODEL,
    "baseline_model": BASE,
    "verdict": "pass",
    "reason": None,
    "examples": {"selected": 1000, "leaked": 8, "too_long": 0, "failed": 0, "scored": 992},
    "created_at": NOON,
    "started_at": NOON,
    "completed_at": LATER,
    "tags": {},
}
EXAMPLE_EVALUATION = {
    **EXAMPLE_SUMMARY,
    "settings": EXAMPLE_SETTINGS,
    "graders": [EXAMPLE_GRADER],
    "slices": [EXAMPLE_SLICE],
    "sentence": "not worse on 992 examples: 58 wins, 62 losses; 90 % interval -2.2 to +1.4 points, margin 3 points",
    "stopped_early": False,
    "leaks_checked": True,
    "used_before": 3,
    "rule_version": "1",
    "dataset_sha256": "0" * 64,
}
EXAMPLE_CREATE = {
    "name": "chapters November",
    "dataset_id": DATASET,
    "candidate": CANDIDATE,
    "baseline": BASELINE,
    **EXAMPLE_RULES,
}
EXAMPLE_RESULTS = {
    "results": [
        {
            "line": 17,
            "outcome": "win",
            "candidate": {"chapter": 1.0},
            "baseline": {"chapter": 0.0},
            "slices": {"site": "A"},
        }
    ],
    "pagination": PAGE,
}


@operation(
    "POST",
    "/v1/evaluations",
    scope="evaluations:write",
    status=201,
    errors=(
        ResourceNotFound,
        (DatasetError, 409),
        DeploymentError,
        QuotaExceeded,
    ),
    example=Example(
        {"two deployments": EXAMPLE_CREATE},
        {**EXAMPLE_EVALUATION, "status": "queued", "graders": [], "slices": [], "verdict": None},
    ),
)
def create_evaluation(evaluation: EvaluationCreate) -> Evaluation:
    """Let two deployments answer held-out examples, and judge whether the candidate is worse (additive).

    The requests are answered in the background, after everybody else's, and no text of theirs is stored.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/evaluations",
    scope="evaluations:read",
    example=Example(reply={"evaluations": [EXAMPLE_SUMMARY], "pagination": PAGE}),
)
def list_evaluations(
    limit: Limit = 20,
    offset: Offset = 0,
    status: EvaluationStatus | None = None,
    dataset_id: DatasetId | None = None,
    tags: Tags | None = None,
) -> EvaluationPage:
    """List evaluations, newest first (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/evaluations/{evaluation_id}",
    scope="evaluations:read",
    example=Example(reply=EXAMPLE_EVALUATION),
)
def get_evaluation(evaluation_id: EvaluationId) -> Evaluation:
    """Fetch one evaluation with what it has found so far (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/evaluations/{evaluation_id}/results",
    scope="evaluations:read",
    example=Example(reply=EXAMPLE_RESULTS),
)
def list_evaluation_results(
    evaluation_id: EvaluationId,
    limit: LogLimit = 100,
    offset: Offset = 0,
    outcome: Outcome | None = None,
) -> ExampleScoresPage:
    """List the scores of each example by its line number, without a text (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/evaluations/{evaluation_id}/comparison/{baseline_id}",
    scope="evaluations:read",
    errors=(InvalidRequestError, ResourceNotFound, ValidationFailed),
    example=Example(
        reply={
            "candidate": EVALUATION,
            "baseline": OTHER_EVALUATION,
            "examples": 992,
            "graders": [EXAMPLE_GRADER],
            "slices": [EXAMPLE_SLICE],
            "verdict": "pass",
            "reason": None,
            "sentence": EXAMPLE_EVALUATION["sentence"],
        }
    ),
)
def compare_evaluations(
    evaluation_id: EvaluationId, baseline_id: EvaluationId
) -> EvaluationComparison:
    """Compare the candidates of two evaluations of the same examples by their stored scores (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/evaluations/{evaluation_id}/cancel",
    scope="evaluations:write",
    errors=((InvalidRequestError, 409),),
    example=Example(reply={**EXAMPLE_EVALUATION, "status": "cancelled", "verdict": None}),
)
def cancel_evaluation(evaluation_id: EvaluationId) -> Evaluation:
    """End an evaluation; stored scores are kept (additive)."""
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/evaluations/{evaluation_id}",
    scope="evaluations:write",
    errors=((InvalidRequestError, 409), (DatasetError, 409)),
    example=Example(reply={"id": EVALUATION, "deleted": True}),
)
def delete_evaluation(evaluation_id: EvaluationId) -> Deleted:
    """Remove an ended evaluation with its scores, and a run's rows (additive); 409 while it runs."""
    raise NotImplementedError


class Evaluations(Resource[C_co]):
    """Verdicts on the answers of deployments."""

    create = Verb(create_evaluation)
    get = Verb(get_evaluation)
    wait = WaitVerb(get_evaluation, lambda found: found.status not in OPEN)
    list = Verb(list_evaluations)
    iterate = Pages(list_evaluations, lambda page: page.evaluations)
    results = Verb(list_evaluation_results)
    iterate_results = Pages(list_evaluation_results, lambda page: page.results)
    compare = Verb(compare_evaluations)
    cancel = Verb(cancel_evaluation)
    delete = Verb(delete_evaluation)
