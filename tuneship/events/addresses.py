"""Which receivers may be called (SSRF): the form of their URL, and explicit lists of addresses. Pure; resolves nothing.

`ipaddress.is_global` and `is_private` are not used: in Python 3.11 each lets more than ten dangerous networks through
(multicast, IPv4 inside IPv6, 100.64/10, ...). An address decides, never the text that names it: `127.1`, `0x7f000001`
and `2130706433` are names until the resolver has turned them into 127.0.0.1.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HTTP_PORT, HTTPS_PORT, FIRST_FREE_PORT, LAST_PORT = 80, 443, 1024, 65535


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(one) for one in text.split())


NOT_PUBLIC_V4 = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24"
    " 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4"
)
# All that IANA has given out for unicast; IPv4 mapped, NAT64, link-local and multicast lie
# outside.
PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_V6 = _networks("2001::/23 2001:db8::/32 2002::/16 3fff::/20")
# What an operator's CIDR can open: private networks and this machine. A CIDR of 0.0.0.0/0 opens
# no more than these.
OPENABLE = _networks(
    "10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 172.16.0.0/12 192.168.0.0/16 ::1/128 fc00::/7"
)
# Where clouds give credentials to whoever asks; the second to last two lie inside openable or
# public networks.
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
    """The receiver may not be called; the text completes a sentence that begins with `url`."""


@dataclass(frozen=True)
class ReceiverAddress:
    """A receiver's address, taken apart once."""

    scheme: str
    host: str
    """A name or an IP literal without brackets, in lower case."""
    port: int
    path: str
    """With the query."""

    @property
    def authority(self) -> str:
        """The `Host` header: the name as it was registered, whatever address it resolves to."""
        is_default = self.port == (HTTPS_PORT if self.scheme == "https" else HTTP_PORT)
        return self._bracketed if is_default else self.host_and_port

    @property
    def host_and_port(self) -> str:
        """Both, also where the port is the scheme's own."""
        return f"{self._bracketed}:{self.port}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True)
class AddressRules:
    """What this installation lets its webhooks reach."""

    allow_cidrs: tuple[Network, ...] = ()
    """Private networks whose receivers may be called."""
    allow_http_hosts: frozenset[str] = frozenset()
    """Who may be called without TLS, in lower case: a name or literal, whose address must be allowed as well; or with a
    port (`127.0.0.1:4201`, `[::1]:4201`), one receiver, which then needs no open network."""
    closed_ports: frozenset[int] = frozenset()
    """The service's own and the database's: never, where an exception is what opens the address."""

    def target(self, url: str) -> ReceiverAddress:
        """Take a URL apart. Raises `TargetRefused`."""
        found = URL.fullmatch(url)
        if found is None:
            raise TargetRefused(
                "must be https://host[:port][/path] in printable ASCII, without user information or fragment"
            )
        scheme, host = found["scheme"].lower(), (found["literal"] or found["name"]).lower()
        port = int(found["port"] or (HTTPS_PORT if scheme == "https" else HTTP_PORT))
        target = ReceiverAddress(scheme, host, port, found["path"] or "/")
        if scheme == "http" and host not in self.allow_http_hosts and not self._names(target):
            raise TargetRefused("must begin with https://")
        if not (
            port == HTTPS_PORT
            or FIRST_FREE_PORT <= port <= LAST_PORT
            or (scheme == "http" and port == HTTP_PORT)
        ):
            raise TargetRefused("must use port 443 or one from 1024 to 65535")
        return target

    def check(self, target: ReceiverAddress, addresses: Sequence[str]) -> None:
        """Every address that the host's name resolves to must be good. Raises `TargetRefused`."""
        if not addresses:
            raise TargetRefused("names a host that cannot be resolved")
        if not all(self._permits(target, one) for one in addresses):
            raise TargetRefused("must lead to a public address")

    def _names(self, target: ReceiverAddress) -> bool:
        """Whether this very receiver was opened."""
        return target.scheme == "http" and target.host_and_port in self.allow_http_hosts

    def _permits(self, target: ReceiverAddress, text: str) -> bool:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if _within(address, NEVER):
            return False
        is_open = _is_public(address) or (
            _within(address, OPENABLE)
            and (_within(address, self.allow_cidrs) or self._names(target))
        )
        is_exception = target.scheme == "http" or not _is_public(address)
        return is_open and not (is_exception and target.port in self.closed_ports)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not _within(address, NOT_PUBLIC_V4)
    return address in PUBLIC_V6 and not _within(address, NOT_PUBLIC_V6)


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)
