"""Address and credentials of a service as a Prefect block: entered in the UI, kept by the Prefect server."""

from typing import TYPE_CHECKING

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from tuneship.settings import ClientSettings

if TYPE_CHECKING:  # Prefect loads this module at each of its commands
    from tuneship.client import Client


class TuneshipCredentials(Block):
    """Address, API key and client id of a tuneship service."""

    _block_type_name = "Tuneship credentials"
    _block_type_slug = "tuneship-credentials"

    url: str = Field(description="Address of the service, e.g. http://127.0.0.1:8700.")
    api_key: SecretStr
    client_id: str

    def client_settings(self) -> ClientSettings:
        """Settings of the client."""
        return ClientSettings(url=self.url, api_key=self.api_key, client_id=self.client_id)

    def get_client(self) -> "Client":
        """A client of the service; the caller closes it, e.g. `with credentials.get_client() as client`."""
        from tuneship.client import Client  # noqa: PLC0415 - starts slowly

        return Client(self.client_settings())
