"""What may be asked of a model: the contract's own bounds of every hyperparameter, and what the checkpoint says."""

from typing import Any, cast, get_args

from tuneship.contract.jobs import FineTuningMethod, Hyperparameters
from tuneship.contract.models import HyperparameterLimits, ModelLimits
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.models.hyperparameters import usual_alpha

# A bound that JSON readers cannot hold exactly is one of the wire, not of the hyperparameter.
BEYOND_NUMBERS = 2**53


def limits_of_base(base: CataloguedModel) -> ModelLimits:
    """A model that can be tuned."""
    return ModelLimits(
        id=base.id,
        fine_tuning_methods=list(get_args(FineTuningMethod)),
        hyperparameters=hyperparameter_limits(),
        target_modules=sorted(base.linear_modules),
        context_length=base.context_length,
        max_output_tokens=base.context_length,
    )


def limits_of_tuned(identifier: str, base: CataloguedModel) -> ModelLimits:
    """A model that is only served."""
    return ModelLimits(
        id=identifier,
        fine_tuning_methods=[],
        hyperparameters={},
        target_modules=[],
        context_length=base.context_length,
        max_output_tokens=base.context_length,
    )


def hyperparameter_limits() -> dict[str, HyperparameterLimits]:
    """By name, read from the schema of the request's own model."""
    properties: dict[str, Any] = Hyperparameters.model_json_schema()["properties"]
    defaults = Hyperparameters().model_dump()
    defaults["lora_alpha"] = usual_alpha(defaults["lora_rank"])
    return {name: _limits(told, defaults[name]) for name, told in properties.items()}


def _limits(told: dict[str, Any], default: Any) -> HyperparameterLimits:
    branches = cast("list[dict[str, Any]]", told.get("anyOf", [told]))
    own = next(one for one in branches if one["type"] in ("number", "integer", "array"))
    return HyperparameterLimits(
        type=own["type"],
        min=own.get("minimum", own.get("exclusiveMinimum")),
        max=_bound(own.get("maximum", own.get("exclusiveMaximum"))),
        exclusive_min="exclusiveMinimum" in own,
        exclusive_max="exclusiveMaximum" in own,
        default=default,
        auto=any(one.get("const") == "auto" for one in branches),
        description=told.get("description", ""),
    )


def _bound(number: float | None) -> float | None:
    return None if number is None or number > BEYOND_NUMBERS else number
