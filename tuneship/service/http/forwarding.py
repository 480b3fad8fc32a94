"""Where a request comes from, and whether a proxy that nobody declared has handed it on.

uvicorn replaces the address and the scheme of a request by what a declared proxy (`TUNESHIP_TRUSTED_PROXIES`) says in
`X-Forwarded-For` and `X-Forwarded-Proto`. Any other header by which proxies show themselves means that the address is
a proxy's and that the way before it is unknown. A proxy that adds no header cannot be seen. Knows no framework.
"""

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

# In a request's state: address and port of the other end of its connection, and whether that is a
# declared proxy.
PEER, IS_DECLARED = "peer", "peer is a declared proxy"
NAMED = {
    b"via", b"client-ip", b"x-real-ip", b"x-remote-ip", b"x-remote-addr", b"x-originating-ip", b"x-proxyuser-ip",
    b"x-azure-socketip", b"x-envoy-external-address", b"x-amzn-trace-id", b"x-appengine-user-ip", b"cdn-loop",
    b"cf-ray", b"x-host",
}  # fmt: skip
# E.g. of True-Client-IP, X-Cluster-Client-IP, Fastly-Client-IP, X-Azure-ClientIP and
# CF-Connecting-IP.
ENDINGS = (b"client-ip", b"clientip", b"connecting-ip", b"connecting-ipv6", b"connection-ip")


def names_a_proxy(header: bytes) -> bool:
    """Whether a header, by its lower-case name, is one that proxies add."""
    return b"forwarded" in header or header in NAMED or header.endswith(ENDINGS)


def is_scheme_known(scope: Mapping[str, Any]) -> bool:
    """Whether a request came here directly, or a declared proxy has said by which scheme it came."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if not any(names_a_proxy(name) for name, _ in headers):
        return True
    said = {value.strip() for name, value in headers if name == b"x-forwarded-proto"}
    return _peer_is_declared(scope) and said == {scope["scheme"].encode()}


def is_address_known(scope: Mapping[str, Any]) -> bool:
    """Whether a request came here directly, or a declared proxy has said from which address it came."""
    if not any(names_a_proxy(name) for name, _ in scope["headers"]):
        return True
    is_replaced = scope["client"] != scope["state"].get(PEER)
    return _peer_is_declared(scope) and is_replaced


def _peer_is_declared(scope: Mapping[str, Any]) -> bool:
    return scope["state"].get(IS_DECLARED, False)


def plain_address(host: str) -> str:
    """An address as we write it, IPv4 also when it came in IPv6's clothes; empty for what is no address."""
    with suppress(ValueError):
        address = ip_address(host)
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return str(address)
    return ""


def source_of(host: str) -> str:
    """What limits by address count as one: an IPv4 address, or a network of IPv6, of which a caller has a whole one."""
    plain = plain_address(host)
    if ":" not in plain:
        return plain
    return str(ip_network(f"{plain.partition('%')[0]}/64", strict=False))
