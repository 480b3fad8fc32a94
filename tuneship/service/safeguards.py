"""Security settings: what is not enforced is refused by name, never accepted and ignored."""

from tuneship.contract.deployments import DeploymentSecuritySettings
from tuneship.contract.jobs import JobSecuritySettings
from tuneship.service.refusals import refused

OFF = (False, "standard", "none")
"""Values that ask for nothing. Files are 0600 and folders 0700 in any case: `encryption_level` `standard`."""


def refuse_what_is_not_enforced(
    settings: JobSecuritySettings | DeploymentSecuritySettings,
) -> None:
    """Raises `ValidationRefused` for the first setting that this release cannot enforce."""
    for name, value in settings.model_dump().items():
        if value not in OFF:
            raise refused(
                f"security_settings.{name}",
                "asks for a safeguard that this release does not enforce",
                code="not_enforced",
            )
