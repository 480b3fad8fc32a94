"""A person rolls back, pauses and resumes a rollout: what the service then does, and what it refuses."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import Service, split
from tuneship.contract.declaring.scopes import PRESETS, SCOPES

pytestmark = pytest.mark.both_databases
WHY = {"name": "A. Reviewer", "reason": "clinical_review", "ticket": "CHG-1042"}


class Rollout:
    """A candidate with half of the traffic, under a lease."""

    def __init__(self, service: Service, *, pausable: bool = True) -> None:
        self.service = service
        self.old, self.new = service.deployment("old"), service.deployment("new")
        self.back = split({self.old: 100, self.new: 0})["deployments"]
        self.lease = {"seconds": 60, "fallback": self.back, "pausable": pausable}
        self.id = service.canary("shop", {self.old: 50, self.new: 50}, lease=self.lease)

    def post(self, verb: str, **more: Any) -> httpx.Response:
        return self.service.call("POST", f"/v1/canary-endpoints/{self.id}/{verb}", **more)

    def body(self, shares: dict[str, int], **more: Any) -> dict[str, Any]:
        return split(shares, lease=self.lease) | more

    def patch(self, body: dict[str, Any], version: int | None = None) -> httpx.Response:
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        path = f"/v1/canary-endpoints/{self.id}"
        return self.service.call("PATCH", path, json=body, headers=headers)

    def get(self) -> dict[str, Any]:
        return self.service.call("GET", f"/v1/canary-endpoints/{self.id}").json()

    def events(self) -> list[dict[str, Any]]:
        page = self.service.call("GET", "/v1/events").json()["events"]
        return [one for one in page if one["type"].startswith("canary_endpoint.")]


@pytest.fixture
def rollout(service: Service) -> Rollout:
    return Rollout(service)


def test_a_person_reverts_a_rollout_once_and_the_endpoint_says_who(rollout: Rollout) -> None:
    answer = rollout.post("revert", json=WHY)
    found = answer.json()
    assert (answer.status_code, found["deployments"], found["lease"]) == (200, rollout.back, None)
    assert (found["version"], answer.headers["etag"]) == (2, '"2"')
    assert found["reverted"] | {"at": ""} == {
        "at": "", "by": "A. Reviewer", "reason": "clinical_review", "ticket": "CHG-1042", "person": None,
    }  # fmt: skip
    assert rollout.get() == found
    (event,) = rollout.events()
    data = event["data"]
    assert (event["type"], data["reason"]) == ("canary_endpoint.reverted", "person")
    assert (data["why"], data["ticket"], data["version"]) == ("clinical_review", "CHG-1042", 2)
    assert (data["to"], data["from"][0]["traffic_percentage"]) == (rollout.back, 50)
    assert "A. Reviewer" not in str(event)

    again = rollout.post("revert")
    assert (again.status_code, "no running lease" in again.text) == (409, True)
    # Another split has not come by this decision.
    assert (
        rollout.patch(rollout.body({rollout.old: 90, rollout.new: 10})).json()["reverted"] is None
    )


def test_without_a_body_the_key_is_named(rollout: Rollout) -> None:
    paused = rollout.post("pause").json()["paused"]
    used = rollout.service.keys.listed()
    assert (paused["by"] in str(used), paused["reason"]) == (True, None)


def test_a_pause_holds_the_split_until_it_is_resumed(rollout: Rollout) -> None:
    old, new = rollout.old, rollout.new
    before = rollout.get()
    paused = rollout.post("pause", json=WHY).json()
    assert paused["paused"]["by"] == "A. Reviewer"
    assert paused | {"paused": None} == before, "neither the version nor its time has changed"

    forward = rollout.body({old: 25, new: 75})
    other = {"seconds": 60, "fallback": split({new: 100})["deployments"]}
    present = {old: 50, new: 50}
    for refused in (
        rollout.patch(forward, version=1),
        rollout.patch(split(present)),
        rollout.patch(rollout.body(present, lease=other)),
        rollout.patch(rollout.body(present, rollout_id="another draw")),
        rollout.post("lease", json={"seconds": 0}),
        rollout.post("pause"),
    ):
        assert refused.status_code == 409, refused.text
        assert ("paused" in refused.text, "A. Reviewer" in refused.text) == (True, False)
    assert rollout.get()["deployments"] == before["deployments"]

    assert rollout.post("lease", json={"seconds": 90}).json()["paused"] == paused["paused"]
    same = rollout.patch(rollout.body(present), version=1).json()
    assert (same["version"], same["paused"]) == (2, paused["paused"])
    assert rollout.post("resume", json=WHY).json()["paused"] is None
    assert rollout.post("resume").status_code == 409
    assert rollout.patch(forward, version=2).status_code == 200
    kinds = [(one["type"], one["data"]["reason"]) for one in rollout.events()]
    assert kinds == [
        ("canary_endpoint.paused", "clinical_review"),
        ("canary_endpoint.resumed", "clinical_review"),
    ]


@pytest.mark.parametrize("way", ["revert", "patch", "lapse", "delete"])
def test_a_pause_is_lifted_by_all_that_returns_the_traffic(rollout: Rollout, way: str) -> None:
    rollout.post("pause")
    if way == "revert":
        rollout.post("revert")
    elif way == "patch":
        # A candidate that is gone is left out.
        assert rollout.patch(split({rollout.old: 100})).status_code == 200
    elif way == "lapse":
        rollout.service.clock.ahead += timedelta(seconds=61)
        assert rollout.get()["paused"] is None, "before the lapse is stored"
        rollout.service.until(lambda: bool(rollout.events()[1:]))
    else:
        forced = f"/v1/deployments/{rollout.new}?force=true"
        assert rollout.service.call("DELETE", forced).status_code == 200
    found = rollout.get()
    assert (found["paused"], found["lease"]) == (None, None)
    assert (found["reverted"] is not None) == (way == "revert")
    # The split is nobody's: it can be set again.
    assert rollout.patch(split({rollout.old: 100})).status_code == 200


def test_a_rollout_whose_pipeline_knows_no_pause_is_not_paused(service: Service) -> None:
    rollout = Rollout(service, pausable=False)
    refused = rollout.post("pause")
    assert (refused.status_code, "pausable" in refused.text) == (409, True)
    assert rollout.get()["lease"]["pausable"] is False
    assert rollout.post("revert").status_code == 200
    assert rollout.post("pause").status_code == 409


def test_only_a_key_that_may_decide_decides(rollout: Rollout) -> None:
    def asked(scopes: frozenset[str], verb: str) -> int:
        headers = rollout.service.key_headers("alice", scopes)
        path = f"/v1/canary-endpoints/{rollout.id}/{verb}"
        return rollout.service.call("POST", path, None, headers=headers).status_code

    for verb in ("pause", "resume", "revert"):
        assert asked(SCOPES - {"releases:decide"}, verb) == 403
        assert asked(PRESETS["pipeline"], verb) == 403
    for verb, preset in (("pause", "approver"), ("resume", "operator"), ("revert", "approver")):
        assert asked(PRESETS[preset], verb) == 200
    path = f"/v1/canary-endpoints/{rollout.id}/revert"
    assert rollout.service.call("POST", path, "bob").status_code == 404


@pytest.mark.parametrize(
    ("field", "value"), [("ticket", "chg 1"), ("reason", "mood"), ("name", "a\nb"), ("why", "x")]
)
def test_a_bad_decision_is_refused_by_its_field(rollout: Rollout, field: str, value: str) -> None:
    refused = rollout.post("revert", json={field: value})
    assert refused.status_code in (400, 422)
    assert refused.json()["error"]["param"] == field
    assert value not in refused.json()["error"]["message"]


def test_the_hipaa_mode_requires_reason_and_ticket(start: Callable[..., Service]) -> None:
    service = start(private_networks=("10.0.0.0/8", "127.0.0.0/8", "::1/128"))
    service.come_over_tls()
    safe = {"compliance_mode": "hipaa"}
    old, new = (service.deployment(name, security_settings=safe) for name in ("old", "new"))
    lease = {"seconds": 60, "fallback": split({old: 100})["deployments"], "pausable": True}
    path = f"/v1/canary-endpoints/{service.canary('shop', {new: 100}, lease=lease)}"
    for missing in ("reason", "ticket"):
        body = {name: value for name, value in WHY.items() if name != missing}
        refused = service.call("POST", f"{path}/pause", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, missing)
    assert service.call("GET", path).json()["paused"] is None
    assert service.call("POST", f"{path}/pause", json=WHY).json()["paused"]["ticket"] == "CHG-1042"


def test_a_revert_stands_against_a_shift_at_the_same_time(rollout: Rollout) -> None:
    """The shift came first, and was reverted, or its condition no longer holds."""
    path = f"/v1/canary-endpoints/{rollout.id}"
    shift = rollout.body({rollout.old: 25, rollout.new: 75})

    async def both() -> list[httpx.Response]:
        return await asyncio.gather(
            rollout.service.ask("POST", f"{path}/revert", json=WHY),
            rollout.service.ask("PATCH", path, json=shift, headers={"If-Match": '"1"'}),
        )

    reverted, shifted = rollout.service.run(both())
    assert (reverted.status_code, shifted.status_code in (200, 412)) == (200, True)
    found = rollout.get()
    assert (found["deployments"], found["lease"]) == (rollout.back, None)
    assert found["reverted"]["by"] == "A. Reviewer"
    assert found["version"] == (3 if shifted.status_code == 200 else 2)


def test_a_lease_that_has_lapsed_cannot_be_paused_any_more(rollout: Rollout) -> None:
    rollout.service.clock.ahead += timedelta(seconds=61)
    for verb in ("pause", "revert", "resume"):
        assert rollout.post(verb).status_code == 409
    found = rollout.get()
    assert (found["paused"], found["reverted"], found["deployments"]) == (None, None, rollout.back)
