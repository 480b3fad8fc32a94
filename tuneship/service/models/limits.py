"""The limits of a model: the contract's bounds of every hyperparameter, and the sizes that its checkpoint states."""

from typing import Any, cast, get_args

from tuneship.contract.jobs import FineTuningMethod, Hyperparameters
from tuneship.contract.models import HyperparameterLimits, ModelLimits
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.models.hyperparameters import usual_alpha

# A larger bound is one of the wire format, not of the hyperparameter: JSON readers cannot hold it exactly.
LARGEST_EXACT_NUMBER = 2**53


def limits_of_base(base: CataloguedModel) -> ModelLimits:
    """The limits of a base model, which can be tuned."""
    return ModelLimits(
        id=base.id,
        fine_tuning_methods=list(get_args(FineTuningMethod)),
        hyperparameters=hyperparameter_limits(),
        target_modules=sorted(base.linear_modules),
        context_length=base.context_length,
        max_output_tokens=base.context_length,
    )


def limits_of_tuned(identifier: str, base: CataloguedModel) -> ModelLimits:
    """The limits of a fine-tuned model, which can only be served."""
    return ModelLimits(
        id=identifier,
        fine_tuning_methods=[],
        hyperparameters={},
        target_modules=[],
        context_length=base.context_length,
        max_output_tokens=base.context_length,
    )


def hyperparameter_limits() -> dict[str, HyperparameterLimits]:
    """Limits by hyperparameter name, from the schema that checks requests."""
    properties: dict[str, Any] = Hyperparameters.model_json_schema()["properties"]
    defaults = Hyperparameters().model_dump()
    defaults["lora_alpha"] = usual_alpha(defaults["lora_rank"])
    limits: dict[str, HyperparameterLimits] = {}
    for name, schema in properties.items():
        # A hyperparameter may also be "auto" or null: its bounds are in the branch of the number, or of the list.
        branches = cast("list[dict[str, Any]]", schema.get("anyOf", [schema]))
        own = next(one for one in branches if one["type"] in ("number", "integer", "array"))
        largest = own.get("maximum", own.get("exclusiveMaximum"))
        limits[name] = HyperparameterLimits(
            type=own["type"],
            min=own.get("minimum", own.get("exclusiveMinimum")),
            max=None if largest is None or largest > LARGEST_EXACT_NUMBER else largest,
            exclusive_min="exclusiveMinimum" in own,
            exclusive_max="exclusiveMaximum" in own,
            default=defaults[name],
            auto=any(branch.get("const") == "auto" for branch in branches),
            description=schema.get("description", ""),
        )
    return limits
