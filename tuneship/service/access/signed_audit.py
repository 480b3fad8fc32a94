"""When the signed heads of the audit chain were last complete, for the metrics of the service."""

from dataclasses import dataclass
from datetime import datetime


@dataclass
class SignedAudit:
    """Written by the task that signs heads, read by the metrics."""

    # When a signed head last stood for the whole chain; None before the first time.
    complete_at: datetime | None = None
