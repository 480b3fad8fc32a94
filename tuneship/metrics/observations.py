"""One served request as the metrics see it: deployment, outcome, latency, tokens. Never its text."""

from dataclasses import dataclass
from enum import StrEnum


class RequestOutcome(StrEnum):
    """How a request ended. Only a server error counts as an error, which includes timeouts."""

    SUCCESS = "success"
    SERVER_ERROR = "server_error"
    # The caller disconnected before the answer ended.
    CANCELLED = "cancelled"
    # The deployment refused the request with a 4xx after routing, other than for being unable to serve.
    REFUSED = "refused"


@dataclass(frozen=True)
class Observation:
    """A request that has ended."""

    deployment_id: str
    # Empty when the deployment was called directly.
    endpoint_id: str
    # Seconds since the epoch.
    ended_at: float
    outcome: RequestOutcome
    # From acceptance to the last token, queueing included.
    latency_ms: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # A 200 answer with a blank completion.
    is_empty: bool = False
    # The caller's hash (`Recorder.number_of`), for all but successes.
    caller: int | None = None
    # The hash of a routing key that a split keeps at one deployment.
    sticky_key: int | None = None
    # How many large keys of the endpoint are drawn by request, while a split is active.
    spread_keys: int = 0
    # Running replicas of the deployment.
    replicas: int = 0
    # From acceptance to the first token; None for an answer without any.
    first_token_ms: float | None = None
    # Texts that were embedded; 0 for a generation.
    embedded_texts: int = 0
    # A request of a batch: it gives way to all others, so the time that it took says nothing about its deployment.
    is_background: bool = False
