"""Two members write at once, for one tenant and for two, and what they count is added up."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.cluster.members import cluster_of
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.store.database import tables
from tuneship.store.records import audit, metric_windows
from tuneship.store.records.metric_windows import HOUR, MINUTE, WHOLE

pytestmark = pytest.mark.postgres

TENANTS = ("alice", "bob")
QUOTA = 6
PROMPT = {"prompt": "What is case 1?", "max_tokens": 8}


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster) -> Iterator[list[Service]]:
    url = postgres.new_database()
    with cluster_of(tmp_path, url, maximum_datasets=QUOTA) as members:
        yield members


def upload(member: Service, tenant: str, key: str) -> tuple[int, str]:
    """Upload a dataset; returns the status and the id, which is empty after a refusal."""
    answer = member.call(
        "POST",
        "/v1/datasets",
        tenant,
        headers={"Idempotency-Key": key},
        data={"name": "d", "format": "instruction"},
        files={"file": ("x.jsonl", jsonl(*LINES), "application/jsonl")},
    )
    return answer.status_code, answer.json().get("id", "")


def test_quotas_keys_lists_and_the_audit_trail_hold_for_each_tenant_at_both_members(
    members: list[Service],
) -> None:
    """Each key is sent to both members at once, and each tenant has more keys than it may have datasets."""
    asked = [
        (member, tenant, f"key {number}")
        for number in range(QUOTA + 3)
        for tenant in TENANTS
        for member in members
    ]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda one: upload(*one), asked))
    for tenant in TENANTS:
        own = [
            answer for (_, name, _), answer in zip(asked, answers, strict=True) if name == tenant
        ]
        assert {status for status, _ in own} <= {201, 409, 429}
        made = {identifier for status, identifier in own if status == 201}
        assert len(made) == QUOTA
        for member in members:
            page = member.call("GET", "/v1/datasets", tenant).json()
            assert page["pagination"]["total"] == QUOTA
            assert {one["id"] for one in page["datasets"]} == made
            entries = member.call("GET", "/v1/audit?limit=1000", tenant).json()["entries"]
            uploads = [one["resource_id"] for one in entries if one["action"] == "upload_dataset"]
            # The row of a replayed answer names no resource.
            assert set(uploads) - {None} == made, "every answer has its row, whoever gave it"
    with members[0].database.read() as connection:
        assert members[0].parts.audit.fault(audit.rows_of(connection)) is None


def test_a_change_at_one_member_is_in_the_audit_trail_of_the_other_at_once(
    members: list[Service],
) -> None:
    one, two = members
    for _ in range(3):
        dataset = one.dataset()
        last = two.call("GET", "/v1/audit?limit=1000").json()["entries"][-1]
        assert (last["resource_id"], last["action"]) == (dataset, "upload_dataset")
        one, two = two, one


def test_the_counts_of_both_members_are_added_up_before_and_after_the_leader_merges_them(
    members: list[Service],
) -> None:
    leader, other = members
    deployment = leader.deployment("d")
    for member, number in ((leader, 2), (other, 3)):
        for _ in range(number):
            answer = member.call("POST", f"/v1/deployments/{deployment}/generate", json=PROMPT)
            assert answer.status_code == 200
    for member in members:
        member.supervisor.records.store_metrics()

    def counted(member: Service) -> int:
        path = f"/v1/deployments/{deployment}/metrics?interval=1m&metrics=error_rate"
        answer = member.call("GET", path).json()
        assert answer["summary"]["error_rate"]["request_count"] == 5
        return sum(answer["metrics"]["error_rate"]["request_count"])

    assert [counted(member) for member in members] == [5, 5]
    assert set(shards(leader)) == {leader.parts.member_number, other.parts.member_number}
    assert leader.parts.member_number != other.parts.member_number

    leader.supervisor.leader_work.retention.fold_hours(leader.clock() + timedelta(hours=2))
    assert set(shards(leader)) == {WHOLE}
    assert [counted(member) for member in members] == [5, 5]
    assert other.call("POST", f"/v1/deployments/{deployment}/generate", json=PROMPT).is_success
    other.supervisor.records.store_metrics()
    assert other.parts.member_number in shards(leader), "what comes late is stored apart"


def shards(service: Service) -> Counter[int]:
    """The minutes and hours of each shard."""
    table = tables.metric_windows
    with service.database.read() as connection:
        query = sa.select(table.c.shard).where(table.c.width.in_((MINUTE, HOUR)))
        return Counter(connection.scalars(query))


def test_members_store_while_a_tenants_rows_are_held(members: list[Service]) -> None:
    """Metrics, logs and the uses of keys wait for no writer."""
    leader, other = members
    deployment = leader.deployment("d")
    assert other.call("POST", f"/v1/deployments/{deployment}/generate", json=PROMPT).is_success
    with leader.database.write():
        other.supervisor.records.store_metrics()
        other.supervisor.records.store_logs()
        other.keys.store_uses()
    with leader.database.read() as connection:
        assert metric_windows.has_requests(connection, deployment, 0.0)
