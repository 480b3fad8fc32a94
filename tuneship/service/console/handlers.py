"""Handler of links that sign a person in to the console."""

from tuneship.contract import sign_in_links as contract
from tuneship.contract.errors import InvalidRequestError
from tuneship.contract.sign_in_links import SignInLink
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context


@serves(contract.create_sign_in_link)
def create_sign_in_link(context: Context) -> SignInLink:
    """The link has the rights of the key that makes it."""
    parts = context.parts
    if not parts.settings.console:
        raise InvalidRequestError("this installation has no console", status=409)
    url, expires_at = parts.sessions.new_link(
        context.transaction, context.client_id, context.audit_facts.key_id, parts.public_url
    )
    return SignInLink(url=url, expires_at=expires_at)
