"""Handler of the list of API keys."""

from tuneship.contract import api_keys as contract
from tuneship.contract.api_keys import ApiKey, ApiKeyPage
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.store.database.listings import API_KEYS


@serves(contract.list_api_keys)
def list_api_keys(context: Context, limit: int = 20, offset: int = 0) -> ApiKeyPage:
    """Newest first; the label, a note of the operator, stays on the host."""
    page = own_page(context, API_KEYS, [], limit, offset)
    keys = [ApiKey.model_validate(row) for row in page.rows]
    return ApiKeyPage(api_keys=keys, pagination=page.pagination)
