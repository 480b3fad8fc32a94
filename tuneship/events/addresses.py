"""Decides which receivers may be called (SSRF), by the form of their URL and explicit lists of networks; pure.

`ipaddress.is_global` and `is_private` are not used: in Python 3.11 each lets more than ten dangerous networks through
(multicast, IPv4 inside IPv6, 100.64/10, ...). The resolved address decides, never its text: `127.1`, `0x7f000001` and
`2130706433` count as names until the resolver has turned them into 127.0.0.1.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HTTP_PORT, HTTPS_PORT, FIRST_FREE_PORT, LAST_PORT = 80, 443, 1024, 65535


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(cidr) for cidr in text.split())


NOT_PUBLIC_V4 = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24"
    " 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4"
)
# All that IANA has assigned for unicast; IPv4-mapped, NAT64, link-local and multicast addresses are outside.
PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_V6 = _networks("2001::/23 2001:db8::/32 2002::/16 3fff::/20")
# The networks that an operator's CIDR can open: private ones and this machine. Even 0.0.0.0/0 opens no others.
OPENABLE = _networks(
    "10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 172.16.0.0/12 192.168.0.0/16 ::1/128 fc00::/7"
)
# Where clouds hand out credentials; all but the first are inside openable or public networks.
NEVER = _networks("169.254.0.0/16 100.100.100.200/32 168.63.129.16/32 fd00:ec2::/32 fd20:ce::/32")

# Printable ASCII only; no user information, no fragment, no backslash, no quote.
URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:\[(?P<literal>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[!$-;=?-\[\]_a-z~]*)?",
    re.IGNORECASE | re.ASCII,
)


class TargetRefused(Exception):
    """The receiver may not be called; the message completes a sentence that begins with `url`."""


@dataclass(frozen=True)
class ReceiverAddress:
    """The parsed URL of a receiver."""

    scheme: str
    # Host name, or IP address without brackets, in lower case.
    host: str
    port: int
    # Path and query.
    path: str

    @property
    def authority(self) -> str:
        """The `Host` header: the registered name, not the address that it resolves to."""
        is_default = self.port == (HTTPS_PORT if self.scheme == "https" else HTTP_PORT)
        return self._bracketed if is_default else self.host_and_port

    @property
    def host_and_port(self) -> str:
        """Host and port, even if the port is the default of the scheme."""
        return f"{self._bracketed}:{self.port}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True)
class AddressRules:
    """The receivers that this installation allows."""

    # Private networks in which receivers may be called.
    allow_cidrs: tuple[Network, ...] = ()
    # Hosts that may be called without TLS, in lower case. A name or an IP address alone must be in an allowed network,
    # too; with a port (`127.0.0.1:4201`, `[::1]:4201`) it allows this one receiver, which then needs no open network.
    allow_http_hosts: frozenset[str] = frozenset()
    # Ports of the service and the database, which none of these exceptions opens.
    closed_ports: frozenset[int] = frozenset()

    def target(self, url: str) -> ReceiverAddress:
        """Parse and check a URL. Raises `TargetRefused`."""
        match = URL.fullmatch(url)
        if match is None:
            raise TargetRefused(
                "must be https://host[:port][/path] in printable ASCII, without user information or fragment"
            )
        scheme, host = match["scheme"].lower(), (match["literal"] or match["name"]).lower()
        port = int(match["port"] or (HTTPS_PORT if scheme == "https" else HTTP_PORT))
        target = ReceiverAddress(scheme, host, port, match["path"] or "/")
        if scheme == "http" and host not in self.allow_http_hosts and not self._is_listed(target):
            raise TargetRefused("must begin with https://")
        if not (
            port == HTTPS_PORT
            or FIRST_FREE_PORT <= port <= LAST_PORT
            or (scheme == "http" and port == HTTP_PORT)
        ):
            raise TargetRefused("must use port 443 or one from 1024 to 65535")
        return target

    def check(self, target: ReceiverAddress, addresses: Sequence[str]) -> None:
        """Check every address that the host name resolves to; one bad address is enough. Raises `TargetRefused`."""
        if not addresses:
            raise TargetRefused("names a host that cannot be resolved")
        if not all(self._permits(target, address) for address in addresses):
            raise TargetRefused("must lead to a public address")

    def _is_listed(self, target: ReceiverAddress) -> bool:
        """Whether the operator has allowed exactly this receiver, by host and port."""
        return target.scheme == "http" and target.host_and_port in self.allow_http_hosts

    def _permits(self, target: ReceiverAddress, text: str) -> bool:
        """Whether one resolved address may be called."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if _within(address, NEVER):
            return False
        is_open = _is_public(address) or (
            _within(address, OPENABLE)
            and (_within(address, self.allow_cidrs) or self._is_listed(target))
        )
        is_exception = target.scheme == "http" or not _is_public(address)
        return is_open and not (is_exception and target.port in self.closed_ports)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not _within(address, NOT_PUBLIC_V4)
    return address in PUBLIC_V6 and not _within(address, NOT_PUBLIC_V6)


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)
