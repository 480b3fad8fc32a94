"""The block that holds a service's address and key in a Prefect server, for workers without them in their environment.

Its name is `default`. The key is shown as `********`; but whoever may run flows there can read it, as any secret of
Prefect.
"""

from tuneship.prefect.connection import settings_from_surroundings
from tuneship.prefect.credentials import TuneshipCredentials


def store_credentials() -> None:
    """Create or update the block with the credentials of this environment, or of the local service."""
    settings = settings_from_surroundings()
    TuneshipCredentials.register_type_and_schema()
    TuneshipCredentials(
        url=settings.url, api_key=settings.api_key, client_id=settings.client_id
    ).save("default", overwrite=True)
