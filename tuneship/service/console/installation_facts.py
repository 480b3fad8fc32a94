"""The facts of an installation, as a page may show them to any tenant: no secret, no path, no address."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuneship.settings import ConsoleSettings, LimitSettings


@dataclass(frozen=True)
class InstallationFacts:
    """They stay as they are until the service starts again."""

    version: str
    database: str
    is_in_cluster: bool
    # Whether a safeguard is enforced here, by its name, as `/healthz` says.
    safeguards: Mapping[str, bool]
    # What hipaa mode needs and this installation lacks.
    missing_for_hipaa: Sequence[str]
    limits: LimitSettings
    console: ConsoleSettings
    has_openai: bool
    allows_drills: bool
