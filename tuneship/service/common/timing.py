"""How long the service waits for processes, requests and readers, where a start may choose otherwise."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class ServiceTiming:
    """The waits of one service."""

    drain_s: float = 30.0
    """After the first signal, for the requests in flight."""
    rest_s: float = 20.0
    """After the drain the process ends at the latest this much later, whatever is stuck."""
    # Chosen so that all processes of a cancelled job are gone within 5 s.
    cancel_patience: timedelta = timedelta(seconds=3.5)
    """For a cancelled training to end by itself; then it is killed."""
    deployment_drain_s: float = 30.0
    """A deleted deployment takes no new request; those in flight may last this long."""
    stream_poll_s: float = 2.0
    """The fallback of a job's stream, should a wake-up be missed; one comes within 0.3 s of a progress line."""
    # Proxies commonly cut a connection that is silent for a minute.
    keep_alive_s: float = 15.0
    """A stream is silent for at most this long."""
