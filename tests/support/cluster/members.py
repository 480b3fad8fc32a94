"""Several services in the test's process that are members of one cluster: one Postgres, one folder of files."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.service.in_process import Service
from tests.support.waiting import until

# A busy machine may pause for seconds, and a leader must not lose its lease where a test needs it to lead.
LEASE_S = 120.0
# Short enough to wait until it lapses.
SHORT_LEASE_S = 8.0


@contextmanager
def cluster_of(
    folder: Path, url: str, count: int = 2, lease_s: float = LEASE_S, **settings: Any
) -> Iterator[list[Service]]:
    """Start members; the first one leads. They know the same two tenants by the same keys."""
    shared = folder / "blobs"
    shared.mkdir()
    with ExitStack() as opened:
        members: list[Service] = []
        for number in range(count):
            data_dir = folder / f"member-{number}"
            data_dir.mkdir()
            (data_dir / "blobs").symlink_to(shared)
            chosen: dict[str, Any] = {"database_url": url, **settings}
            member = opened.enter_context(Service(data_dir, lease_s=lease_s, **chosen))
            if members:
                member.headers = members[0].headers
            else:
                until(lambda member=member: member.leadership.leads)
            members.append(member)
        yield members


@contextmanager
def standing_still(service: Service) -> Iterator[None]:
    """Let the service's event loop run nothing, as if the process stood still; its threads can still be called."""
    goes_on, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait()

    service.loop.call_soon_threadsafe(stand)
    stands.wait()
    try:
        yield
    finally:
        goes_on.set()
