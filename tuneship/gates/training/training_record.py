"""The inputs of the training gates as JSON, from which they are decided again bit by bit. Losses and ids, no text.

Next: `training_gates.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from tuneship.gates.training.training_gates import (
    RULE_VERSION,
    FinishedJob,
    TrainingRules,
    TrainingVerdict,
    ValidationMeasure,
    judge_training,
)


@dataclass(frozen=True)
class TrainingRecord:
    """The inputs of `judge_training`. `metrics` as the service sent them."""

    job: FinishedJob
    metrics: Mapping[str, Any]
    champion: ValidationMeasure | None
    rules: TrainingRules
    rule_version: str = RULE_VERSION

    def decide(self) -> TrainingVerdict:
        """Apply the gates. Raises ValueError for a record of rules that this release does not know."""
        if self.rule_version != RULE_VERSION:
            raise ValueError(f"this release cannot judge by rule version {self.rule_version!r}")
        return judge_training(self.job, self.metrics, self.champion, self.rules)

    def to_json(self) -> str:
        """One line of JSON; floats survive bit by bit, infinities too."""
        # Not as pydantic writes JSON, where what is not finite is null.
        fields = _RECORD.dump_python(self)
        return json.dumps(fields, default=to_jsonable_python, sort_keys=True)


_RECORD: TypeAdapter[TrainingRecord] = TypeAdapter(TrainingRecord)


def training_record(text: str) -> TrainingRecord:
    """Read a record. Raises ValueError for anything else, with the place and without the value."""
    try:
        return _RECORD.validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "it"
        raise ValueError(f"{place} cannot be read ({first['type']})") from None
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
