"""Which deployment of an endpoint answers a request: a split in whole percent and a draw. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 10_000


@dataclass(frozen=True)
class Share:
    """One deployment's part of the traffic, 0 to 100."""

    deployment_id: str
    traffic_percentage: int


@dataclass(frozen=True)
class TrafficSplit:
    """Shares that sum to 100. A dead member is never re-weighted: its errors must reach the gates."""

    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        """Refuse what is not a whole split; the border has refused it before."""
        if sum(share.traffic_percentage for share in self.shares) != 100:
            raise ValueError("a split must sum to 100")

    def choose(self, draw: int) -> str:
        """The deployment for `draw` in [0, 10000). Shares lie in id order: a shift of two moves one boundary."""
        bound = 0
        ordered = sorted(self.shares, key=lambda share: share.deployment_id)
        for share in ordered:
            bound += share.traffic_percentage * (DRAWS // 100)
            if draw < bound:
                return share.deployment_id
        raise ValueError(f"a draw lies in [0, {DRAWS})")


def split_of(members: Sequence[dict[str, object]]) -> TrafficSplit:
    """From the stored members, `[{"id", "traffic_percentage"}]`."""
    return TrafficSplit(
        tuple(Share(str(one["id"]), int(str(one["traffic_percentage"]))) for one in members)
    )


def draw_of_key(endpoint_id: str, routing_key: str) -> int:
    """The same draw for the same caller on the same endpoint."""
    digest = hashlib.sha256(f"{endpoint_id}\n{routing_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % DRAWS
