"""How long the service waits for processes, requests and readers, where a start may choose otherwise."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class ServiceTiming:
    """The waits of one service."""

    # For the requests in flight, after the first signal.
    drain_s: float = 30.0
    # The process ends at the latest this long after the drain, whatever is stuck.
    rest_s: float = 20.0
    # The process is ended when its event loop has not moved for so many seconds.
    stalled_s: float = 60.0
    # A cancelled training is killed after this time, so that its processes are gone within 5 s.
    cancel_patience: timedelta = timedelta(seconds=3.5)
    # A deleted deployment takes no new request; those in flight may last this long.
    deployment_drain_s: float = 30.0
    # The fallback of a job's stream, should a wake-up be missed; normally one comes within 0.3 s of a progress line.
    stream_poll_s: float = 2.0
    # Proxies commonly cut a connection that is silent for a minute, so no stream is.
    keep_alive_s: float = 15.0
