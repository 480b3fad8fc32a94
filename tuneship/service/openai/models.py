"""Handlers of models: base models, tuned models, and endpoints by their names."""

from tuneship.contract.errors import ModelNotFound
from tuneship.contract.models import Model
from tuneship.contract.openai import models as contract
from tuneship.contract.openai.ids import own_model_id
from tuneship.contract.openai.models import ModelDeleted, ModelObject, ModelObjects
from tuneship.service.answers.field_errors import with_names
from tuneship.service.context.context import WHOLE_LIST, Context
from tuneship.service.deployments.implicit import remove_implicit
from tuneship.service.models import handlers as models
from tuneship.service.models.lookup import TUNED
from tuneship.service.openai.bindings import serves_openai
from tuneship.store.database.tables import EndpointRow
from tuneship.store.records import endpoint_records

NAMES = {"model_id": "model"}


@serves_openai(contract.openai_list_models)
def openai_list_models(context: Context) -> ModelObjects:
    """Return them at once, the newest first: clients of this list ask for no second page."""
    with context.read() as connection:
        endpoints = endpoint_records.active_of(connection, context.client_id)
    found = models.list_models(context, limit=WHOLE_LIST).models
    shown = [_shown_model(context, model) for model in found]
    return ModelObjects(data=[*(_shown_endpoint(one) for one in endpoints), *shown])


@serves_openai(contract.openai_get_model)
def openai_get_model(context: Context, model_id: str) -> ModelObject:
    """Return the endpoint of this name, else the model."""
    with context.read() as connection:
        endpoint = endpoint_records.named(connection, context.client_id, model_id)
    if endpoint is not None:
        return _shown_endpoint(endpoint)
    with with_names(NAMES):
        identifier = own_model_id(model_id, context.client_id)
        return _shown_model(context, models.get_model(context, identifier))


@serves_openai(contract.openai_delete_model, is_long=True)
def openai_delete_model(context: Context, model_id: str) -> ModelDeleted:
    """Delete a tuned model as the main API does, and before it the deployment that was made for its name."""
    identifier = own_model_id(model_id, context.client_id)
    with with_names(NAMES):
        if not identifier.startswith(TUNED):
            raise ModelNotFound("only a tuned model can be deleted", param="model_id")
        models.get_model(context, identifier)
        remove_implicit(context, identifier)
        models.delete_model(context, identifier)
    return ModelDeleted(id=identifier)


def _shown_model(context: Context, model: Model) -> ModelObject:
    created = 0 if model.created_at is None else int(model.created_at.timestamp())
    owner = "tuneship" if model.base_model is None else context.client_id
    return ModelObject(id=model.id, created=created, owned_by=owner)


def _shown_endpoint(row: EndpointRow) -> ModelObject:
    created = int(row["created_at"].timestamp())
    return ModelObject(id=row["name"], created=created, owned_by=row["client_id"])
