"""One served request as the metrics see it: who, how it ended, how long, how many tokens. Never its text."""

from dataclasses import dataclass
from enum import StrEnum


class RequestOutcome(StrEnum):
    """The one definition of an error: server failures and timeouts are errors, the other two are counted apart."""

    SUCCESS = "success"
    SERVER_ERROR = "server_error"
    CANCELLED = "cancelled"
    """The caller hung up before the answer ended."""
    REFUSED = "refused"
    """The deployment refused what it was sent: a 4xx after routing that does not say that it cannot serve."""


@dataclass(frozen=True)
class Observation:
    """A request that has ended."""

    deployment_id: str
    endpoint_id: str
    """Empty when the deployment was called directly."""
    ended_at: float
    """Seconds since the epoch."""
    outcome: RequestOutcome
    latency_ms: float
    """From acceptance to the last token, queueing included."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_empty: bool = False
    """A 200 answer with a blank completion."""
    caller: int | None = None
    """In an error, a number in place of who asked (`Recorder.number_of`)."""
