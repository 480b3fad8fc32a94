"""Security settings: one that cannot be enforced is refused by name, never accepted and ignored.

A resource keeps its settings for life, but a host's capabilities can change: stored settings are checked again after a
restart, before a process is started for the resource and before it answers.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, TypeVar

from tuneship.contract.deployments import DeploymentSecuritySettings
from tuneship.contract.jobs import JobSecuritySettings
from tuneship.service.access import hipaa
from tuneship.service.access.capabilities import Capabilities
from tuneship.service.answers.field_errors import field_error
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.context.context import Context
from tuneship.service.models.served_models import FoundModel
from tuneship.store.database.tables import DeploymentRow

# Values that request nothing. Every stored file is sealed in any case; `maximum` insists on it.
OFF = (False, "standard", "none")
# Settings that another engine cannot keep: it opens sockets of its own, and reads unsealed adapters.
OTHER_ENGINES_LACK = ("network_isolation", "encryption_level")

S = TypeVar("S", JobSecuritySettings, DeploymentSecuritySettings)


class SafeguardLost(Exception):
    """An accepted setting can no longer be enforced; the message names it and its requirement."""


def in_force(context: Context, settings: S) -> S:
    """The settings of a new resource, including those that `compliance_mode` turns on.

    Raises `ValidationFailed` for a contradiction, and for a setting that cannot be enforced here or for this caller.
    """
    capabilities = context.parts.capabilities
    if settings.compliance_mode == hipaa.HIPAA:
        settings = hipaa.with_required_settings(settings)
        hipaa.refuse_create(capabilities.missing_for_hipaa, context.caller)
    for name in _not_enforced(capabilities, settings.model_dump()):
        here = (
            "this host does not allow"
            if name in capabilities.able
            else "this release does not enforce"
        )
        raise field_error(
            f"security_settings.{name}",
            f"asks for a safeguard that {here}",
            code="not_enforced",
        )
    return settings


def _not_enforced(capabilities: Capabilities, settings: Mapping[str, Any]) -> list[str]:
    """The names of the settings that request more than can be enforced."""
    able = capabilities.able
    return [name for name, value in settings.items() if value not in OFF and not able.get(name)]


def check_kept(capabilities: Capabilities, settings: Mapping[str, Any]) -> None:
    """Raise `SafeguardLost` for stored settings that this installation cannot enforce now."""
    lost = [f"security_settings.{name}" for name in _not_enforced(capabilities, settings)]
    if not lost:
        return
    text = f"{', '.join(lost)} cannot be enforced here any more (GET /healthz)"
    if hipaa.MODE in lost:
        text += f"; {hipaa.MODE} needs {'; and '.join(capabilities.missing_for_hipaa)}"
    raise SafeguardLost(text)


def check_served(
    capabilities: Capabilities, settings: Mapping[str, Any], served: FoundModel
) -> None:
    """Raise `SafeguardLost` where a deployment's settings cannot be enforced for the model that it serves."""
    check_kept(capabilities, settings)
    if lacked := _lacked_by_others(settings, served.base):
        engine = f"which {served.base.runtime} serves now"
        raise SafeguardLost(
            f"security_settings.{lacked} cannot be had with the base model, {engine}"
        )


def _lacked_by_others(settings: Mapping[str, Any], base: CataloguedModel) -> str | None:
    """The first requested setting that the base model's engine cannot keep; None if it keeps all."""
    requested = [name for name in OTHER_ENGINES_LACK if settings[name] not in OFF]
    return requested[0] if requested and not base.engine.is_own else None


def refuse_what_others_lack(settings: DeploymentSecuritySettings, base: CataloguedModel) -> None:
    """Refuse settings that the base model's engine cannot honour. Raises `ValidationFailed`."""
    if lacked := _lacked_by_others(settings.model_dump(), base):
        raise field_error(
            f"security_settings.{lacked}",
            f"cannot be had with a base model that {base.runtime} serves",
            code="not_enforced",
        )


def is_within_reach(context: Context, deployment: DeploymentRow) -> bool:
    """Whether this caller's address may use a deployment; a private one serves only the networks in the settings.

    Behind an undeclared proxy the caller's address is unknown, and so in none of them.
    """
    if not deployment["security_settings"]["private_endpoints"]:
        return True
    if not (context.audit_facts.address and context.caller.is_address_known):
        return False
    address = ip_address(context.audit_facts.address)
    return any(address in network for network in context.parts.settings.private_networks)
