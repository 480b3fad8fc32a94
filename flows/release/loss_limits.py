"""The limits of the training gates on the validation loss, as reports and pictures show them."""

from dataclasses import dataclass

from tuneship.gates.training_gates import TrainingRules


@dataclass(frozen=True)
class Limit:
    """The limit of a training gate on the validation loss."""

    gate: str
    value: float


def limits_of(rules: TrainingRules, champion_best: float | None) -> list[Limit]:
    """The limits on the validation loss that are known before the gates decide."""
    if champion_best is not None:
        return [Limit("T4 champion", champion_best + rules.champion_margin)]
    if rules.max_validation_loss is not None:
        return [Limit("T9 first model", rules.max_validation_loss)]
    return []
