"""Chooses a deployment of an endpoint by a split in whole percent and a draw. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

# Divisible by 100, and fine enough that the remainder of a hash is as good as uniform.
DRAWS = 10_000


@dataclass(frozen=True)
class Share:
    """One deployment's part of the traffic, 0 to 100."""

    deployment_id: str
    traffic_percentage: int


@dataclass(frozen=True)
class TrafficSplit:
    """Shares that sum to 100.

    Traffic of a member that is down is never given to the others: its errors must reach the gates.
    """

    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the shares sum to 100; the service checks it before, with an error for the user."""
        if sum(share.traffic_percentage for share in self.shares) != 100:
            raise ValueError("a split must sum to 100")

    @property
    def is_divided(self) -> bool:
        """Whether more than one deployment has traffic."""
        return sum(share.traffic_percentage > 0 for share in self.shares) > 1

    def choose(self, draw: int) -> str:
        """The deployment for `draw` in [0, 10000). Raises ValueError outside of it."""
        bound = 0
        # In the order of ids, so that a shift between two deployments moves one boundary and no other caller.
        ordered = sorted(self.shares, key=lambda share: share.deployment_id)
        for share in ordered:
            bound += share.traffic_percentage * (DRAWS // 100)
            if draw < bound:
                return share.deployment_id
        raise ValueError(f"a draw lies in [0, {DRAWS})")


def split_of(members: Sequence[dict[str, object]]) -> TrafficSplit:
    """The split of stored members, `[{"id", "traffic_percentage"}]`."""
    return TrafficSplit(
        tuple(
            Share(str(member["id"]), int(str(member["traffic_percentage"]))) for member in members
        )
    )


def draw_of_key(endpoint_id: str, routing_key: str, salt: str | None = None) -> int:
    """The draw of a caller on an endpoint, the same for each of its requests.

    `salt`: the rollout's id, so that another rollout draws its callers independently.
    """
    # With the endpoint, or the same callers would be the first on every endpoint.
    text = f"{endpoint_id}\n{routing_key}" + (f"\n{salt}" if salt else "")
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % DRAWS
