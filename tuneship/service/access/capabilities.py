"""The security settings that this installation can enforce on this host."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from tuneship.service.access.hipaa import REQUIRED
from tuneship.settings import ServiceSettings


@dataclass(frozen=True)
class Capabilities:
    """Found out once, at the start of the service."""

    # Whether a setting can be enforced, by its name.
    able: Mapping[str, bool]
    # What hipaa mode needs and this installation lacks.
    missing_for_hipaa: Sequence[str]


def capabilities_of(settings: ServiceSettings, *, isolates: bool) -> Capabilities:
    """`isolates`: whether worker processes have no network on this host."""
    able = {
        "encryption_level": True,  # enforced for every stored file: `security/sealed_files.py`, `access/data_keys.py`
        "audit_logging": True,  # by the HTTP boundary: `access/audit_facts.py`
        "network_isolation": isolates,  # by every worker: `isolation/isolation.py`
        "private_endpoints": True,  # by `models/safeguards.py:is_within_reach`
    }
    missing = _missing_here(able, settings)
    return Capabilities({**able, "compliance_mode": not missing}, missing)


def _missing_here(able: Mapping[str, bool], settings: ServiceSettings) -> list[str]:
    """List what this installation lacks for hipaa mode. `able`: whether each safeguard, by name, is enforced."""
    missing = [
        f"{name}, which is not enforced here" for name in REQUIRED if not able.get(name, False)
    ]
    has_tls = settings.tls_certificate is not None or bool(settings.trusted_proxies)
    is_local = settings.host == "localhost"
    with suppress(ValueError):
        is_local = ip_address(settings.host).is_loopback
    if not (has_tls or (is_local and settings.cluster is None)):
        missing.append("a certificate, a declared proxy, or a service that listens on loopback")
    return missing
