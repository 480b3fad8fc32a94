"""The parameters of `retrain` and the result of a skipped run: the form of its deployments, and of its file."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from flows.forms.release_form import ReleaseParameters

TrainOn = Annotated[
    Literal["everything", "what is new"],
    Field(
        description="Train on all data that is found, or only on what the last success did not have."
    ),
]
MinimumNewExamples = Annotated[
    int, Field(ge=1, description="Fewer new examples than this are not worth a training: skip.")
]


class RetrainFile(BaseModel):
    """The parameter file of `python flows/retrain.py`."""

    release: ReleaseParameters
    train_on: TrainOn = "everything"
    minimum_new_examples: MinimumNewExamples = 1
    dataset_id: str | None = None


class Skipped(BaseModel):
    """The result of a run that had nothing to do."""

    outcome: Literal["skipped"] = "skipped"
    reason: Literal["no_data", "no_new_data", "too_little_new_data", "dataset_is_not_for_this"]
    message: str
