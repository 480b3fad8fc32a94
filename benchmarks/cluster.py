"""Measures a cluster of three members: kills, changes of a split, and what many models and jobs cost the leader.

    python benchmarks/cluster.py

The members are three `tuneship serve` on one PostgreSQL (with fsync) and one S3 server, all on this machine. While 32
clients write through a played balancer, the leader is killed again and again. Then each member changes a split while
the others are asked for it. What `measuring/many_rows.py` measures runs in this process, on the same PostgreSQL.
Every part is checked before its figures are printed.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles

from measuring import many_rows

from tests.support.cluster.cluster_members import PROMPT, Members
from tests.support.cluster.member_writers import AcknowledgedWrite, MemberWriters
from tests.support.databases.postgres_cluster import DURABLE, Cluster, programs
from tests.support.objects.object_server import ObjectServer
from tests.support.service.processes import running_deployment
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.endpoints import (
    CanaryEndpointCreate,
    CanaryEndpointUpdate,
    LeaseRequest,
    Member,
)
from tuneship.store.database.read_cache import MAX_AGE_S

BASE = "tuneship-tiny"
WRITERS, TRIES, PAUSE_S = 32, 2, 0.5
# Writes so long before a kill count as undisturbed; those that it meets, or that begin so long after it, as around it.
QUIET_S, AROUND_S = 5.0, 10.0
LEASE_S = 1


def main() -> None:
    """Start everything, measure, and end it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--changes", type=int, default=30)
    parser.add_argument("--lapses", type=int, default=10)
    chosen = parser.parse_args()
    found = programs()
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if found is None or weed is None:
        print("cannot run here: there is no PostgreSQL or no SeaweedFS on this machine")
        return
    postgres = Cluster(found, DURABLE)
    try:
        many_rows.measure(postgres)
        objects = ObjectServer(weed)
        try:
            measure_members(postgres, objects, chosen)
        finally:
            objects.stop()
            shutil.rmtree(objects.folder, ignore_errors=True)
    finally:
        postgres.remove()


def measure_members(postgres: Cluster, objects: ObjectServer, chosen: argparse.Namespace) -> None:
    """Start three members, and measure what only several processes show."""
    os.environ.update(objects.environment())  # noqa: TID251 - for the members, as in the tests
    with tempfile.TemporaryDirectory() as folder:
        limits = {"generate_requests_per_minute": "0"}
        url, bucket = postgres.new_database(), objects.place()
        members = Members(Path(folder), url, bucket, postgres, **limits)
        try:
            members.start()
            measure_splits(members, chosen.changes, chosen.lapses)
            measure_kills(members, chosen.kills)
        finally:
            members.close()


# A leader is killed while clients write.


def measure_kills(members: Members, kills: int) -> None:
    """Kill the leader under writers; print the time until another leads, and the times of the writes."""
    deployment = running_deployment(members.clients[0], "d", BASE)
    writers = MemberWriters(members, deployment, WRITERS, TRIES)
    killed_at, takeovers_s = list[float](), list[float]()
    with writers.at_work(PAUSE_S):
        for _ in range(kills):
            time.sleep(QUIET_S)
            leader = members.leader
            killed_at.append(time.monotonic())
            leader.kill()
            until(lambda leader=leader: members.leader is not leader)
            takeovers_s.append(time.monotonic() - killed_at[-1])
            time.sleep(max(0.0, killed_at[-1] + AROUND_S - time.monotonic()))
            leader.start()
    lost, doubled = writers.lost_and_doubled()
    if lost or doubled:
        raise SystemExit(f"of the acknowledged writes {lost} are lost, {doubled} doubled")
    print(f"checked: {len(writers.acknowledged):,} writes, none lost, none doubled")
    print(f"another member leads after a kill: {spread(takeovers_s, 's')}, {kills} kills")
    calm = [
        one
        for one in writers.acknowledged
        if any(one.ended < at < one.began + QUIET_S for at in killed_at)
    ]
    around = [
        one
        for one in writers.acknowledged
        if any(one.began - AROUND_S < at < one.ended for at in killed_at)
    ]
    print(f"undisturbed creates of {WRITERS} clients: {durations(calm)}")
    print(f"creates around a kill: {durations(around)}")
    codes = Counter(getattr(one, "code", type(one).__name__) for one in writers.failures)
    print(f"creates that failed with {TRIES} tries: {len(writers.failures)} {dict(codes)}")


def durations(writes: Sequence[AcknowledgedWrite]) -> str:
    """The number of some writes, and how long they took."""
    spans = [duration_ms(one) for one in writes]
    p99 = quantiles(spans, n=100)[-1]
    return f"{len(spans)}, median {median(spans):.0f} ms, p99 {p99:.0f} ms, at most {max(spans):.0f} ms"


def duration_ms(write: AcknowledgedWrite) -> float:
    """The time from the first try to the answer."""
    return (write.ended - write.began) * 1000


# A split is changed, and a lease on one lapses.


def measure_splits(members: Members, changes: int, lapses: int) -> None:
    """Print how soon all members use a split that one has changed, and how far apart they are when a lease lapses."""
    old, new = (running_deployment(members.clients[0], name, BASE) for name in ("old", "new"))
    canary = members.clients[0].canary_endpoints.create(
        CanaryEndpointCreate(name="c", deployments=all_to(old))
    )
    delays_s, apart_s = list[float](), list[float]()
    with ThreadPoolExecutor(len(members.clients)) as threads:
        for _, client in zip(range(changes), cycle(members.clients), strict=False):
            old, new = new, old
            client.canary_endpoints.update(canary.id, CanaryEndpointUpdate(deployments=all_to(old)))
            changed = time.monotonic()
            others = [one for one in members.clients if one is not client]
            asked = [threads.submit(first_answer, one, canary.id, old) for one in others]
            if client.endpoints.generate(canary.id, PROMPT).deployment_id != old:
                raise SystemExit("the member that changed the split does not use it")
            delays_s += [max(0.0, one.result() - changed) for one in asked]
        for _ in range(lapses):
            lease = LeaseRequest(seconds=LEASE_S, fallback=all_to(old))
            shifted = CanaryEndpointUpdate(deployments=all_to(new), lease=lease)
            members.clients[0].canary_endpoints.update(canary.id, shifted)
            for client in members.clients:
                first_answer(client, canary.id, new)
            back = threads.map(lambda one: first_answer(one, canary.id, old), members.clients)
            moments = list(back)
            apart_s.append(max(moments) - min(moments))
    if max(delays_s) > MAX_AGE_S:
        raise SystemExit("a member used an old split for longer than it may: there are no figures")
    print(f"a split of another member is used after {spread(delays_s, 's')}, {changes} changes")
    print(f"three members follow a lapsed lease within {spread(apart_s, 's')}, {lapses} lapses")


def all_to(deployment: str) -> list[Member]:
    """A split that sends everything to one deployment."""
    return [Member(id=deployment, traffic_percentage=100)]


def first_answer(client: Client, endpoint: str, wanted: str) -> float:
    """Ask until a deployment answers; returns the moment at which that request was sent."""
    while True:
        sent = time.monotonic()
        if client.endpoints.generate(endpoint, PROMPT).deployment_id == wanted:
            return sent


def spread(values: Sequence[float], unit: str) -> str:
    """The median and the range of some values."""
    return f"{median(values):.3f} {unit} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
