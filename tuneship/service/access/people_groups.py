"""The table that says what the groups of a provider of OpenID Connect may do here.

A file is YAML: `groups: [{group, tenant, scopes: [...]}]`. The first entry whose group a person is in names the tenant;
the rights are those of all entries of that tenant whose groups the person is in.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from tuneship.contract.common import StrictModel
from tuneship.contract.declaring.scopes import UnknownScope, scopes_of
from tuneship.host.operator_files import read_yaml
from tuneship.host.startup import StartupError

# As `tuneship keys create` takes them.
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]
GroupName = Annotated[str, Field(min_length=1, max_length=256)]


def _known_scope(name: str) -> str:
    try:
        scopes = scopes_of(name)
    except UnknownScope:
        # The name may be anything that was typed.
        raise ValueError("must be a scope or a preset of `tuneship keys create`") from None
    if "models:content" in scopes:
        raise ValueError("must not be models:content, which no session of the console has")
    return name


class _GroupEntry(StrictModel):
    group: GroupName
    tenant: TenantName
    scopes: Annotated[list[Annotated[str, AfterValidator(_known_scope)]], Field(min_length=1)]


class _GroupsFile(StrictModel):
    groups: Annotated[list[_GroupEntry], Field(min_length=1, max_length=1000)]


class GroupsFault(StartupError):
    """The file of groups cannot be used; the message has the file and the place."""


@dataclass(frozen=True)
class GrantedRights:
    """The tenant of a person and the scopes in it."""

    client_id: str
    scopes: frozenset[str]


class PeopleGroups:
    """The rights of people by their groups."""

    def __init__(self, file: Path) -> None:
        """Read the file. Raises `GroupsFault`."""
        self._entries = read_yaml(file, _GroupsFile, "file of groups", GroupsFault).groups

    def rights_of(self, groups: Collection[object]) -> GrantedRights | None:
        """The rights of somebody in these groups, as a provider sent them; None where no entry names any of them."""
        found = [entry for entry in self._entries if entry.group in groups]
        if not found:
            return None
        tenant = found[0].tenant
        names = [",".join(entry.scopes) for entry in found if entry.tenant == tenant]
        return GrantedRights(tenant, scopes_of(",".join(names)))
