"""Keys are recognised, end when they should, and allow exactly what their scopes name."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import Clock, Service
from tests.support.service.whole_api import (
    BODIES,
    OPERATIONS,
    Own,
    missing_ids,
    options_of,
    path_of,
)
from tests.support.service.world import World
from tuneship.contract.declaring.operation import DECLARED
from tuneship.contract.declaring.scopes import PRESETS, SCOPES, UnknownScope, scopes_of
from tuneship.security.master_key import MasterKeyDamaged, read_or_make_secret
from tuneship.service.access.api_keys import (
    KeyEnded,
    Keys,
    NoSuchKey,
    read_credentials,
    write_credentials,
)
from tuneship.service.access.key_keeper import KeyKeeper
from tuneship.store.database.database import Database
from tuneship.store.records.audit import Chain

both_databases = pytest.mark.both_databases
MINUTE = timedelta(seconds=60)
NEVER = datetime.max.replace(tzinfo=UTC)


def status_with(service: Service, key: str, client: str = "alice") -> int:
    headers = {"Authorization": f"Bearer {key}", "X-Client-ID": client}
    return service.call("GET", "/v1/datasets", None, headers=headers).status_code


@pytest.mark.parametrize("text", ["", "\n", "abc\n", "x" * 64, "00" * 31, "é" * 64])
def test_a_master_key_that_was_cut_opens_nothing(tmp_path: Path, text: str) -> None:
    """A full disk or a power loss can leave such a file, and anybody could derive the secrets of an empty key."""
    file = tmp_path / "master.key"
    file.write_text(text)
    with pytest.raises(MasterKeyDamaged, match=r"master\.key"):
        read_or_make_secret(file)
    assert file.read_text() == text


# Scopes


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_an_operation_is_opened_by_its_scope_and_by_no_other(world: World, operation: Any) -> None:
    """The ids do not exist, so a scope that lets the request through leads to 404 at most."""
    service, ids = world.service, missing_ids()
    options = options_of(operation, Own(ids["ds"], ids["ds"], ids["dep"], ids["model"]))

    def ask(scopes: frozenset[str]) -> httpx.Response:
        path, headers = path_of(operation, ids), service.key_headers("alice", scopes)
        return service.call(operation.method, path, None, **options, headers=headers)

    before = world.state()
    refused = ask(SCOPES - {operation.scope})
    assert refused.status_code == 403, refused.text
    assert refused.json()["error"]["code"] == "permission_denied"
    assert operation.scope in refused.json()["error"]["message"]
    assert world.state() == before
    assert ask(frozenset({operation.scope})).status_code not in (401, 403)


def test_every_operation_with_a_body_has_a_valid_one_in_the_table() -> None:
    assert {one.name for one in OPERATIONS if one.body_parameter} == set(BODIES)


def test_every_operation_asks_for_a_scope_that_can_be_given() -> None:
    assert {one.scope for one in DECLARED} <= SCOPES


def test_presets_hold_what_their_role_needs() -> None:
    looking = {
        "datasets",
        "jobs",
        "models",
        "deployments",
        "endpoints",
        "webhooks",
        "evaluations",
        "metrics",
        "logs",
    }
    assert PRESETS["viewer"] == {f"{one}:read" for one in looking}
    assert PRESETS["trainer"] - PRESETS["viewer"] == {
        f"{one}:write" for one in ("datasets", "jobs", "evaluations")
    }
    shipped = {
        f"{one}:write" for one in ("models", "deployments", "endpoints", "webhooks", "evaluations")
    }
    assert PRESETS["operator"] - PRESETS["viewer"] == shipped | {"generate", "releases:decide"}
    assert PRESETS["approver"] - PRESETS["viewer"] == {"releases:decide"}
    assert (PRESETS["inference"], PRESETS["auditor"]) == ({"generate"}, {"audit:read"})
    moved = {"datasets", "jobs", "deployments", "endpoints", "evaluations"}
    called = {f"{one}:{verb}" for one in moved for verb in ("read", "write")}
    assert PRESETS["pipeline"] == called | {"models:read", "metrics:read", "generate"}
    assert PRESETS["monitoring"] == {"metrics:read", "machine:read"}
    assert PRESETS["admin"] == SCOPES - {"models:content"}
    assert not any("models:content" in scopes for scopes in PRESETS.values())
    assert scopes_of("inference, jobs:read") == {"generate", "jobs:read"}
    with pytest.raises(UnknownScope, match="jobs:raed"):
        scopes_of("jobs:raed")


# Keys


def test_why_a_key_is_refused_is_not_said(world: World) -> None:
    reasons = ("unknown", "wrong_secret", "crossed", "expired", "revoked")
    answers = [
        world.service.call("GET", "/v1/datasets", None, headers=world.keys[reason])
        for reason in reasons
    ]
    bodies = {
        answer.text.replace(answer.headers["x-request-id"], "").encode() for answer in answers
    }
    assert ([one.status_code for one in answers], len(bodies)) == ([401] * len(reasons), 1)


@both_databases
def test_a_revoked_key_ends_within_a_second(service: Service) -> None:
    key = service.keys.issue("alice", SCOPES, None)
    assert status_with(service, key) == 200
    other = Keys(
        service.database, b"pepper", service.clock, service.parts.audit
    )  # as another process would
    other.revoke(key[4:12])
    service.clock.ahead = timedelta(seconds=1)
    assert status_with(service, key) == 401


@both_databases
def test_a_rotated_key_is_followed_by_one_of_the_same_rights(service: Service) -> None:
    old = service.keys.issue("alice", PRESETS["viewer"], None, "laptop")
    new = service.keys.rotate(old[4:12], None, timedelta(0))
    service.clock.ahead = timedelta(seconds=1)
    assert (status_with(service, old), status_with(service, new)) == (401, 200)
    records = {row["id"]: row for row in service.keys.listed()}
    assert records[new[4:12]]["scopes"] == sorted(PRESETS["viewer"])
    assert records[new[4:12]]["label"] == "laptop"
    with pytest.raises(KeyEnded):
        service.keys.rotate(old[4:12], None, timedelta(0))
    with pytest.raises(NoSuchKey):
        service.keys.rotate("00000000", None, timedelta(0))


@both_databases
def test_a_key_that_is_rotated_gently_lives_on_for_a_while_but_never_longer(
    service: Service,
) -> None:
    hour, now = timedelta(hours=1), service.clock()
    lasting = service.keys.issue("alice", SCOPES, None)
    ending = service.keys.issue("alice", SCOPES, now + hour)
    for key in (lasting, ending):
        service.keys.rotate(key[4:12], None, 2 * hour)
    service.clock.ahead = timedelta(minutes=59)
    assert [status_with(service, key) for key in (lasting, ending)] == [200, 200]
    service.clock.ahead = timedelta(minutes=61)
    assert [status_with(service, key) for key in (lasting, ending)] == [200, 401]
    service.clock.ahead = timedelta(minutes=121)
    assert [status_with(service, key) for key in (lasting, ending)] == [401, 401]


@both_databases
def test_the_use_of_a_key_is_written_down_to_the_minute(service: Service) -> None:
    key = service.keys.issue("alice", SCOPES, None)

    def last_used() -> datetime | None:
        service.keys.store_uses()
        return next(row for row in service.keys.listed() if row["id"] == key[4:12])["last_used_at"]

    assert last_used() is None
    begun = service.clock()
    status_with(service, key)
    first = last_used()
    assert first is not None
    assert begun <= first <= service.clock()
    service.clock.ahead = timedelta(seconds=30)
    status_with(service, key)
    assert last_used() == first
    service.clock.ahead = timedelta(seconds=70)
    status_with(service, key)
    latest = last_used()
    assert latest is not None
    assert latest > first + MINUTE


def test_a_secret_is_not_in_the_database(service: Service) -> None:
    key = service.keys.issue("alice", SCOPES, None)
    assert key[13:56] not in repr(service.keys.listed())
    other = Keys(service.database, b"another pepper", service.clock, service.parts.audit)
    assert not other.is_good_for(key, SCOPES, service.clock())


class FirstKey:
    """The key in `credentials.json` as time passes."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.clock = Clock()
        self.file = folder / "credentials.json"
        self.keys = Keys(database, b"pepper", self.clock, Chain(b"a" * 32))
        self.keeper = KeyKeeper(self.keys, self.file, "http://here", self.clock)

    def now(self) -> str:
        self.keeper.run_due()
        return read_credentials(self.file)["api_key"]

    def after(self, **time: float) -> str:
        self.clock.ahead = timedelta(**time)
        return self.now()


@pytest.fixture
def first_key(tmp_path: Path, service: Service) -> FirstKey:
    return FirstKey(tmp_path, service.database)


def test_the_first_key_is_private_and_is_renewed_in_its_last_thirty_days(
    first_key: FirstKey,
) -> None:
    key = first_key.now()
    assert first_key.file.stat().st_mode & 0o777 == 0o600
    assert first_key.after(days=59) == key
    renewed = first_key.after(days=61)
    assert renewed != key
    ends = {row["id"]: row["expires_at"] or NEVER for row in first_key.keys.listed()}
    assert ends[key[4:12]] > first_key.clock()  # the previous key stays valid until its end
    assert ends[renewed[4:12]] - ends[key[4:12]] > timedelta(days=60)


@pytest.mark.parametrize(
    "ending", ["revoked", "unreadable", "short of a scope", "of another database"]
)
def test_a_first_key_that_opens_nothing_is_replaced(first_key: FirstKey, ending: str) -> None:
    key = first_key.now()
    if ending == "revoked":
        first_key.keys.revoke(key[4:12])
        first_key.after(hours=2)
    elif ending == "unreadable":
        first_key.file.write_text("{")
        first_key.after(hours=2)
    elif ending == "short of a scope":
        older = first_key.keys.issue("local", PRESETS["admin"] - {"webhooks:read"}, None)
        first_key.file.write_text(first_key.file.read_text().replace(key, older))
        first_key.after(hours=2)
    else:
        first_key.keys._pepper = b"another"
        write_credentials(first_key.keys, first_key.file, "http://here", first_key.clock())
    new_first_key = read_credentials(first_key.file)["api_key"]
    assert new_first_key != key
    lasting = datetime.now(UTC) + timedelta(days=80)
    assert first_key.keys.is_good_for(new_first_key, PRESETS["admin"], lasting)


def test_a_first_key_of_a_version_that_gave_it_every_scope_is_replaced_and_stays_in_force(
    first_key: FirstKey,
) -> None:
    older = first_key.keys.issue("local", SCOPES, None)
    first_key.file.write_text(json.dumps({"api_key": older, "client_id": "local"}))
    assert first_key.now() != older
    assert first_key.keys.is_good_for(older, SCOPES, first_key.clock())
