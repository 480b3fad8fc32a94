"""`compliance_mode: hipaa`: what it turns on, and what it needs of the installation, the key and the way of a request.

It is the union of the other safeguards and of rules that have no setting: who asks comes over TLS or from this machine,
with a key that was made for at most 90 days. What holds for every installation needs no rule here: no text is stored,
workers leave no core file. Webhooks leave out names in `store/events.py`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

from tuneship.contract.deployments import DeploymentSecuritySettings
from tuneship.contract.errors import (
    ErrorDetail,
    InvalidRequestError,
    PermissionDenied,
    ValidationRefused,
)
from tuneship.contract.jobs import JobSecuritySettings
from tuneship.service.common.refusals import refused
from tuneship.settings import ServiceSettings

HIPAA = "hipaa"
MODE = "security_settings.compliance_mode"
# What the mode asks for of the other settings, where a resource has them.
TURNED_ON: Mapping[str, Any] = {
    "network_isolation": True,
    "private_endpoints": True,
    "encryption_level": "maximum",
    "audit_logging": True,
}
LONGEST_KEY = timedelta(days=90)
GOOD_KEY = f"an API key that expires within {LONGEST_KEY.days} days of its making"
GOOD_WAY = "a request over TLS, or from the service's own machine"

S = TypeVar("S", JobSecuritySettings, DeploymentSecuritySettings)


@dataclass(frozen=True)
class Caller:
    """What the safeguards have to know of who asks. The defaults are the worst case."""

    is_private: bool = False
    """The request came over TLS, or never left this machine; no undeclared proxy has handed it on."""
    is_address_known: bool = False
    """Its address is the caller's, not that of an undeclared proxy."""
    key_lifetime: timedelta | None = None
    """From the making of the API key to its end; None: it never ends."""

    @property
    def has_good_key(self) -> bool:
        """Whether the key ends soon enough."""
        return self.key_lifetime is not None and self.key_lifetime <= LONGEST_KEY

    @property
    def is_safe(self) -> bool:
        """Whether the mode takes what this request brings."""
        return self.is_private and self.has_good_key


def is_hipaa(row: Mapping[str, Any]) -> bool:
    """Whether a job or deployment is in hipaa mode."""
    return row["security_settings"].get("compliance_mode") == HIPAA


def with_required_settings(settings: S) -> S:
    """With everything on that the mode turns on. Raises `ValidationRefused` for a field that was sent and says no."""
    wanted = {name: TURNED_ON[name] for name in TURNED_ON if name in type(settings).model_fields}
    for name, value in wanted.items():
        if name in settings.model_fields_set and getattr(settings, name) != value:
            raise refused(
                f"security_settings.{name}", "contradicts compliance_mode", "contradiction"
            )
    return settings.model_copy(update=wanted)


def missing_here(able: Mapping[str, bool], settings: ServiceSettings) -> list[str]:
    """What the installation lacks for the mode; `able`: the safeguards that it enforces."""
    missing = [
        f"{name}, which is not enforced here" for name in TURNED_ON if not able.get(name, False)
    ]
    has_tls = settings.tls_certificate is not None or bool(settings.trusted_proxies)
    if not (has_tls or _is_this_machine(settings.host)):
        missing.append("a certificate, a declared proxy, or a service that listens on loopback")
    return missing


def _is_this_machine(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def refuse_create(missing: list[str], caller: Caller) -> None:
    """Raises `ValidationRefused` that names every missing prerequisite."""
    if not caller.is_private:
        missing = [*missing, GOOD_WAY]
    if not caller.has_good_key:
        missing = [*missing, GOOD_KEY]
    if missing:
        details = [ErrorDetail(MODE, "missing_prerequisite", f"needs {one}") for one in missing]
        text = f"{MODE} needs {'; and '.join(missing)}"
        raise ValidationRefused(text, param=MODE, details=details)


def refuse_use(caller: Caller) -> None:
    """Raises `InvalidRequestError` for plain HTTP from elsewhere, `PermissionDenied` for a key that lives too long."""
    if not caller.is_private:
        raise InvalidRequestError(f"what is in hipaa mode needs {GOOD_WAY}")
    if not caller.has_good_key:
        raise PermissionDenied(f"what is in hipaa mode needs {GOOD_KEY}")
