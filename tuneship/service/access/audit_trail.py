"""What the boundary writes into the audit chain of one request, before it answers.

Written down are all changes, every refusal for want of a scope and, where a job or deployment asks for
`audit_logging`, whatever touches it: reads, generations and other refusals too. What a job asks for holds for its
tuned model and for every deployment of that model. Handlers only say which rows they looked at; the boundary does the
rest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuneship.contract.generation import Usage

# An id of ours. Anything else in a path was chosen by somebody, and may be a name.
OPAQUE_ID = re.compile(r"[a-z]{2,6}_[0-9a-z]{24}")


@dataclass
class AuditTrail:
    """One request of a caller, as far as it is known yet."""

    key_id: str = ""
    address: str = ""
    action: str = ""
    is_change: bool = False
    named: str | None = None
    """The id in the path."""
    made: str | None = None
    """The id of what a create made."""
    is_wanted: bool = False
    """Something that the request touched asks for `audit_logging`."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def touch(self, row: Mapping[str, Any]) -> None:
        """A handler looked at this job or deployment, or at what was made by this job."""
        self.is_wanted = self.is_wanted or bool(row["security_settings"]["audit_logging"])

    def count(self, usage: Usage) -> None:
        """What was generated; once for each generation."""
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens

    def requires_entry(self, status: int) -> bool:
        """Whether an answer of this status may only be given after its row is committed."""
        return self.is_wanted or status == 403 or (self.is_change and status < 400)

    def resource_of(self, status: int) -> str | None:
        """The id to write down: an opaque one, or one that was found to exist."""
        named = self.named
        if named is not None and status >= 400 and not OPAQUE_ID.fullmatch(named):
            named = None
        return self.made or named
