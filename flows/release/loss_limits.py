"""The limits of the training gates on the loss, as reports and pictures show them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """The limit of a training gate on a loss."""

    gate: str
    value: float
    # The model's loss as the gate sees it, by row, which is another number than the curve's; None until it has decided.
    judged: float | None = None
