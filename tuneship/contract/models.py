"""Models on the wire (§2.3, §4.3): base models of the catalogue and fine-tuned models in one list."""

from pydantic import Field

from tuneship.contract.common import Limit, ModelId, Offset, Pagination, Reply, Tags, Timestamp
from tuneship.contract.operation import operation


class Model(Reply):
    """Both shapes of §2.3 in one: the fields of a fine-tuned model are null on a base model."""

    id: str
    name: str
    version: str = ""
    description: str = ""
    parameters: int | None = None
    context_length: int | None = None
    supported_fine_tuning: bool | None = None
    base_model: str | None = None
    fine_tuning_job_id: str | None = None
    created_at: Timestamp | None = None
    fine_tuning_method: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)


class ModelPage(Reply):
    """One page of models: base models by id, then fine-tuned ones, newest first."""

    models: list[Model]
    pagination: Pagination | None = None


@operation("GET", "/v1/models", scope="models:read")
def list_models(
    limit: Limit = 20,
    offset: Offset = 0,
    base_model: ModelId | None = None,
    fine_tuned_only: bool = False,
    tags: Tags | None = None,
) -> ModelPage:
    """List models (§4.3); `base_model` keeps only models tuned from that base."""
    raise NotImplementedError
