"""Handler of links that sign a person in to the console."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from tuneship.contract import sign_in_links as contract
from tuneship.contract.errors import InvalidRequestError
from tuneship.contract.sign_in_links import SignInLink
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context


@serves(contract.create_sign_in_link)
def create_sign_in_link(context: Context) -> SignInLink:
    """The link has the rights of the key that makes it."""
    if not context.parts.settings.console:
        raise InvalidRequestError("this installation has no console", status=409)
    url, key_id = context.parts.public_url, context.audit_facts.key_id
    code, expires_at = context.parts.sessions.new_link(
        context.transaction, context.client_id, key_id, is_local=_is_loopback(url)
    )
    return SignInLink(url=f"{url}/console/sign-in#{code}", expires_at=expires_at)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
