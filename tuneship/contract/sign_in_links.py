"""Links that sign a person in to the console, once (additive)."""

from pydantic import Field

from tuneship.contract.common import Reply, Timestamp
from tuneship.contract.declaring.examples import LATER
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Resource, Verb
from tuneship.contract.errors import InvalidRequestError


class SignInLink(Reply):
    """An address that signs in whoever opens it first, with the rights of the key that made it."""

    url: str = Field(
        description="Works once. The code is in the fragment, which browsers send to nobody; one for a service on a "
        "loopback address works on that machine only."
    )
    expires_at: Timestamp


@operation(
    "POST",
    "/v1/sign-in-links",
    scope="deployments:read",
    errors=((InvalidRequestError, 409),),
    example=Example(
        reply={"url": "https://tuneship.example/console/sign-in#8RkPq3", "expires_at": LATER}
    ),
)
def create_sign_in_link() -> SignInLink:
    """Make a link that signs a person in to the console; 409 where the installation has no console."""
    raise NotImplementedError


class SignInLinks(Resource[C_co]):
    """Links that sign a person in to the console."""

    create = Verb(create_sign_in_link)
