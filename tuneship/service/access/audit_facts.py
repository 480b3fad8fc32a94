"""Collects what the audit chain records of one request, before the boundary answers it.

Recorded are all changes, every refusal for a missing scope and, where a job or deployment has `audit_logging`, all that
touches it: reads, generations and other refusals too. The setting of a job also holds for its tuned model and for every
deployment of that model. Handlers only name the rows that they looked at; the boundary does the rest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuneship.contract.generation import Usage
from tuneship.store.records.audit import Person

# An id that the service made. Anything else in a path was chosen by somebody, and may be a name.
OPAQUE_ID = re.compile(r"[a-z]{2,6}_[0-9a-z]{24}")


@dataclass
class AuditFacts:
    """The facts for one request's audit entry, as far as they are known yet."""

    key_id: str = ""
    # Who signed in to the console, where it was a person and not a key.
    person: Person | None = None
    address: str = ""
    action: str = ""
    is_change: bool = False
    # The id in the path of the request.
    path_id: str | None = None
    # The id of the resource that the request created.
    created_id: str | None = None
    # Something that the request touched has `audit_logging`.
    is_required: bool = False
    # What a live page has read before, which is in the chain: to read it again adds no entry. None elsewhere.
    known: set[tuple[str, str | None, str | None]] | None = None
    # Something that the request touched is in hipaa mode.
    touches_hipaa: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def touch(self, row: Mapping[str, Any]) -> None:
        """Note that a handler looked at this job or deployment, or at something made by this job."""
        settings = row["security_settings"]
        requires = bool(settings["audit_logging"])
        if requires and self.known is not None:
            place = (self.action, self.path_id, row.get("id"))
            requires = place not in self.known
            self.known.add(place)
        self.is_required = self.is_required or requires
        self.touches_hipaa = self.touches_hipaa or settings.get("compliance_mode") == "hipaa"

    def count(self, usage: Usage) -> None:
        """Note the tokens of a generation; called once for each."""
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens

    def requires_entry(self, status: int) -> bool:
        """Whether an answer of this status may only be given after its audit entry is committed."""
        return self.is_required or status == 403 or (self.is_change and status < 400)

    def resource_of(self, status: int) -> str | None:
        """The id to record: an opaque one, or one that exists."""
        path_id = self.path_id
        if path_id is not None and status >= 400 and not OPAQUE_ID.fullmatch(path_id):
            path_id = None
        return self.created_id or path_id
