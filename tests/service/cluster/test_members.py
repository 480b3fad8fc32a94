"""Two members of a cluster answer as one service does, whichever of them is asked."""

import asyncio
import time
from datetime import timedelta

import pytest

from tests.support.cluster.members import standing_still
from tests.support.openai.batches import batch, ended, permits, request
from tests.support.service.in_process import ANSWER, Service, split
from tests.support.waiting import until
from tuneship.store.database.read_cache import MAX_AGE_S
from tuneship.store.records.job_leases import LEASE

pytestmark = pytest.mark.postgres

PROMPT = {"prompt": "What is case 1?", "max_tokens": 8}


def asked(service: Service, path: str) -> tuple[str, str]:
    """Ask for a completion; returns it with the deployment that has answered."""
    answer = service.call("POST", f"/v1/{path}/generate", json=PROMPT)
    assert answer.status_code == 200, answer.text
    return answer.json()["completion"], answer.json()["deployment_id"]


def adapters(service: Service) -> set[str]:
    """The adapters that the member's own replicas have loaded."""
    live = [one for one in service.engines.replicas if one.code is None]
    return {name for one in live for name in one.adapters}


def test_a_job_of_one_member_is_trained_by_the_leader_and_its_model_served_by_both(
    members: list[Service],
) -> None:
    leader, other = members
    job_id = other.job(dataset_id=leader.dataset())
    trainer = leader.trainer()
    trainer.start_of(2)
    trainer.step(1)
    until(lambda: other.job_status(job_id) == "running")
    trainer.complete()
    until(lambda: other.job_status(job_id) == "completed")
    assert other.engines.trainers == []
    tuned = leader.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["fine_tuned_model"]

    deployment = other.deployment("d", model_name=tuned)
    path = f"deployments/{deployment}"
    assert [asked(one, path) for one in members] == 2 * [(ANSWER, deployment)]
    until(lambda: adapters(leader) == adapters(other) == {tuned})
    one, another = [member.call("GET", "/v1/deployments").json() for member in members]
    assert one == another

    assert other.call("DELETE", f"/v1/deployments/{deployment}").status_code == 200
    until(lambda: adapters(leader) == adapters(other) == set())
    assert other.deployment_status(deployment) == "deleted"


def test_a_forced_delete_ends_the_requests_of_every_member(members: list[Service]) -> None:
    leader, other = members
    deployment = leader.deployment("d")
    asked(other, f"deployments/{deployment}")
    for member in members:
        member.engines.may_answer.clear()
    running = [
        asyncio.run_coroutine_threadsafe(
            one.ask("POST", f"/v1/deployments/{deployment}/generate", json=PROMPT), one.loop
        )
        for one in members
    ]
    for member in members:
        until(lambda member=member: member.parts.in_flight.queued(deployment) == 1)
    path = f"/v1/deployments/{deployment}"
    assert other.call("DELETE", path).status_code == 200
    assert not any(one.done() for one in running)
    assert leader.call("DELETE", f"{path}?force=true").status_code == 200
    messages = [one.result(120).json()["error"]["message"] for one in running]
    assert messages == 2 * ["the deployment is being deleted"]
    until(lambda: other.deployment_status(deployment) == "deleted")
    for member in members:
        member.engines.may_answer.set()


def test_a_deployment_goes_on_when_the_leader_stands_still_and_new_ones_come(
    lapsing: list[Service],
) -> None:
    leader, other = lapsing
    kept = leader.deployment("kept")
    asked(other, f"deployments/{kept}")
    with standing_still(leader):
        assert asked(other, f"deployments/{kept}") == (ANSWER, kept)
        made = other.deployment("made")  # by the next leader
        assert asked(other, f"deployments/{made}") == (ANSWER, made)
    assert asked(leader, f"deployments/{made}") == (ANSWER, made)


def test_a_split_that_one_member_has_changed_is_used_by_all(members: list[Service]) -> None:
    leader, other = members
    first, second = leader.deployment("first"), leader.deployment("second")
    canary = other.canary("c", {first: 100, second: 0})
    path = f"endpoints/{canary}"
    for service, shares, now in (
        (leader, {first: 0, second: 100}, second),
        (other, {first: 100, second: 0}, first),
    ):
        for one in members:
            asked(one, path)
        changed = service.call("PATCH", f"/v1/canary-{path}", json=split(shares))
        assert changed.status_code == 200, changed.text
        assert asked(service, path)[1] == now
        for one in members:
            until(lambda one=one, now=now: asked(one, path)[1] == now)


def test_without_news_a_split_is_used_for_a_second_at_most(members: list[Service]) -> None:
    leader, other = members
    first, second = leader.deployment("first"), leader.deployment("second")
    path = f"endpoints/{leader.canary('c', {first: 100, second: 0})}"
    other.run(_end_news(other))
    assert asked(other, path)[1] == first
    changed = leader.call("PATCH", f"/v1/canary-{path}", json=split({first: 0, second: 100}))
    assert changed.status_code == 200
    old = time.monotonic() + MAX_AGE_S
    until(lambda: time.monotonic() > old)
    assert asked(other, path)[1] == second


async def _end_news(service: Service) -> None:
    for task in service._role_tasks:
        task.cancel()
    await asyncio.gather(*service._role_tasks, return_exceptions=True)


def test_streams_and_batches_end_wherever_their_key_was_revoked(members: list[Service]) -> None:
    leader, other = members
    deployment = other.deployment("d")
    headers = leader.key_headers("alice", lifetime=timedelta(days=1))
    for member in members:
        asked(member, f"deployments/{deployment}")
        member.engines.may_answer.clear()
    leader.spare = permits(1)
    running = [
        asyncio.run_coroutine_threadsafe(
            one.ask(
                "POST",
                f"/v1/deployments/{deployment}/generate",
                None,
                json=PROMPT,
                headers=headers,
            ),
            one.loop,
        )
        for one in members
    ]
    kept, other.headers = other.headers, {**other.headers, "alice": headers}
    made = batch(other, request("a", deployment))
    other.headers = kept
    until(lambda: len(leader.engines.replicas[0].running) == 2)
    until(lambda: len(other.engines.replicas[0].running) == 1)
    other.keys.revoke(headers["Authorization"][11:19])
    assert [one.result(60).status_code for one in running] == [401, 401]
    for member in members:
        until(lambda member=member: not member.engines.replicas[0].running)
        member.engines.may_answer.set()
    done = ended(other, made)
    assert (done["status"], done["errors"]["data"][0]["code"]) == ("cancelled", "key_ended")


def test_readers_of_a_stream_are_woken_by_other_members(members: list[Service]) -> None:
    leader, other = members

    async def heard() -> None:
        with other.parts.notifier.listening("ft_1") as news:
            leader.parts.notifier.notify("ft_1")
            await news.wait()

    other.run(heard())


def test_a_job_of_a_leader_that_ends_goes_on_at_the_next_one(members: list[Service]) -> None:
    leader, other = members
    job_id = other.job()
    trainer = leader.trainer()
    trainer.start_of(2)
    trainer.step(1)
    until(lambda: other.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["current_step"] == 1)
    leader.rest()
    assert trainer.code is not None
    # The next one need not wait for the lease on the job to lapse.
    again = other.trainer()
    again.start_of(2)
    again.complete()
    until(lambda: other.job_status(job_id) == "completed")


def test_a_job_of_a_leader_that_stands_still_is_done_by_the_next_one(
    lapsing: list[Service],
) -> None:
    leader, other = lapsing
    job_id = other.job()
    trainer = leader.trainer()
    trainer.start_of(2)
    trainer.step(1)
    until(lambda: other.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["current_step"] == 1)
    with standing_still(leader):
        until(lambda: other.leadership.leads)
        # The training may still run there, so the job is claimed only when its lease is over.
        assert other.engines.trainers == []
        for member in lapsing:
            member.clock.ahead += LEASE
        again = other.trainer()
        again.start_of(2)
        again.complete()
        until(lambda: other.job_status(job_id) == "completed")
        trainer.complete()
    until(lambda: trainer.code is not None)
    jobs = [member.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json() for member in lapsing]
    assert jobs[0] == jobs[1]
    models = leader.call("GET", "/v1/models").json()["models"]
    assert [model["fine_tuning_job_id"] for model in models if model.get("fine_tuning_job_id")] == [
        job_id
    ]
