"""The commands made from the declared operations: a group for each resource, a command for each of its verbs.

Nothing is listed here by hand: a new operation with its verb (`tuneship/contract/`) is a new command.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.declaring.pages import Paged
from tuneship.contract.declaring.verbs import Blocking, Pages, Resource, Verb
from tuneship.contract.resources import Api

# Groups with a shorter name than their resource has.
GROUP_NAMES = {"canary_endpoints": "canary"}
# Notes in docstrings for readers of the code: sections of the API's description.
NOTES = re.compile(r" ?\((?:additive|§[^)]*)\)")


@dataclass(frozen=True)
class DeclaredVerb:
    """One verb of a resource: `jobs create`."""

    group: str
    name: str
    operation: Operation[..., Any]
    # How its list is walked, where it is one.
    paged: Paged[Any, Any] | None
    # Whether the resource has a method that follows it, such as `follow_logs`.
    can_follow: bool

    @property
    def sentence(self) -> str:
        """The sentence of its help: the beginning of the operation's docstring, without notes."""
        text = self.operation.declaration.__doc__ or ""
        return NOTES.sub("", text.partition("\n\n")[0]).strip()


class _Declared(Api[Any]):
    """The resources by name, without a client behind them."""

    def __init__(self) -> None:
        self._bind_resources(Blocking())


@cache
def resources() -> dict[str, Resource[Any]]:
    """Every resource by the name of its group, in the order of the client."""
    return {
        GROUP_NAMES.get(name, name.replace("_", "-")): resource
        for name, resource in vars(_Declared()).items()
    }


@cache
def verbs_of(group: str) -> dict[str, DeclaredVerb]:
    """The verbs of a resource by the names of their commands."""
    kind = type(resources()[group])
    attributes = {name: value for base in kind.__mro__ for name, value in vars(base).items()}
    walks = {
        one.paged.operation.name: one.paged for one in attributes.values() if isinstance(one, Pages)
    }
    return {
        command_name(name): DeclaredVerb(
            group=group,
            name=command_name(name),
            operation=verb.operation,
            paged=walks.get(verb.operation.name),
            can_follow=f"follow_{name}" in attributes,
        )
        for name, verb in attributes.items()
        if isinstance(verb, Verb)
    }


def command_name(name: str) -> str:
    """The command of a verb: `import_` has an underscore that only Python needs."""
    return name.rstrip("_").replace("_", "-")


def list_of(hint: Any) -> DeclaredVerb | None:
    """The list operation that finds ids of this type: that of the resource whose paths take such an id first."""
    for group in resources():
        verbs = verbs_of(group)
        for verb in verbs.values():
            first = verb.operation.path_parameters[:1]
            if first and verb.operation.hints[first[0]] == hint and "list" in verbs:
                return verbs["list"]
    return None
