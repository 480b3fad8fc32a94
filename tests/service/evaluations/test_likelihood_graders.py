"""The graders `choice` and `loss` at the service: scored prompts, nothing written, and no share made of a loss."""

import re
from typing import Any, Self

import pytest

from tests.support.service.evaluations import PLANTED, TOKENIZER, PlayedAnswers, right, rows
from tests.support.service.in_process import Service, jsonl
from tuneship.service.background_requests.background_run import BackgroundTiming

CHOICE, LOSS = {"name": "c", "type": "choice"}, {"name": "l", "type": "loss"}
WRITTEN = {"name": "chapter", "type": "string_check"}
CHOICES = [right(number) for number in range(4)]
LEARNT = (
    b"<|user|>{{ messages[0].content }}<|assistant|>"
    b"{% if messages[1:] %}{{ messages[1].content }}<|end|>{% endif %}"
)


class PlayedLikelihoods(PlayedAnswers):
    """Models that find the right choice likelier than the others, but for the cases in which they fail."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        service.engines.prompt_logprob_of = self._logprob

    def set_up(self, **deployed: Any) -> Self:
        """Train and deploy the other model by a job whose template is that of the base."""
        super().set_up(**deployed)
        service = self.service
        job = service.job()
        trainer = service.trainer_of(job)
        trainer.template = LEARNT
        trainer.start_of(2)
        trainer.complete()
        service.until(lambda: service.job_status(job) == "completed")
        model = service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()["fine_tuned_model"]
        self.candidate = service.deployment("learnt", model_name=model)
        lines = [one | {"metadata": {"choices": CHOICES, **one["metadata"]}} for one in rows(120)]
        self.dataset = service.dataset(content=jsonl(*lines))
        return self

    def _logprob(self, frame: dict[str, Any]) -> float:
        text = TOKENIZER.decode(frame["tokens"])
        [(number, chapter)] = re.findall(r"case (\d+)\?.*chapter (\d)", text, re.DOTALL)
        is_tuned = frame.get("adapter") is not None
        fails = int(number) in (self.tuned_fails if is_tuned else self.base_fails)
        likely, unlikely = (-0.5, -1.0) if is_tuned else (-0.25, -2.0)
        return likely if (int(chapter) == int(number) % 4) is not fails else unlikely


@pytest.fixture
def played(service: Service) -> PlayedLikelihoods:
    service.supervisor.leader_work.evaluations.timing = BackgroundTiming(soon_s=0, enough=25)
    return PlayedLikelihoods(service).set_up()


def test_choices_decide_and_losses_are_reported_without_a_written_token(
    played: PlayedLikelihoods,
) -> None:
    played.tuned_fails, played.base_fails = range(3), range(2, 12)

    found = played.ended(played.create(graders=[CHOICE, LOSS], slice_by=["site"], margin=0.08))

    assert (found["status"], found["verdict"]) == ("completed", "pass"), found["graders"]
    assert found["examples"]["scored"] == 120
    choice, loss = found["graders"]
    assert (choice["measure"], choice["wins"], choice["losses"]) == ("score", 9, 2)
    assert (loss["measure"], loss["verdict"], loss["p_worse"]) == ("loss", None, None)
    # Lower is better: the base model has lower losses but where it fails.
    assert (loss["wins"], loss["losses"], loss["ties"]) == (10, 110, 0)
    assert loss["candidate"]["score"] == pytest.approx((117 * 0.5 + 3 * 1.0) / 120)
    assert loss["baseline"]["score"] == pytest.approx((110 * 0.25 + 10 * 2.0) / 120)
    assert loss["difference"] == pytest.approx(
        loss["candidate"]["score"] - loss["baseline"]["score"]
    )
    assert loss["low"] < loss["difference"] < loss["high"]
    assert loss["baseline"]["high"] > loss["baseline"]["score"] > loss["baseline"]["low"] > 0
    frames = played.service.engines.asked
    assert {frame["max_tokens"] for frame in frames} == {0}
    assert len(frames) == 120 * 2 * len(CHOICES)
    results = played.results(found["id"])
    one = next(one for one in results if one["line"] == 1)
    assert one["outcome"] == "loss"
    assert (one["candidate"], one["baseline"]) == ({"c": 0.0, "l": 1.0}, {"c": 1.0, "l": 0.25})
    assert PLANTED not in str(found) + str(results)


def test_written_answers_and_losses_are_graded_together(played: PlayedLikelihoods) -> None:
    played.tuned_fails = {5}
    made = played.create(graders=[WRITTEN, LOSS], stop_early=False, baseline=None)

    found = played.ended(made)

    written, loss = found["graders"]
    assert written["candidate"]["score"] == pytest.approx(119 / 120)
    assert loss["candidate"]["score"] == pytest.approx((119 * 0.5 + 1.0) / 120)
    assert loss["baseline"] is loss["difference"] is None
    frames = played.service.engines.asked
    assert sorted({frame["max_tokens"] for frame in frames}) == [0, 256]
    assert len(frames) == 2 * 120
    # Stored losses stand for a baseline, too.
    same = {"graders": [WRITTEN, LOSS], "stop_early": False, "baseline": found["id"]}
    beside = played.ended(played.create(candidate=played.baseline, **same))["graders"][1]
    assert (beside["wins"], beside["losses"]) == (120, 0)
    path = f"/v1/evaluations/{found['id']}/comparison/{found['id']}"
    compared = played.service.call("GET", path).json()["graders"][1]
    assert (compared["measure"], compared["ties"], compared["difference"]) == ("loss", 120, 0.0)


def test_a_choice_that_is_too_long_leaves_the_example_out(played: PlayedLikelihoods) -> None:
    lines = [one | {"metadata": {"choices": [*CHOICES, "long " * 600]}} for one in rows(2)]
    lines += [one | {"metadata": {"choices": CHOICES}} for one in rows(5)[2:]]
    dataset = played.service.dataset(content=jsonl(*lines))

    found = played.ended(played.create(graders=[CHOICE, LOSS], dataset_id=dataset))

    counts = {"selected": 5, "leaked": 0, "too_long": 2, "failed": 0, "scored": 3}
    assert found["examples"] == counts
    left_out = played.results(found["id"], outcome="too_long")
    assert sorted(one["line"] for one in left_out) == [1, 2]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({}, "missing_field"),
        ({"choices": ["other", PLANTED]}, "invalid_choices"),
    ],
)
def test_a_line_without_its_choices_is_refused_before_anything_runs(
    played: PlayedLikelihoods, line: dict[str, Any], code: str
) -> None:
    bad = {"instruction": "case 7?", "response": right(7), "metadata": line}
    good = [one | {"metadata": {"choices": CHOICES}} for one in rows(2)]
    dataset = played.service.dataset(content=jsonl(*good, bad))
    body = played.body(graders=[WRITTEN, CHOICE], dataset_id=dataset)

    answer = played.service.call("POST", "/v1/evaluations", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (422, "graders[1]"), answer.text
    assert (error["details"][0]["code"], error["details"][0]["line"]) == (code, 3)
    assert PLANTED not in answer.text
    assert played.service.engines.asked == []


def test_a_loss_decides_nothing(played: PlayedLikelihoods) -> None:
    for order in ({"graders": [LOSS]}, {"graders": [CHOICE, LOSS], "gating": ["c", "l"]}):
        answer = played.service.call("POST", "/v1/evaluations", json=played.body(**order))
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["param"].startswith("gating[")
        assert "loss" in answer.json()["error"]["message"]
