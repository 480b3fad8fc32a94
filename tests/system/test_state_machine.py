"""Hypothesis runs creates, updates, cancels, deletes and shifts in any order and compares the API with a model of it.

After every step each answer was a declared one and none was a 5xx. At the end of a run the service is checked: lists
hold exactly what the model has, states moved along the declared graph, each transition has one event, without gaps, and
splits are whole numbers that sum to 100.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support.faults import invariants
from tests.support.repeats import variants
from tests.support.service.in_process import Service, split
from tuneship.contract.jobs import ENDED
from tuneship.contract.jobs import MOVES as JOB_MOVES
from tuneship.store.database import tables

pytestmark = [pytest.mark.slow, pytest.mark.long]
# Seconds of a lease, so many that none ends by itself on a slow machine.
LEASE_S = 3600
numbers = count()


class Tenant(RuleBasedStateMachine):
    """A tenant that is new in every run; `service` is shared by all runs."""

    service: ClassVar[Service]
    datasets = Bundle("datasets")
    jobs = Bundle("jobs")
    deployments = Bundle("deployments")
    canaries = Bundle("canaries")

    def __init__(self) -> None:
        super().__init__()
        self.name = f"tenant-{next(numbers)}"
        self.service.headers[self.name] = self.service.key_headers(self.name)
        self.live_datasets: set[str] = set()
        self.job_states: dict[str, str] = {}
        self.job_data: dict[str, str] = {}
        self.live_deployments: set[str] = set()
        self.splits: dict[str, dict[str, Any]] = {}

    def ask(self, method: str, path: str, want: int, **options: Any) -> httpx.Response:
        answer = self.service.call(method, f"/v1{path}", self.name, **options)
        assert answer.status_code == want, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer

    # Datasets

    @rule(target=datasets)
    def upload(self) -> str:
        made = self.service.dataset(self.name)
        self.live_datasets.add(made)
        return made

    @rule(target=datasets, first=datasets, second=datasets)
    def merge(self, first: str, second: str) -> str:
        body = {"dataset_ids": [first, second], "name": "merged"}
        if first == second:
            self.ask("POST", "/datasets/merge", 422, json=body)
            return first
        if not {first, second} <= self.live_datasets:
            self.ask("POST", "/datasets/merge", 404, json=body)
            return first
        made = self.ask("POST", "/datasets/merge", 201, json=body).json()
        assert made["source_datasets"] == [first, second]
        self.live_datasets.add(made["id"])
        return made["id"]

    @rule(dataset=datasets)
    def delete_dataset(self, dataset: str) -> None:
        in_use = any(
            self.job_data[job] == dataset and state not in ENDED
            for job, state in self.job_states.items()
        )
        want = 404 if dataset not in self.live_datasets else 409 if in_use else 200
        self.ask("DELETE", f"/datasets/{dataset}", want)
        if want == 200:
            self.live_datasets.discard(dataset)

    # Jobs

    @rule(target=jobs, dataset=datasets)
    def create_job(self, dataset: str) -> str:
        body = {"base_model": "tuneship-tiny", "dataset_id": dataset, "model_name": "m"}
        active = sum(state not in ENDED for state in self.job_states.values())
        if dataset not in self.live_datasets:
            self.ask("POST", "/fine-tuning/jobs", 404, json=body)
            return "none"
        if active >= self.service.settings.maximum_active_jobs:
            self.ask("POST", "/fine-tuning/jobs", 429, json=body)
            return "none"
        made = self.ask("POST", "/fine-tuning/jobs", 201, json=body).json()["id"]
        self.job_states[made], self.job_data[made] = "queued", dataset
        return made

    def _reaches(self, job: str, state: str) -> None:
        def reached() -> bool:
            self.service.database.announce()
            return self.service.job_status(job, self.name) == state

        self.service.until(reached)
        self.job_states[job] = state

    @rule(job=jobs)
    def cancel(self, job: str) -> None:
        path = f"/fine-tuning/jobs/{job}/cancel"
        state = self.job_states.get(job)
        if state is None:
            self.ask("POST", path, 404)
        elif state in ENDED:
            self.ask("POST", path, 409)
        else:
            trainer = self.service.trainer_of(job)
            assert self.ask("POST", path, 200).json()["status"] in ("cancelling", "cancelled")
            trainer.code = 0
            self._reaches(job, "cancelled")

    @rule(job=jobs, good=st.booleans())
    def train(self, job: str, good: bool) -> None:
        if self.job_states.get(job, "completed") in ENDED:
            return
        trainer = self.service.trainer_of(job)
        trainer.start_of(2)
        trainer.step(1)
        trainer.step(2)
        if good:
            trainer.complete()
        else:
            trainer.say({"kind": "failed", "reason": "internal", "message": "x", "at_step": 2})
            trainer.code = 1
        self._reaches(job, "completed" if good else "failed")

    # Deployments

    @rule(target=deployments)
    def deploy(self) -> str:
        made = self.service.deployment(f"d{next(numbers)}", self.name)
        self.live_deployments.add(made)
        return made

    @rule(deployment=deployments, value=st.sampled_from(["a", "b"]))
    def tag(self, deployment: str, value: str) -> None:
        path, body = f"/deployments/{deployment}", {"tags": {"k": value}}
        if deployment not in self.live_deployments:
            self.ask("PATCH", path, 409, json=body)
            return
        assert self.ask("PATCH", path, 200, json=body).json()["tags"]["k"] == value
        self.service.until(
            lambda: self.service.deployment_status(deployment, self.name) == "running"
        )

    @rule(deployment=deployments, force=st.booleans())
    def delete_deployment(self, deployment: str, force: bool) -> None:
        path = f"/deployments/{deployment}?force={str(force).lower()}"
        users = [
            endpoint
            for endpoint, one in self.splits.items()
            if one["status"] == "active" and deployment in self._wanted_by(one)
        ]
        if deployment in self.live_deployments and users and not force:
            self.ask("DELETE", path, 409)
            return
        self.ask("DELETE", path, 200)
        if deployment not in self.live_deployments:
            return
        self.live_deployments.discard(deployment)
        for endpoint in users:
            self.splits[endpoint] |= {"status": "inactive", "lease": None}
        for one in self.splits.values():
            for members in (one["members"], one["lease"] or {}):
                if members.get(deployment) == 0:
                    del members[deployment]
        self.service.until(
            lambda: self.service.deployment_status(deployment, self.name) == "deleted"
        )

    @staticmethod
    def _wanted_by(one: dict[str, Any]) -> set[str]:
        sets = (one["members"], one["lease"] or {})
        return {member for members in sets for member, share in members.items() if share}

    # Canary endpoints

    @rule(target=canaries, first=deployments, second=deployments, share=st.integers(0, 100))
    def create_canary(self, first: str, second: str, share: int) -> str:
        body = split({first: share, second: 100 - share}, name=f"c{next(numbers)}")
        want = self._want_split(first, second, share)
        answer = self.ask("POST", "/canary-endpoints", want, json=body)
        if want != 201:
            return "none"
        made = answer.json()["id"]
        self.splits[made] = {
            "members": {first: share, second: 100 - share},
            "lease": None,
            "status": "active",
        }
        return made

    def _want_split(self, first: str, second: str, share: int) -> int:
        if first == second:
            # As a dict has one key, the body has one member, which is valid only with all traffic.
            return (
                201
                if share == 0 and first in self.live_deployments
                else (422 if share != 0 else 409)
            )
        # Even a member with a share of 0 must exist.
        return 201 if {first, second} <= self.live_deployments else 409

    @rule(
        canary=canaries,
        first=deployments,
        second=deployments,
        share=st.integers(0, 100),
        how=st.sampled_from(["plain", "lease", "matching", "stale"]),
    )
    def shift(self, canary: str, first: str, second: str, share: int, how: str) -> None:
        path = f"/canary-endpoints/{canary}"
        body = split({first: share, second: 100 - share})
        if canary not in self.splits:
            self.ask("PATCH", path, 404, json=body)
            return
        before = self.ask("GET", path, 200)
        want = self._want_split(first, second, share)
        want = 200 if want == 201 else want
        headers = {}
        if how in ("matching", "stale"):
            headers["If-Match"] = before.headers["etag"] if how == "matching" else '"999999"'
            want = 412 if how == "stale" and want == 200 else want
        lease = {first: 100} if how == "lease" and first in self.live_deployments else None
        if lease:
            body["lease"] = {"seconds": LEASE_S, "fallback": split(lease)["deployments"]}
        answer = self.ask("PATCH", path, want, json=body, headers=headers)
        if want == 200:
            members = {first: share, second: 100 - share}
            self.splits[canary] = {"members": members, "lease": lease, "status": "active"}
            assert answer.json()["version"] == before.json()["version"] + 1

    @rule()
    def leases_lapse(self) -> None:
        """Let this tenant's leases lapse in the database; moving the clock would end leases on jobs, too."""
        table = tables.endpoints
        mine = (table.c.client_id == self.name) & table.c.lease_until.is_not(None)
        now = self.service.clock()
        with self.service.database.write() as connection:
            connection.execute(sa.update(table).where(mine).values(lease_until=now))
        for one in self.splits.values():
            if one["lease"]:
                one |= {"members": dict(one["lease"]), "lease": None}

    @rule(canary=consumes(canaries))
    def delete_canary(self, canary: str) -> None:
        want = 200 if self.splits.pop(canary, None) else 404
        self.ask("DELETE", f"/canary-endpoints/{canary}", want)

    @rule(canary=canaries)
    def generate(self, canary: str) -> None:
        one = self.splits.get(canary)
        want = 404 if one is None else 200 if one["status"] == "active" else 409
        answer = self.ask("POST", f"/endpoints/{canary}/generate", want, json={"prompt": "a"})
        if one is not None and want == 200:
            assert one["members"][answer.json()["deployment_id"]] > 0

    @invariant()
    def splits_stand_as_they_were_set(self) -> None:
        for canary, one in self.splits.items():
            record = self.ask("GET", f"/canary-endpoints/{canary}", 200).json()
            members = {
                member["id"]: member["traffic_percentage"] for member in record["deployments"]
            }
            assert (members, record["status"]) == (one["members"], one["status"])
            assert sum(members.values()) == 100

    def teardown(self) -> None:
        for job, state in list(self.job_states.items()):
            assert self.service.job_status(job, self.name) in (state, "running")
            if state not in ENDED:
                self.cancel(job)
        self._lists_are_whole()
        self._events_tell_every_move()

    def _lists_are_whole(self) -> None:
        for path, key, ids in (
            ("/datasets", "datasets", self.live_datasets),
            ("/fine-tuning/jobs", "jobs", set(self.job_states)),
            ("/deployments", "deployments", self.live_deployments),
            ("/canary-endpoints", "canary_endpoints", set(self.splits)),
        ):
            assert set(self._walked(path, key)) == ids

    def _walked(self, path: str, key: str) -> Iterator[str]:
        offset: int | None = 0
        while offset is not None:
            page = self.ask("GET", f"{path}?limit=3&offset={offset}", 200).json()
            yield from (one["id"] for one in page[key])
            offset = page["pagination"]["next_offset"]

    def _events_tell_every_move(self) -> None:
        """Check that event sequences have no gaps and that the events form paths through the declared graphs."""
        with self.service.database.read() as connection:
            mine = tables.events.c.client_id == self.name
            events_by_resource = invariants.events_by_resource(connection, mine)
        for job, state in self.job_states.items():
            invariants.check_job_events(state, events_by_resource[job])
        for events in events_by_resource.values():
            invariants.check_moves(events)


def test_the_graph_of_jobs_has_no_way_out_of_an_end() -> None:
    assert {state for state, following in JOB_MOVES.items() if not following} == ENDED


@pytest.mark.hypothesis
@pytest.mark.parametrize("examples", variants([25, 50]))
def test_any_order_of_operations_keeps_the_invariants(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    with Service(tmp_path_factory.mktemp("machine")) as service:
        Tenant.service = service
        run_state_machine_as_test(
            Tenant,
            settings=settings(
                max_examples=examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert not [line for line in service.log.texts if line.startswith("ERROR")]
