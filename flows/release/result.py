"""The result of a release: that of its rollout, and of the steps before it. No text of a dataset.

Next: `flows/release/reports/report.py` writes it for people.
"""

from typing import Any

from pydantic import BaseModel, Field

from flows.rollout.result import RolloutResult
from tuneship.contract.evaluations import ExampleCounts, GraderReport, SliceReport
from tuneship.contract.model_card import CardQuestion
from tuneship.tracking.tracked_run import TrackingReport

# Line numbers of lost examples that a report lists.
LOSSES_SHOWN = 20


class Accuracy(BaseModel):
    """Exact matches of both deployments by greedy generation on the same validation rows."""

    rows: int
    before: int = Field(description="Rows that the baseline answered exactly.")
    after: int = Field(description="Rows that the candidate answered exactly.")


class EvaluationFindings(BaseModel):
    """The answers of both deployments to held-out examples, in counts."""

    evaluation_id: str | None = Field(description="Null where the pipeline asked the deployments.")
    dataset_id: str | None = None
    rule_version: str | None = None
    examples: ExampleCounts | None = None
    leaks_checked: bool = Field(
        default=False, description="Whether examples were looked for in the training data."
    )
    used_before: int | None = Field(default=None, description="Earlier verdicts on the same set.")
    sentence: str
    graders: list[GraderReport]
    slices: list[SliceReport]
    lost_lines: list[int] = Field(
        description="Lines of the file, at most 20, that only the baseline answered rightly."
    )
    record: str | None = Field(
        default=None,
        description="Rules and counts, as JSON, from which the verdict can be decided again.",
    )
    dataset_sha256: str | None = Field(
        default=None,
        description="Of the lines of the held-out dataset; null: the service has none.",
    )


class Contender(BaseModel):
    """One of several jobs that trained side by side."""

    job_id: str
    status: str
    model: str | None
    validation_loss: float | None = Field(description="The lowest one, nats per token.")
    hyperparameters: dict[str, Any] = Field(description="In what it differs from the others.")
    is_best: bool = False


class ReleaseResult(RolloutResult):
    """The result of `tune_and_deploy`; fields of steps that were not reached are null."""

    run_key: str
    record: str | None = Field(default=None, description="The file of the release's record.")
    gate: str | None = Field(default=None, description="The training gate that refused.")
    training_gates: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]], description="Every gate: state, value, limit, note."
    )
    job_id: str | None = None
    contenders: list[Contender] = Field(
        default_factory=list[Contender],
        description="Every job, where several sets of hyperparameters were tried.",
    )
    model: str | None = None
    champion_model: str | None = None
    champion_validation_loss: float | None = Field(
        default=None, description="The lowest one of what served before, nats per token."
    )
    baseline_deployment_id: str | None = None
    candidate_deployment_id: str | None = None
    candidate_deleted: bool = False
    accuracy: Accuracy | None = None
    evaluation: EvaluationFindings | None = None
    questions: list[CardQuestion] = Field(
        default_factory=list[CardQuestion],
        description="What people decided about gates that held before any traffic.",
    )
    report: str | None = Field(default=None, description="The Markdown report.")
    model_card: str | None = Field(
        default=None, description="The model card as JSON; beside it the same as Markdown."
    )
    tracking: list[TrackingReport] = Field(
        default_factory=list[TrackingReport],
        description="Each tracker of the release: where it wrote, or what kept it from that.",
    )
