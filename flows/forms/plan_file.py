"""The parameter file of `python flows/shift_traffic.py`: a canary plan, under `plan` or at the top level."""

from typing import Any, Self, cast

from pydantic import ValidationInfo, model_validator

from flows.forms.release_form import beside_parameters
from tuneship.gates.plan import CanaryPlan


class PlanFile(CanaryPlan):
    """The plan; the path of its prompts is relative to the file."""

    @model_validator(mode="before")
    @classmethod
    def _under_plan(cls, value: Any) -> Any:
        if isinstance(value, dict) and set(cast("dict[str, Any]", value)) == {"plan"}:
            return cast("dict[str, Any]", value)["plan"]
        return cast("Any", value)

    @model_validator(mode="after")
    def _prompts_beside_the_file(self, info: ValidationInfo) -> Self:
        if self.traffic is not None:
            self.traffic.prompts = beside_parameters(self.traffic.prompts, info)
        return self
