"""Permissions of API keys: every scope by name, and the presets for the usual roles. Pure.

`<resource>:read` is get and list (for datasets also validate), `<resource>:write` is every change; `endpoints` covers
canary endpoints; `models:content` hands tuned models out.
Next: `tuneship/service/access/api_keys.py`, `tuneship/cli/commands/keys.py`.
"""

from collections.abc import Collection

RESOURCES = (
    "datasets",
    "jobs",
    "models",
    "deployments",
    "endpoints",
    "webhooks",
    "evaluations",
    "releases",
)
SINGLE = (
    "generate",
    "metrics:read",
    "machine:read",
    "logs:read",
    "keys:admin",
    "audit:read",
    "models:content",
    "releases:decide",
)
SCOPES = frozenset(f"{one}:{verb}" for one in RESOURCES for verb in ("read", "write")) | {*SINGLE}

# The audit log says who did what, and the machine's metrics add up what all tenants do: reading either is a role of
# its own.
_READING = frozenset(scope for scope in SCOPES if scope.endswith(":read")) - {
    "audit:read",
    "machine:read",
}


def _writing(*resources: str) -> frozenset[str]:
    return frozenset(f"{resource}:write" for resource in resources)


# Each is the least that its role needs: an operator ships models and does not train them.
PRESETS = {
    "viewer": _READING,
    "trainer": _READING | _writing("datasets", "jobs", "evaluations"),
    "operator": _READING
    | _writing("models", "deployments", "endpoints", "webhooks", "evaluations", "releases")
    | {"generate", "releases:decide"},
    # Whoever decides about a release, and changes nothing else.
    "approver": _READING | {"releases:decide"},
    # What the shipped flows call, and so what a Prefect worker needs: it takes no model away and imports none.
    "pipeline": _READING - {"webhooks:read", "logs:read"}
    | _writing("datasets", "jobs", "deployments", "endpoints", "evaluations", "releases")
    | {"generate"},
    "inference": frozenset({"generate"}),
    "auditor": frozenset({"audit:read"}),
    "monitoring": frozenset({"metrics:read", "machine:read"}),
    # Taking a tuned model away is in no preset: whoever may do so is named.
    "admin": SCOPES - {"models:content"},
}


class UnknownScope(ValueError):
    """A name, kept in `name`, that is neither a scope nor a preset."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is neither a scope nor a preset")
        self.name = name


def scopes_of(names: str) -> frozenset[str]:
    """The scopes behind a comma-separated list of scopes and presets. Raises `UnknownScope`."""
    found: set[str] = set()
    for name in (one.strip() for one in names.split(",")):
        # A misspelled scope must not pass for none: the key would fail much later, at its first use.
        if name not in SCOPES and name not in PRESETS:
            raise UnknownScope(name)
        found |= PRESETS.get(name, {name})
    return frozenset(found)


def in_short(scopes: Collection[str]) -> str:
    """The largest preset that the scopes contain, and the other scopes."""
    held = [name for name, preset in PRESETS.items() if preset <= {*scopes}]
    best = max(held, key=lambda name: len(PRESETS[name]), default=None)
    beyond = sorted({*scopes} - PRESETS[best]) if best else sorted(scopes)
    return ", ".join([best, *beyond] if best else beyond)
