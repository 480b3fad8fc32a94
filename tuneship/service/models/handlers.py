"""Handlers of models: base models of the catalogue and fine-tuned models as one list.

The limits of a model are in `limits.py`.
"""

from functools import partial

from tuneship.contract import models as contract
from tuneship.contract.common import Deleted
from tuneship.contract.errors import InvalidRequestError
from tuneship.contract.models import Model, ModelLimits, ModelPage
from tuneship.service.answers.field_errors import abbreviated
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.service.models.limits import limits_of_base, limits_of_tuned
from tuneship.service.models.lookup import TUNED, base_of, own_model, touch_jobs, tuned_item
from tuneship.store.database import rows, tables
from tuneship.store.database.listings import MODELS
from tuneship.store.records import deployment_records


@serves(contract.list_models)
def list_models(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    base_model: str | None = None,
    fine_tuned_only: bool = False,
    tags: dict[str, str] | None = None,
) -> ModelPage:
    """Return a page of models: base models by id, then fine-tuned ones, newest first."""
    limit = context.page_size(limit)
    # A base model has no tags and is tuned from no other, so these filters leave none.
    shown = [] if fine_tuned_only or base_model or tags else list(context.parts.catalogue)
    bases = shown[offset : offset + limit]
    page = own_page(
        context,
        MODELS,
        rows.filters_of(tables.models, tags, base_model=base_model),
        limit - len(bases),
        max(0, offset - len(shown)),
        partial(touch_jobs, context),
    )
    whole = rows.Page(page.rows, page.total + len(shown), limit, offset)
    items = [
        *map(_base_item, bases),
        *(tuned_item(context.parts.catalogue, row) for row in page.rows),
    ]
    return ModelPage(models=items, pagination=whole.pagination)


def _base_item(base: CataloguedModel) -> Model:
    return Model(
        id=base.id,
        name=base.name,
        version=base.version,
        description=base.description,
        parameters=base.parameters,
        context_length=base.context_length,
        supported_fine_tuning=base.is_tunable,
        source=base.hub_id,
        licence=base.licence,
    )


@serves(contract.get_model)
def get_model(context: Context, model_id: str) -> Model:
    """Return one model as the list shows it."""
    if not model_id.startswith(TUNED):
        return _base_item(base_of(context.parts.catalogue, model_id, "model_id"))
    with context.read() as connection:
        return tuned_item(context.parts.catalogue, own_model(context, connection, model_id))


@serves(contract.get_model_limits)
def get_model_limits(context: Context, model_id: str) -> ModelLimits:
    """Return the limits of a model, read from the checks themselves, so that they cannot differ."""
    if not model_id.startswith(TUNED):
        return limits_of_base(base_of(context.parts.catalogue, model_id, "model_id"))
    with context.read() as connection:
        row = own_model(context, connection, model_id)
    return limits_of_tuned(
        model_id, base_of(context.parts.catalogue, row["base_model"], "model_id")
    )


@serves(contract.delete_model)
def delete_model(context: Context, model_id: str) -> Deleted:
    """Remove the row, then the files; files that a kill leaves behind are set aside later."""
    if not model_id.startswith(TUNED):
        base_of(context.parts.catalogue, model_id, "model_id")
        raise InvalidRequestError("a base model cannot be deleted", status=409)
    # The write transaction comes first: no deployment of the model can be created between the check and the delete.
    connection = context.transaction
    row = own_model(context, connection, model_id)
    # A failed deployment counts too: a change can repair it.
    deployments = deployment_records.live_ids_of_model(connection, row["client_id"], row["id"])
    if deployments:
        # No `deployment_error`, which is for failures of a deployment: this request is not about one.
        raise InvalidRequestError(
            f"the model is deployed, delete its deployments first: {abbreviated(deployments)}",
            param="model_id",
            status=409,
        )

    rows.remove(connection, tables.models, model_id)
    context.parts.keyring.destroy(connection, row["blob"])
    context.after_commit.append(lambda: context.parts.blobs.delete(row["blob"]))
    return Deleted(id=model_id)
