"""The facts about one training that trackers write: parameters, curves, datasets, the release of its model.

The run is named by its job, so writing it again, from a later release or by `tuneship jobs export`, doubles nothing.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

TrackerName = Literal["mlflow", "tensorboard", "wandb"]
Value = bool | int | float | str


class TrackedDataset(BaseModel):
    """A dataset of a training, by its id and digest; its name and its lines stay at the service."""

    id: str
    digest: str = Field(description="SHA-256 of the uploaded file; the id where nobody knows it.")
    examples: int
    context: Literal["training", "validation"]


class TrackedRelease(BaseModel):
    """How the release of a model ended."""

    run_key: str
    outcome: str
    reason: str
    gates: dict[str, str] = Field(description="The state of each gate, by its name.")
    measures: dict[str, float] = Field(description="Numbers of the gates and of the evaluation.")
    serving: str | None = Field(
        default=None,
        description="The model that has the endpoint's traffic now; None: nothing moved.",
    )
    report: Path | None = Field(default=None, description="The folder of the report.")

    @property
    def files(self) -> list[Path]:
        """The report, the model card as Markdown and as JSON, and the pictures."""
        if self.report is None:
            return []
        texts = ("report.md", "model_card.md", "model_card.json")
        written = [self.report / name for name in texts if (self.report / name).is_file()]
        return [*written, *sorted(self.report.glob("*.png"))]


class TrackedRun(BaseModel):
    """One training that has ended, as trackers write it."""

    job_id: str
    model_name: str
    status: str
    model: str | None = Field(description="The tuned model; None where the job did not make one.")
    parameters: dict[str, Value]
    curves: dict[str, list[tuple[int, float]]] = Field(description="Step and value, by name.")
    datasets: list[TrackedDataset]
    started_at: datetime
    ended_at: datetime
    release: TrackedRelease | None = None

    def points(self) -> Iterator[tuple[str, int, float, datetime]]:
        """Name, step, value and time of every point of the curves; the same ones at every call.

        The service keeps no time for a step, so the steps are spread evenly over the time of the training.
        """
        last = max((points[-1][0] for points in self.curves.values() if points), default=1)
        duration = self.ended_at - self.started_at
        for name, points in self.curves.items():
            for step, value in points:
                yield name, step, value, self.started_at + duration * (step / max(1, last))


class TrackingTarget(BaseModel):
    """One tracker, and where it writes."""

    tracker: TrackerName
    place: str = Field(description="The URL of a server, or a folder.")
    group: str = Field(description="MLflow's experiment, the project of Weights & Biases.")


class TrackingReport(BaseModel):
    """The result of one tracker: where it wrote, or what kept it from that."""

    tracker: TrackerName
    place: str | None = None
    problem: str | None = None
