"""Refuses a release whose model, or base model, the service does not have, before anything waits or is created."""

from flows.forms.release_form import ReleaseParameters
from tasks.endpoints import NO_SUCH_ROUTE
from tasks.models import get_model
from tuneship.client import ApiError
from tuneship.contract.errors import ModelNotFound


def refuse_unknown_model(release: ReleaseParameters) -> None:
    """Raise `ModelNotFound`, with the field's name, if the service does not have what is to be released or tuned."""
    field, model = "model", release.model
    if model is None:
        field, model = "base_model", release.base_model
    try:
        get_model(model)
    except ApiError as error:
        if isinstance(error, ModelNotFound):
            raise ModelNotFound(error.message.replace("model_id", field, 1), param=field) from None
        # A bare server may be unable to say which models it has.
        if error.status not in NO_SUCH_ROUTE:
            raise
