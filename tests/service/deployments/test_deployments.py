"""Deployments as clients see them: lists, versions, health, replicas, events and logs."""

import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tuneship.security.sealed_files import write_sealed
from tuneship.service.telemetry.log_recorder import MAX_WAITING, LogRecorder
from tuneship.store.database import rows, tables
from tuneship.store.records import deployment_logs
from tuneship.store.records.deployment_logs import LogEntry, LogPosition, position_of

pytestmark = pytest.mark.both_databases(postgres="soak")
Start = Callable[..., Service]
ITEM = {
    "id", "model_name", "deployment_name", "status", "endpoint", "created_at", "updated_at",
    "compute_type", "instance_type", "tags", "deployment_id", "model_id",
}  # fmt: skip
LOG_ENTRY = {"timestamp", "level", "message", "component", "request_id"}


def path_of(deployment_id: str, rest: str = "") -> str:
    return f"/v1/deployments/{deployment_id}{rest}"


def get(service: Service, deployment_id: str) -> dict[str, Any]:
    answer = service.call("GET", path_of(deployment_id))
    assert answer.status_code == 200, answer.text
    return answer.json()


def listed(service: Service, query: str = "", client: str = "alice") -> list[str]:
    page = service.call("GET", f"/v1/deployments{query}", client).json()
    assert page["pagination"]["total"] == len(page["deployments"])
    return [one["id"] for one in page["deployments"]]


def logs(service: Service, deployment_id: str, **query: Any) -> list[dict[str, Any]]:
    answer = service.call("GET", path_of(deployment_id, "/logs"), params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["logs"]


def events_of(service: Service, deployment_id: str) -> list[tuple[str, dict[str, Any]]]:
    """The kinds and data of the deployment's events, in order."""
    table = tables.events
    query = sa.select(table.c.type, table.c.data).where(table.c.resource_id == deployment_id)
    with service.database.read() as connection:
        found = connection.execute(query.order_by(table.c.sequence)).all()
    return [(kind.removeprefix("deployment."), data) for kind, data in found]


def kinds(service: Service, deployment_id: str) -> list[str]:
    return [kind for kind, _ in events_of(service, deployment_id)]


def test_a_list_item_has_the_described_fields_and_a_page_the_envelope(service: Service) -> None:
    deployment = service.deployment("one", tags={"team": "a"})
    page = service.call("GET", "/v1/deployments").json()
    assert set(page) == {"deployments", "pagination"}
    (item,) = page["deployments"]
    assert set(item) == ITEM
    record = get(service, deployment)
    assert item == {name: record[name] for name in ITEM}
    assert page["pagination"] == {"total": 1, "limit": 20, "offset": 0, "next_offset": None}


def test_lists_are_filtered_by_status_model_region_and_tags_newest_first(service: Service) -> None:
    tuned = service.model()
    one = service.deployment("one", tags={"team": "a", "stage": "x"})
    two = service.deployment("two", tags={"team": "a"})
    three = service.deployment("three", model_name=tuned)
    service.deployment("theirs", "bob")
    assert listed(service) == [three, two, one]
    assert listed(service, "?status=running") == [three, two, one]
    assert listed(service, "?status=failed") == []
    assert listed(service, "?model_name=tuneship-tiny") == [two, one]
    assert listed(service, f"?model_name={tuned}") == [three]
    assert listed(service, "?region=local") == [three, two, one]
    assert listed(service, "?region=moon") == []
    assert listed(service, "?tags[team]=a") == [two, one]
    assert listed(service, "?tags[team]=a&tags[stage]=x&model_name=tuneship-tiny") == [one]


def test_a_deleted_deployment_is_listed_for_a_day_and_only_when_asked_for(service: Service) -> None:
    deployment = service.deployment("short")
    service.call("DELETE", path_of(deployment))
    service.until(lambda: service.deployment_status(deployment) == "deleted")
    assert listed(service) == []
    assert listed(service, "?status=deleted") == [deployment]
    service.clock.ahead = timedelta(hours=24, minutes=1)
    assert listed(service, "?status=deleted") == []
    assert service.call("GET", path_of(deployment)).status_code == 404
    again = service.call("DELETE", path_of(deployment))
    assert again.status_code == 404


def test_a_page_continues_at_its_next_offset(service: Service) -> None:
    deployments = [service.deployment(f"d{number}") for number in range(3)]
    first = service.call("GET", "/v1/deployments?limit=2").json()
    assert first["pagination"] == {"total": 3, "limit": 2, "offset": 0, "next_offset": 2}
    rest = service.call("GET", "/v1/deployments?limit=2&offset=2").json()
    assert rest["pagination"]["next_offset"] is None
    ids = [one["id"] for one in first["deployments"] + rest["deployments"]]
    assert ids == deployments[::-1]


def test_an_etag_stands_for_what_a_patch_changes_not_for_the_state(service: Service) -> None:
    deployment = service.deployment("one")
    etag = service.call("GET", path_of(deployment)).headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
    body = {"tags": {"a": "1"}}
    first = service.call("PATCH", path_of(deployment), json=body, headers={"If-Match": etag})
    assert first.status_code == 200
    stale = service.call("PATCH", path_of(deployment), json=body, headers={"If-Match": etag})
    assert (stale.status_code, stale.json()["error"]["code"]) == (412, "invalid_request_error")
    now = first.headers["etag"]
    assert now != etag
    service.until(lambda: service.deployment_status(deployment) == "running")
    assert service.call("GET", path_of(deployment)).headers["etag"] == now
    for match in (f'"other", {now}', "*"):
        answer = service.call("PATCH", path_of(deployment), json=body, headers={"If-Match": match})
        assert answer.status_code == 200


def test_only_the_version_that_was_seen_is_deleted(service: Service) -> None:
    deployment = service.deployment("one")
    old_etag = service.call("GET", path_of(deployment)).headers["etag"]
    changed = service.call("PATCH", path_of(deployment), json={"tags": {"a": "1"}}).headers["etag"]
    for force in ("", "?force=true"):
        stale = service.call("DELETE", path_of(deployment) + force, headers={"If-Match": old_etag})
        assert (stale.status_code, stale.json()["error"]["code"]) == (412, "invalid_request_error")
    service.until(lambda: service.deployment_status(deployment) == "running")
    for _ in range(2):  # a client may repeat it after a lost answer
        answer = service.call("DELETE", path_of(deployment), headers={"If-Match": changed})
        assert (answer.status_code, answer.json()["status"] in ("deleting", "deleted")) == (
            200,
            True,
        )


def test_a_refused_delete_names_ten_of_many_endpoints_and_a_forced_one_switches_all_off(
    service: Service,
) -> None:
    used, other = service.deployment("used"), service.deployment("other")
    users = [service.endpoint(f"e{number}", used) for number in range(12)]
    elsewhere = service.endpoint("elsewhere", other)
    idle = service.canary("idle", {other: 100, used: 0})
    refused = service.call("DELETE", path_of(used))
    message = refused.json()["error"]["message"]
    assert refused.status_code == 409
    assert sum(one in message for one in users) == 10
    assert message.endswith("and 2 more")
    assert service.call("DELETE", f"{path_of(used)}?force=true").status_code == 200
    states = {
        one: service.call("GET", f"/v1/endpoints/{one}").json() for one in (*users, elsewhere)
    }
    assert {states[one]["status"] for one in users} == {"inactive"}
    assert states[elsewhere]["status"] == "active"
    kept = service.call("GET", f"/v1/canary-endpoints/{idle}").json()["deployments"]
    assert [one["id"] for one in kept] == [other]


def test_a_null_resets_a_setting_of_the_model_and_the_rest_stays(service: Service) -> None:
    own = {"default_temperature": 0.1, "default_top_p": 0.5, "max_output_tokens": 9}
    deployment = service.deployment("one", model_config=own)
    patch = {"model_config": {"default_temperature": None, "max_output_tokens": None}}
    changed = service.call("PATCH", path_of(deployment), json=patch).json()["model_config"]
    assert changed["default_temperature"] == 0.7
    assert changed["default_top_p"] == 0.5
    assert changed["max_output_tokens"] == min(256, changed["context_length"])


def test_a_life_is_reported_in_events_each_once_and_in_order(service: Service) -> None:
    deployment = service.deployment("one")
    service.call("PATCH", path_of(deployment), json={"tags": {"a": "1"}})
    service.until(lambda: service.deployment_status(deployment) == "running")
    service.call("DELETE", path_of(deployment))
    service.until(lambda: service.deployment_status(deployment) == "deleted")
    assert kinds(service, deployment) == [
        "created",
        "status_changed", "health_changed", "scaling_changed",
        "updated", "status_changed",
        "status_changed",
        "status_changed",
        "status_changed", "scaling_changed", "deleted",
    ]  # fmt: skip
    moves = [
        (data["from"], data["to"])
        for kind, data in events_of(service, deployment)
        if kind == "status_changed"
    ]
    assert moves == [
        ("creating", "running"),
        ("running", "updating"),
        ("updating", "running"),
        ("running", "deleting"),
        ("deleting", "deleted"),
    ]
    health = [data for kind, data in events_of(service, deployment) if kind == "health_changed"]
    assert [(one["from"], one["to"]) for one in health] == [("unknown", "healthy")]
    assert all("status" in data for _, data in events_of(service, deployment))


def test_changed_replica_settings_are_reported_and_replicas_follow_them(service: Service) -> None:
    deployment = service.deployment("one")
    patch = {"min_replicas": 2, "max_replicas": 2}
    service.call("PATCH", path_of(deployment), json=patch)
    service.until(lambda: get(service, deployment)["current_replicas"] == 2)
    assert get(service, deployment)["status"] == "running"
    scaled = [data for kind, data in events_of(service, deployment) if kind == "scaling_changed"]
    assert [(one["min_replicas"], one["current_replicas"]) for one in scaled] == [
        (1, 1),
        (2, 1),
        (2, 2),
    ]
    service.call("PATCH", path_of(deployment), json={"min_replicas": 1, "max_replicas": 1})
    service.until(lambda: [one.code for one in service.engines.replicas].count(None) == 1)
    service.until(lambda: get(service, deployment)["current_replicas"] == 1)
    assert service.call("POST", path_of(deployment, "/generate"), json={"prompt": "a"}).is_success


def test_a_replica_that_is_lost_is_replaced_and_health_says_so(service: Service) -> None:
    deployment = service.deployment("one")

    def said() -> Counter[str]:
        found = logs(service, deployment, filter="component=replica")
        return Counter(one["message"].split(":")[0] for one in found)

    service.until(lambda: get(service, deployment)["health"] == "healthy")
    service.until(lambda: said() == {"replica started": 1})
    service.engines.replicas[0].kill()
    service.until(lambda: kinds(service, deployment).count("health_changed") == 3)
    health = [
        data["to"] for kind, data in events_of(service, deployment) if kind == "health_changed"
    ]
    assert health == ["healthy", "unhealthy", "healthy"]
    record = get(service, deployment)
    assert (record["status"], record["current_replicas"]) == ("running", 1)
    assert len(service.engines.replicas) == 2
    service.until(lambda: said().total() == 3)  # logged after the change of health
    assert said() == {"replica started": 2, "replica lost": 1}


def test_a_deployment_whose_replica_cannot_come_back_fails_and_a_patch_brings_it_back(
    service: Service,
) -> None:
    deployment = service.deployment("one")
    service.engines.fault = "no memory is left"
    service.engines.replicas[0].kill()
    service.until(lambda: get(service, deployment)["health"] == "unhealthy")
    service.clock.ahead = timedelta(seconds=10)
    service.until(lambda: len(logs(service, deployment, filter="message~of 3 failed")) >= 2)
    service.clock.ahead = timedelta(seconds=20)
    service.until(lambda: service.deployment_status(deployment) == "failed")
    record = get(service, deployment)
    assert record["error"]["code"] == "deployment_error"
    assert "no memory is left" in record["error"]["message"]
    assert record["current_replicas"] == 0
    assert kinds(service, deployment).count("error") == 1
    answer = service.call("POST", path_of(deployment, "/generate"), json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "deployment_error")
    service.engines.fault = ""
    service.call("PATCH", path_of(deployment), json={"tags": {"a": "1"}})
    service.until(lambda: service.deployment_status(deployment) == "running")
    assert "error" not in get(service, deployment)


def test_a_model_that_would_read_otherwise_than_in_training_fails_its_deployment(
    service: Service,
) -> None:
    """The base model's tokenizer was exchanged, so the same prompt has become other tokens."""
    tuned = service.model()
    probe = {"messages": [{"role": "user", "content": "a"}], "prompt": [1, 2], "tokens": [0], "logits": [0.5],
             "spread": 1.0, "greedy": [], "leads": []}  # fmt: skip
    key = service.engines.trainers[-1].order.keys.adapter
    for file in (service.settings.data_dir / "blobs" / "models").rglob("adapter_config.json"):
        parity = json.dumps({"dtype": "float32", "probes": [probe]})
        write_sealed(file.parent / "parity.json", key, parity.encode())
    body = {"model_name": tuned, "deployment_name": "one"}
    deployment = service.call("POST", "/v1/deployments", json=body).json()["id"]
    service.until(lambda: service.deployment_status(deployment) == "failed")
    error = get(service, deployment)["error"]
    assert error["code"] == "deployment_error"
    assert "tokenizer are not those that the model was tuned with" in error["message"]


def test_a_model_that_cannot_be_served_fails_its_deployment(service: Service) -> None:
    tuned = service.model()
    for file in (service.settings.data_dir / "blobs" / "models").rglob("*.safetensors"):
        file.write_bytes(b"damaged")
    body = {"model_name": tuned, "deployment_name": "one"}
    deployment = service.call("POST", "/v1/deployments", json=body).json()["id"]
    service.until(lambda: service.deployment_status(deployment) == "failed")
    assert str(service.settings.data_dir) not in get(service, deployment)["error"]["message"]
    assert kinds(service, deployment) == ["created", "status_changed", "health_changed", "error"]


@pytest.mark.slow
def test_a_replica_that_hangs_makes_its_deployment_unhealthy_and_not_failed(
    service: Service,
) -> None:
    deployment = service.deployment("one")
    service.engines.replicas[0].hangs = True
    service.until(lambda: get(service, deployment)["health"] == "unhealthy")
    record = get(service, deployment)
    assert (record["status"], record["current_replicas"]) == ("running", 0)
    service.engines.replicas[0].hangs = False
    service.until(lambda: get(service, deployment)["health"] == "healthy")
    assert len(service.engines.replicas) == 1


@pytest.mark.parametrize("preload", [True, False])
def test_the_default_models_process_stays_only_where_it_is_wanted_before_any_deployment(
    start: Start, preload: bool
) -> None:
    service = start(preload_base_models=preload)
    deployment = service.deployment("one", min_replicas=2, max_replicas=2)
    service.call("DELETE", path_of(deployment))
    kept = 1 if preload else 0
    service.until(lambda: [one.code for one in service.engines.replicas].count(None) == kept)
    again = service.deployment("one")
    assert service.call("POST", path_of(again, "/generate"), json={"prompt": "a"}).is_success


def test_deployments_of_one_model_share_its_processes(service: Service) -> None:
    one = service.deployment("one")
    two = service.deployment("two", min_replicas=3, max_replicas=4)
    assert get(service, two)["current_replicas"] == 3
    assert get(service, one)["current_replicas"] == 1
    assert len(service.engines.replicas) == 3
    service.call("DELETE", path_of(two))
    service.until(lambda: [each.code for each in service.engines.replicas].count(None) == 1)
    assert (get(service, one)["health"], get(service, one)["current_replicas"]) == ("healthy", 1)


def test_min_replicas_of_zero_needs_auto_scaling_and_begins_with_one(service: Service) -> None:
    deployment = service.deployment("one", min_replicas=0, auto_scaling=True)
    record = get(service, deployment)
    assert (record["min_replicas"], record["max_replicas"], record["current_replicas"]) == (0, 1, 1)
    refused = service.call("PATCH", path_of(deployment), json={"auto_scaling": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "min_replicas")


def test_after_a_restart_what_ran_is_loaded_before_it_is_judged(start: Start) -> None:
    service = start()
    deployment = service.deployment("one")
    before = kinds(service, deployment)
    service.rest()
    again = Service(service.settings.data_dir, database_url=service.settings.database_url)
    with again:
        again.until(lambda: len(again.engines.replicas) == 1)
        again.clock.ahead = timedelta(seconds=5)
        again.until(
            lambda: bool(logs(again, deployment, filter="component=replica,message~started"))
        )
        assert get(again, deployment)["health"] == "healthy"
        assert kinds(again, deployment) == before


def test_a_service_that_ends_fails_no_deployment(service: Service) -> None:
    ran = service.deployment("ran")
    service.engines.may_start.clear()
    service.call("PATCH", path_of(ran), json={"min_replicas": 2, "max_replicas": 2})
    service.until(lambda: len(service.engines.replicas) == 2)
    before = kinds(service, ran)
    service.rest()
    service.run(service.parts.replicas.close())
    service.engines.may_start.set()
    service.clock.ahead = timedelta(seconds=5)
    assert get(service, ran)["status"] == "updating"
    assert kinds(service, ran) == before


# Logs.


def test_a_log_says_what_happened_newest_first_and_never_what_was_sent(service: Service) -> None:
    deployment = service.deployment("Secret Name", tags={"secret": "tag"})
    # The supervisor logs it in one of its rounds.
    service.until(lambda: bool(logs(service, deployment, filter="component=replica")))
    refused = service.call(
        "POST", path_of(deployment, "/generate"), json={"prompt": "secret words " * 2000}
    )
    found = logs(service, deployment)
    assert all(set(one) == LOG_ENTRY for one in found)
    assert found[0]["component"] == "generate"
    assert found[0]["request_id"] == refused.headers["x-request-id"]
    assert found[0]["level"] == "info"
    assert found[-1]["message"] == "the deployment is creating"
    times = [one["timestamp"] for one in found]
    assert times == sorted(times, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one) for one in times)
    assert not any("secret" in str(one).lower() for one in found)


def test_failed_generations_are_logged_as_errors_and_good_ones_not_at_all(service: Service) -> None:
    deployment = service.deployment("one")
    good = service.call("POST", path_of(deployment, "/generate"), json={"prompt": "a"})
    assert good.status_code == 200
    service.call("PATCH", path_of(deployment), json={"tags": {"fault.error_rate": "1"}})
    bad = service.call("POST", path_of(deployment, "/generate"), json={"prompt": "a"})
    assert bad.status_code == 500
    (line,) = logs(service, deployment, filter="component=generate")
    assert (line["level"], line["request_id"]) == ("error", bad.headers["x-request-id"])


def many_lines(service: Service, deployment_id: str, number: int) -> None:
    """Store lines of one moment, which only their ids distinguish."""
    now, levels = service.clock(), deployment_logs.LEVELS
    entries = [
        LogEntry(deployment_id, now, levels[n % 4], "generate", f"line {n}", f"req_{n}")
        for n in range(number)
    ]
    with service.database.write() as connection:
        deployment_logs.add(connection, *entries)


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("name", ["next_token", "after", "cursor"])
def test_pages_of_a_log_follow_each_other_without_a_gap(
    service: Service, order: str, name: str
) -> None:
    deployment = service.deployment("one")
    many_lines(service, deployment, 10)
    query = {"filter": "message~line", "order": order, "limit": 3}
    found: list[str] = []
    token: str | None = None
    while True:
        more = {} if token is None else {name: token}
        page = service.call("GET", path_of(deployment, "/logs"), params={**query, **more}).json()
        assert set(page["pagination"]) == {"next_token"}
        found += [one["message"] for one in page["logs"]]
        token = page["pagination"]["next_token"]
        if token is None:
            break
    wanted = [f"line {n}" for n in range(10)]
    assert found == (wanted if order == "asc" else wanted[::-1])


def test_a_token_belongs_to_its_deployment_filter_and_order(service: Service) -> None:
    deployment, other = service.deployment("one"), service.deployment("two")
    many_lines(service, deployment, 4)
    query = {"filter": "message~line", "limit": 1}
    page = service.call("GET", path_of(deployment, "/logs"), params=query).json()
    token = page["pagination"]["next_token"]
    for path, change in (
        (path_of(deployment, "/logs"), {"filter": "level=info"}),
        (path_of(deployment, "/logs"), {"order": "asc"}),
        (path_of(other, "/logs"), {}),
    ):
        answer = service.call("GET", path, params={**query, "next_token": token, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "next_token")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("level=error", [3, 7]),
        ("level!=error,level!=debug,message~line", [1, 2, 5, 6]),
        ("level>=warning AND component=generate", [2, 3, 6, 7]),
        ("level>=warning,request_id!=req_2,component=generate", [3, 6, 7]),
        ("request_id=req_5", [5]),
        ("message = line 4", [4]),
        ("message~LINE 1", [1]),
        ("message~%", []),
        ("component=nobody", []),
    ],
)
def test_filters_keep_exactly_what_they_say(
    shared: Service, filtered: str, text: str, wanted: list[int]
) -> None:
    found = logs(shared, filtered, filter=text, order="asc")
    assert [one["message"] for one in found] == [f"line {number}" for number in wanted]


@pytest.fixture(scope="module")
def filtered(shared: Service) -> str:
    deployment = shared.deployment("filtered")
    many_lines(shared, deployment, 8)
    return deployment


def test_a_span_of_time_ends_before_its_end(service: Service) -> None:
    deployment = service.deployment("one")
    moment = service.clock().replace(microsecond=0) + timedelta(minutes=1)
    with service.database.write() as connection:
        deployment_logs.add(
            connection,
            *(
                LogEntry(deployment, moment + timedelta(seconds=n), "info", "replica", f"{n}")
                for n in range(4)
            ),
        )
    span = {
        "start_time": (moment + timedelta(seconds=1)).isoformat(),
        "end_time": (moment + timedelta(seconds=3)).isoformat(),
    }
    assert [one["message"] for one in logs(service, deployment, **span)] == ["2", "1"]


def test_old_lines_and_those_beyond_the_number_are_forgotten(service: Service) -> None:
    deployment, other = service.deployment("one"), service.deployment("two")
    service.rest()
    many_lines(service, deployment, 10)
    with service.database.write() as connection:
        before = rows.count(connection, tables.deployment_logs)
        old = LogEntry(deployment, service.clock() - timedelta(days=31), "info", "replica", "old")
        deployment_logs.add(connection, old)
        deployment_logs.forget(connection, service.clock() - timedelta(days=30), before)
        assert rows.count(connection, tables.deployment_logs) == before
        deployment_logs.forget(connection, service.clock() - timedelta(days=30), 5)
    assert [one["message"] for one in logs(service, deployment)] == [
        f"line {n}" for n in range(9, 4, -1)
    ]
    assert logs(service, other)


def test_a_place_survives_its_way_through_a_number(service: Service) -> None:
    place = LogPosition(service.clock(), 2**40 + 7)
    assert position_of(place.as_number()) == place


def test_lines_that_nobody_stores_are_bounded_and_their_number_is_reported(
    service: Service,
) -> None:
    recorder, now = LogRecorder(), service.clock()
    stored: list[LogEntry] = []

    def broken(entries: Any) -> None:
        raise OSError

    for _ in range(MAX_WAITING + 5):
        recorder.add(LogEntry("dep_1", now, "info", "generate", "x"))
    with pytest.raises(OSError):
        recorder.hand_over(broken, now)
    recorder.hand_over(stored.extend, now)
    assert len(stored) == MAX_WAITING + 1
    assert stored[-1].message == "5 lines were not kept"
    recorder.hand_over(lambda _: pytest.fail("nothing is left"), now)


def test_lines_that_come_while_nothing_can_be_stored_are_bounded_too(service: Service) -> None:
    recorder, now = LogRecorder(), service.clock()
    stored: list[LogEntry] = []
    full = [LogEntry("dep_1", now, "info", "generate", "x")] * MAX_WAITING

    def broken(_entries: Any) -> None:
        recorder.add(*full)  # lines that come while the database is waited for
        raise OSError

    recorder.add(*full)
    for _ in range(5):
        with pytest.raises(OSError):
            recorder.hand_over(broken, now)
    recorder.hand_over(stored.extend, now)
    assert len(stored) == MAX_WAITING + 1
    assert stored[-1].message == f"{5 * MAX_WAITING:,} lines were not kept"
