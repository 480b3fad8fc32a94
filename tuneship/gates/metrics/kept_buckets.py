"""The buckets that looks have counted, as compressed text in the record: so a replay needs no server.

Each look keeps those that no look before it kept, so what a look has counted never changes. Next: `record.py` puts them
together, `canary.py` adds the new ones.
"""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from pydantic import ConfigDict, TypeAdapter

from tuneship.gates.metrics.series import ARMS, Arm, Bucket, RolloutSeries, Unusable, first_after

Edges = Mapping[Arm, tuple[float, ...] | None]
# A record that somebody else wrote may hold a kilobyte that unpacks to gigabytes.
MOST_BYTES = 64 << 20
NO_EDGES: Edges = dict.fromkeys(ARMS)


@dataclass(frozen=True)
class KeptBuckets:
    """Finished buckets, ascending, and the histograms' upper edges in ms."""

    # Plain JSON has no number for the last edge.
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    buckets: tuple[Bucket, ...] = ()
    edges_ms: Edges = field(default_factory=lambda: NO_EDGES)

    def with_new(self, series: RolloutSeries) -> tuple[RolloutSeries, "KeptBuckets"]:
        """Append the buckets of a new answer. Returns the series, and the new buckets.

        Raises `Unusable` where the server counts by other edges than before.
        """
        last = self.buckets[-1].end if self.buckets else None
        new = series.buckets[first_after(series.buckets, last) :]
        for arm in ARMS:
            if self.edges_ms[arm] and series.edges_ms[arm] not in (None, self.edges_ms[arm]):
                raise Unusable(f"the edges of the {arm}'s histogram have changed")
        edges: dict[Arm, tuple[float, ...] | None] = {
            arm: series.edges_ms[arm] or self.edges_ms[arm] for arm in ARMS
        }
        joined = replace(series, buckets=self.buckets + new, edges_ms=edges)
        return joined, KeptBuckets(new, edges)


_KEPT: TypeAdapter[KeptBuckets] = TypeAdapter(KeptBuckets)


def pack(kept: KeptBuckets) -> str:
    """Pack the buckets as text: base64 of zlib of JSON, some 500 characters for a busy bucket; empty for none."""
    if not kept.buckets:
        return ""
    content = _KEPT.dump_json(kept, exclude_defaults=True)
    return base64.b64encode(zlib.compress(content, 9)).decode()


# Each look of a long rollout needs the buckets of all looks before.
@lru_cache(maxsize=1 << 14)
def unpack(text: str) -> KeptBuckets:
    """The inverse of `pack`. Raises ValueError."""
    unzip = zlib.decompressobj()
    try:
        content = unzip.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except zlib.error as error:
        raise ValueError("the buckets of a look cannot be unpacked") from error
    if not unzip.eof:
        raise ValueError("the buckets of a look are cut off, or take more than 64 MiB")
    return _KEPT.validate_json(content)
