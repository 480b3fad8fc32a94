"""Where work can run: the instance types that the service knows, and those that this installation has."""

from tuneship.contract.errors import InstanceTypeUnavailable
from tuneship.service.refusals import refused

AVAILABLE = frozenset({"local"})
KNOWN = AVAILABLE | {"local-gpu"}


def check_instance_type(name: str, param: str) -> None:
    """Raises `ValidationRefused` for a type that nobody has."""
    if name not in KNOWN:
        raise refused(param, f"must be one of: {', '.join(sorted(KNOWN))}")


def require_instance_type(name: str, param: str) -> None:
    """Raises `InstanceTypeUnavailable` for a type that this installation does not have."""
    if name not in AVAILABLE:
        raise InstanceTypeUnavailable(f"this installation has no {param} of that type", param=param)
