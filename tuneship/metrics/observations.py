"""One served request as the metrics see it: who, how it ended, how long, how many tokens. Never its text."""

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The one definition of an error: server failures and timeouts count, the caller's own 4xx do not."""

    SUCCESS = "success"
    SERVER_ERROR = "server_error"
    CALLER_ERROR = "caller_error"


@dataclass(frozen=True)
class Observation:
    """A request that has ended."""

    deployment_id: str
    endpoint_id: str
    """Empty when the deployment was called directly."""
    ended_at: float
    """Seconds since the epoch."""
    outcome: Outcome
    latency_ms: float
    """From acceptance to the last token, queueing included."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_empty: bool = False
    """A 200 answer with a blank completion."""
