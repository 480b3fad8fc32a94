"""`compliance_mode: hipaa`: the settings that it turns on, and its rules for installation, API key and connection.

It is the union of the other safeguards and of rules without a setting: a request comes over TLS or from this machine,
with a key of at most 90 days. Safeguards of every installation need no rule here: no text is stored, and workers leave
no core file. Names are left out of webhooks by `store/records/outbox.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from tuneship.contract.deployments import DeploymentSecuritySettings
from tuneship.contract.errors import (
    ErrorDetail,
    InvalidRequestError,
    PermissionDenied,
    ValidationFailed,
)
from tuneship.contract.jobs import JobSecuritySettings
from tuneship.service.answers.field_errors import field_error

HIPAA = "hipaa"
MODE = "security_settings.compliance_mode"
# The values of other settings that the mode requires, where a resource has them.
REQUIRED: Mapping[str, Any] = {
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
    """The facts about a caller that safeguards depend on. The defaults are the worst case."""

    # The request came over TLS, or never left this machine; no undeclared proxy has forwarded it.
    is_private: bool = False
    # Its address is the caller's, not that of an undeclared proxy.
    is_address_known: bool = False
    # The time from the creation of the API key to its expiry; None: it never expires.
    key_lifetime: timedelta | None = None

    @property
    def has_good_key(self) -> bool:
        """Whether the key expires soon enough."""
        return self.key_lifetime is not None and self.key_lifetime <= LONGEST_KEY

    @property
    def is_safe(self) -> bool:
        """Whether the mode accepts the request's connection and key."""
        return self.is_private and self.has_good_key


def is_hipaa(row: Mapping[str, Any]) -> bool:
    """Whether a job or deployment is in hipaa mode."""
    return row["security_settings"].get("compliance_mode") == HIPAA


def with_required_settings(settings: S) -> S:
    """The settings with every safeguard of the mode. Raises `ValidationFailed` for a field that contradicts it."""
    required = {name: REQUIRED[name] for name in REQUIRED if name in type(settings).model_fields}
    for name, value in required.items():
        if name in settings.model_fields_set and getattr(settings, name) != value:
            raise field_error(
                f"security_settings.{name}", "contradicts compliance_mode", "contradiction"
            )
    return settings.model_copy(update=required)


def refuse_create(missing: Sequence[str], caller: Caller) -> None:
    """Refuse to create a resource in hipaa mode if a prerequisite is missing; `ValidationFailed` names all missing
    ones.
    """
    if not caller.is_private:
        missing = [*missing, GOOD_WAY]
    if not caller.has_good_key:
        missing = [*missing, GOOD_KEY]
    if missing:
        details = [ErrorDetail(MODE, "missing_prerequisite", f"needs {name}") for name in missing]
        text = f"{MODE} needs {'; and '.join(missing)}"
        raise ValidationFailed(text, param=MODE, details=details)


def refuse_use(caller: Caller) -> None:
    """Refuse a request over plain HTTP from elsewhere (`InvalidRequestError`), or with a long-lived key
    (`PermissionDenied`).
    """
    if not caller.is_private:
        raise InvalidRequestError(f"a resource in hipaa mode needs {GOOD_WAY}")
    if not caller.has_good_key:
        raise PermissionDenied(f"a resource in hipaa mode needs {GOOD_KEY}")
