"""Evaluations: two deployments answer held-out examples, and the verdict follows from wins and losses."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.service.evaluations import PLANTED, PlayedAnswers, right
from tests.support.service.in_process import Service, jsonl
from tuneship.client import Client
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.store.database import tables


@pytest.fixture
def played(service: Service) -> PlayedAnswers:
    service.supervisor.leader_work.evaluations.timing = BackgroundTiming(soon_s=0, enough=25)
    return PlayedAnswers(service).set_up()


def test_an_equal_candidate_passes_with_numbers(played: PlayedAnswers) -> None:
    played.base_fails, played.tuned_fails = range(40), range(36, 76)

    found = played.ended(played.create(slice_by=["site"], max_examples=400, margin=0.08))

    assert (found["status"], found["verdict"], found["reason"]) == ("completed", "pass", None)
    assert found["examples"] == {
        "selected": 400,
        "leaked": 0,
        "too_long": 0,
        "failed": 0,
        "scored": 400,
    }
    [grader] = found["graders"]
    assert (grader["wins"], grader["losses"], grader["ties"]) == (36, 36, 328)
    assert grader["candidate"]["score"] == grader["baseline"]["score"] == 0.9
    assert grader["low"] < 0 < grader["high"]
    assert {(one["value"], one["examples"]) for one in found["slices"]} == {("A", 200), ("B", 200)}
    assert {one["verdict"] for one in found["slices"]} == {"no_harm_shown"}
    assert "36 wins" in found["sentence"]
    assert PLANTED not in str(found)


def test_a_worse_candidate_is_stopped_early_and_no_further_request_is_sent(
    played: PlayedAnswers,
) -> None:
    played.tuned_fails = range(0, 400, 2)

    found = played.ended(played.create())

    assert (found["verdict"], found["reason"]) == ("reject", "worse")
    assert found["stopped_early"]
    scored = found["examples"]["scored"]
    assert scored < 200
    assert scored % 25 == 0
    asked = len(played.asked)
    # What was in flight at the end is not counted, and nothing comes after it.
    assert asked < 2 * 400
    assert len(played.results(found["id"])) == scored


def test_results_have_lines_scores_and_slices_and_no_text(played: PlayedAnswers) -> None:
    played.base_fails = {3}
    found = played.ended(played.create(slice_by=["site"], stop_early=False, max_examples=200))

    results = played.results(found["id"])

    assert len(results) == 200
    assert len({one["line"] for one in results}) == 200
    assert PLANTED not in str(results)
    won = [one for one in results if one["line"] == 4]
    for one in won:
        assert one["outcome"] == "win"
        assert (one["candidate"], one["baseline"]) == ({"chapter": 1.0}, {"chapter": 0.0})
        assert one["slices"] == {"site": "B"}
    assert played.results(found["id"], outcome="win") == won
    alike = [one for one in results if one["outcome"] == "tie"]
    assert played.results(found["id"], outcome="tie") == alike
    for outcome in ("loss", "scored", "failed", "leaked", "too_long"):
        assert played.results(found["id"], outcome=outcome) == []
    path = f"/v1/evaluations/{found['id']}/results"
    for offset in (0, 1, 63, 64, 65, 199, len(results) - 1, len(results), 10**9):
        page = played.service.call("GET", path, params={"limit": 7, "offset": offset}).json()
        assert page["results"] == results[offset : offset + 7]
        assert page["pagination"]["total"] == len(results)
        query: dict[str, Any] = {"limit": 7, "offset": offset, "outcome": "tie"}
        page = played.service.call("GET", path, params=query).json()
        assert page["results"] == alike[offset : offset + 7]
        assert page["pagination"]["total"] == len(alike)
    # Both models are asked an example before the next one begins.
    numbers = [number for _, number in played.asked]
    assert sorted(numbers) == sorted([number for number in set(numbers) for _ in "ab"])


def test_examples_that_a_model_was_trained_on_are_left_out(
    service: Service, played: PlayedAnswers
) -> None:
    """The tuned model's training data is the data of `Service.job`, a line of which is put into the examples."""
    training = {"instruction": "Which chapter is that?", "response": "seven"}
    copies = [{"instruction": "which  CHAPTER is that", "response": "Seven."}]
    trained = service.dataset(content=jsonl(training, *copies))
    job = service.job(dataset_id=trained)
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job) == "completed")
    model = service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()["fine_tuned_model"]
    candidate = service.deployment("leaky", model_name=model)
    lines = [{"instruction": f"case {n}?", "response": right(n)} for n in range(120)]
    mixed = service.dataset(content=jsonl(*lines, *copies))

    found = played.ended(played.create(dataset_id=mixed, candidate=candidate))

    assert found["examples"]["leaked"] == 1
    assert found["examples"]["scored"] == 120
    assert found["leaks_checked"]
    assert [one["line"] for one in played.results(found["id"], outcome="leaked")] == [121]


def test_an_evaluation_without_a_baseline_has_scores_and_a_threshold(played: PlayedAnswers) -> None:
    played.tuned_fails = range(100)
    alone = played.ended(played.create(baseline=None))
    assert (alone["verdict"], alone["graders"][0]["candidate"]["score"]) == (None, 0.75)
    assert alone["graders"][0]["wins"] is None
    assert len(played.results(alone["id"], outcome="scored")) == 400
    assert played.results(alone["id"], outcome="win") == []
    below = played.ended(played.create(baseline=None, min_score=0.8))
    assert (below["verdict"], below["reason"]) == ("reject", "below_min_score")


def test_two_evaluations_are_compared_by_their_stored_scores(played: PlayedAnswers) -> None:
    alone = {"baseline": None, "stop_early": False}
    played.base_fails, played.tuned_fails = range(40), range(36, 76)
    first = played.ended(played.create(candidate=played.baseline, **alone))
    second = played.ended(played.create(**alone))
    asked = len(played.asked)

    path = f"/v1/evaluations/{second['id']}/comparison/{first['id']}"
    answer = played.service.call("GET", path)

    assert answer.status_code == 200, answer.text
    grader = answer.json()["graders"][0]
    assert (grader["wins"], grader["losses"]) == (36, 36)
    assert len(played.asked) == asked
    # Stored scores stand for a baseline, too: the candidate alone is asked.
    third = played.ended(played.create(baseline=first["id"], stop_early=False))
    assert (third["graders"][0]["wins"], third["graders"][0]["losses"]) == (36, 36)
    assert len(played.asked) == asked + 400


def test_a_cancelled_evaluation_asks_nothing_more_and_can_be_deleted(
    played: PlayedAnswers,
) -> None:
    played.service.engines.may_answer.clear()
    made = played.create()
    call = played.service.call
    played.service.until(lambda: played.shown(made)["status"] == "running")
    assert call("DELETE", f"/v1/evaluations/{made}").status_code == 409
    assert call("DELETE", f"/v1/datasets/{played.dataset}").status_code == 409

    cancelled = call("POST", f"/v1/evaluations/{made}/cancel").json()

    assert cancelled["status"] == "cancelled"
    played.service.engines.may_answer.set()
    keeper = played.service.supervisor.leader_work.evaluations
    played.service.until(lambda: not keeper._runs)
    assert played.shown(made)["status"] == "cancelled"
    assert call("DELETE", f"/v1/evaluations/{made}").json() == {"id": made, "deleted": True}
    assert call("GET", f"/v1/evaluations/{made}").status_code == 404


def test_a_deleted_deployment_fails_the_evaluation(played: PlayedAnswers) -> None:
    played.service.engines.may_answer.clear()
    made = played.create()
    played.service.until(lambda: len(played.service.engines.asked) > 0)
    path = f"/v1/deployments/{played.candidate}"
    assert played.service.call("DELETE", path, params={"force": "true"}).status_code == 200
    played.service.engines.may_answer.set()

    found = played.ended(made)

    assert (found["status"], found["error"]["code"]) == ("failed", "deployment_gone")
    assert found["verdict"] is None


def test_a_deleted_baseline_fails_the_evaluation(played: PlayedAnswers) -> None:
    first = played.ended(played.create(baseline=None, candidate=played.baseline, stop_early=False))
    service = played.service
    service.spare = lambda _: False
    service.rest()
    made = played.create(baseline=first["id"], stop_early=False)
    assert service.call("DELETE", f"/v1/evaluations/{first['id']}").status_code == 200
    service.go_on()
    found = played.ended(made)
    assert (found["status"], found["error"]["code"]) == ("failed", "baseline_gone")


def test_a_restart_goes_on_behind_the_stored_scores(tmp_path: Path) -> None:
    with Service(tmp_path / "data") as first:
        first.supervisor.leader_work.evaluations.timing = BackgroundTiming(soon_s=0, enough=2)
        played = PlayedAnswers(first).set_up()
        played.base_fails = range(50)
        whole = played.ended(played.create(stop_early=False))
        undisturbed = played.results(whole["id"])
        first.spare = lambda _: len(played.asked) < 800 + 120
        made = played.create(stop_early=False)
        first.until(lambda: len(played.results(made)) >= 40)
        first.halt()
    with Service(tmp_path / "data") as second:
        again = played.moved_to(second)
        found = again.ended(made)
        assert found["verdict"] == whole["verdict"]
        assert again.results(made) == undisturbed
        assert len(again.asked) < 800


def test_a_kill_after_the_last_look_asks_nothing_more(tmp_path: Path) -> None:
    with Service(tmp_path / "data") as first:
        first.supervisor.leader_work.evaluations.timing = BackgroundTiming(soon_s=0, enough=25)
        played = PlayedAnswers(first).set_up()
        played.tuned_fails = range(0, 400, 2)
        whole = played.ended(played.create())
        undisturbed = played.results(whole["id"])
        assert whole["stopped_early"]
        first.halt()
        # As a kill leaves it: the last scores are stored, and the evaluation has not ended.
        with first.database.write() as connection:
            connection.execute(
                sa.update(tables.evaluations).values(
                    status="running", verdict=None, reason=None, completed_at=None
                )
            )
    with Service(tmp_path / "data") as second:
        again = played.moved_to(second)
        found = again.ended(whole["id"])
        assert (found["verdict"], found["reason"]) == ("reject", "worse")
        assert again.results(whole["id"]) == undisturbed
        assert again.asked == []


def test_the_client_waits_and_makes_a_frame(played: PlayedAnswers) -> None:
    played.tuned_fails = {4}
    service = played.service
    service.listen()
    made = played.create(stop_early=False, slice_by=["site"])

    async def use() -> Any:
        async with service.client() as client:
            found = await client.evaluations.wait(made)
            results = await client.evaluations.results(made, limit=1000)
            return found, results, client.settings

    found, results, settings = service.run(use())

    assert found.status == "completed"
    frame = results.frame()
    assert len(frame) == 400
    assert frame.loc[5, "outcome"] == "loss"
    assert (frame.loc[5, "candidate_chapter"], frame.loc[5, "baseline_chapter"]) == (0.0, 1.0)
    assert set(frame["slice_site"]) == {"A", "B"}
    with Client(settings) as client:
        assert client.evaluations.wait(made).verdict == found.verdict


def test_other_tenants_see_nothing(played: PlayedAnswers) -> None:
    made = played.create(max_examples=100)
    for path in ("", "/results", "/comparison/" + made):
        answer = played.service.call("GET", f"/v1/evaluations/{made}{path}", "bob")
        assert answer.status_code == 404, answer.text
    assert played.service.call("POST", f"/v1/evaluations/{made}/cancel", "bob").status_code == 404
    assert played.service.call("GET", "/v1/evaluations", "bob").json()["evaluations"] == []
    body = played.body()
    assert played.service.call("POST", "/v1/evaluations", "bob", json=body).status_code == 404
