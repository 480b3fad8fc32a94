"""Finds out where a request comes from, and whether an undeclared proxy has forwarded it.

uvicorn replaces the address and the scheme of a request by those that a declared proxy (`TUNESHIP_TRUSTED_PROXIES`)
names in `X-Forwarded-For` and `X-Forwarded-Proto`. Any other header that proxies add means that the address is a
proxy's, and that the connection before it is unknown. A proxy that adds no header cannot be seen. Knows no framework.
"""

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

# Keys of a request's state: address and port of the other end of its connection, and whether that
# is a declared proxy.
PEER, IS_DECLARED = "peer", "peer is a declared proxy"
PROXY_HEADERS = {
    b"via", b"client-ip", b"x-real-ip", b"x-remote-ip", b"x-remote-addr", b"x-originating-ip", b"x-proxyuser-ip",
    b"x-azure-socketip", b"x-envoy-external-address", b"x-amzn-trace-id", b"x-appengine-user-ip", b"cdn-loop",
    b"cf-ray", b"x-host",
}  # fmt: skip
# For example True-Client-IP, X-Cluster-Client-IP, Fastly-Client-IP, X-Azure-ClientIP and
# CF-Connecting-IP.
PROXY_HEADER_ENDINGS = (
    b"client-ip", b"clientip", b"connecting-ip", b"connecting-ipv6", b"connection-ip",
)  # fmt: skip


def names_a_proxy(header: bytes) -> bool:
    """Whether a header, by its lower-case name, is one that proxies add."""
    is_listed = header in PROXY_HEADERS or header.endswith(PROXY_HEADER_ENDINGS)
    return is_listed or b"forwarded" in header


def is_scheme_known(scope: Mapping[str, Any]) -> bool:
    """Whether a request came directly, or a declared proxy has named its original scheme."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if not any(names_a_proxy(name) for name, _ in headers):
        return True
    schemes = {value.strip() for name, value in headers if name == b"x-forwarded-proto"}
    return _peer_is_declared(scope) and schemes == {scope["scheme"].encode()}


def is_address_known(scope: Mapping[str, Any]) -> bool:
    """Whether a request came directly, or a declared proxy has named its original address."""
    if not any(names_a_proxy(name) for name, _ in scope["headers"]):
        return True
    is_replaced = scope["client"] != scope["state"].get(PEER)
    return _peer_is_declared(scope) and is_replaced


def _peer_is_declared(scope: Mapping[str, Any]) -> bool:
    return scope["state"].get(IS_DECLARED, False)


def plain_address(host: str) -> str:
    """An address in its usual form, IPv4 also if it was mapped into IPv6; empty for text that is no address."""
    with suppress(ValueError):
        address = ip_address(host)
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return str(address)
    return ""


def source_of(host: str) -> str:
    """The source that limits by address count: an IPv4 address, or a /64 network of IPv6, which one caller has."""
    plain = plain_address(host)
    if ":" not in plain:
        return plain
    return str(ip_network(f"{plain.partition('%')[0]}/64", strict=False))
