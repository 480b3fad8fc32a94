"""Gate T12: answers to held-out examples decide a release before any traffic moves, on the real service."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from prefect import get_client

from flows.forms.release_form import ReleaseParameters
from flows.release.result import ReleaseResult
from flows.shared.errors import BadInput
from flows.tune_and_deploy import tune_and_deploy
from tests.support.fakes.proxy import Exchange, refused
from tests.support.service.evaluations import PLANTED, PlayedAnswers, rows
from tests.support.service.in_process import Service, jsonl
from tests.system.faults.stage import Stage
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.model_card import ModelCard
from tuneship.settings import PipelineSettings
from tuneship.store.database import tables

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


class Releases(Stage):
    """A stage whose baseline is the base model; a tuned model exists and is released by its name."""

    def set_up_alone(self) -> None:
        self.played = PlayedAnswers(self.service).set_up()
        self.baseline = self.played.baseline
        self.model = self.service.call("GET", f"/v1/deployments/{self.played.candidate}").json()[
            "model_name"
        ]
        self._open({self.baseline: 100})

    def release(self, folder: Path, endpoint: str = "", **evaluation: Any) -> ReleaseResult:
        """Release the tuned model at the stage's endpoint, or at a new one of this name."""
        file = folder / "held-out.jsonl"
        file.write_bytes(jsonl(*rows(400)))
        plan = self.plan(candidate_deployment_id="none").model_dump(exclude_unset=True)
        pair = ("endpoint_id", "baseline_deployment_id", "candidate_deployment_id")
        wanted = {"file": str(file), "graders": [{"name": "chapter", "type": "string_check"}]}
        parameters = {
            "model_name": "m",
            "model": self.model,
            "endpoint": {"name": endpoint} if endpoint else {"id": self.endpoint},
            "evaluation": wanted | {"slice_by": ["site"], "margin": 0.08} | evaluation,
            "canary": {name: value for name, value in plan.items() if name not in pair},
        }
        return tune_and_deploy(ReleaseParameters.model_validate(parameters))


@pytest.fixture
def stage(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Releases]:
    with Releases(tmp_path) as created:
        created.set_up_alone()
        yield created


def gate_of(result: ReleaseResult) -> dict[str, Any]:
    return next(one for one in result.training_gates if one["name"] == "T12 evaluation")


def test_a_worse_model_is_rejected_before_any_traffic(
    stage: Releases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage.played.tuned_fails = range(0, 400, 2)

    result = stage.release(tmp_path)

    assert (result.outcome, result.reason, result.gate) == (
        "rejected",
        "evaluation",
        "T12 evaluation",
    )
    assert result.candidate_deleted
    assert stage.shares() == {stage.baseline: 100}
    assert gate_of(result)["state"] == "reject"
    assert gate_of(result)["limit"] == -0.08
    assert result.evaluation is not None
    assert 0 < len(result.evaluation.lost_lines) <= 20
    assert all(line % 2 for line in result.evaluation.lost_lines)
    report = Path(str(result.report))
    text = report.read_text()
    assert result.evaluation.sentence in text
    assert (report.parent / "evaluation.png").stat().st_size > 5_000
    card_file = Path(str(result.model_card))
    card = ModelCard.model_validate_json(card_file.read_bytes())
    found = card.evaluation
    assert found is not None
    assert found.graders[0].type == "string_check"
    assert [one.model_dump(exclude={"type"}) for one in found.graders] == [
        one.model_dump() for one in result.evaluation.graders
    ]
    assert found.examples is not None
    assert (found.dataset_sha256, found.slices) == (
        result.evaluation.dataset_sha256,
        result.evaluation.slices,
    )
    assert result.evaluation.dataset_sha256
    shown = card_file.read_text() + card_file.with_suffix(".md").read_text()
    with get_client(sync_client=True) as client:
        artifacts = [
            one for one in client.read_artifacts() if result.evaluation.sentence in str(one)
        ]
    assert artifacts
    kept = [
        text,
        shown,
        json.dumps(result.model_dump(mode="json")),
        str(artifacts),
        caplog.text,
        *(file.read_text() for file in PipelineSettings().records.rglob("*.jsonl")),
        *stage.service.log.texts,
        *rows_of_all_tables(stage.service),
    ]
    assert [one for one in kept if PLANTED in one] == []


def rows_of_all_tables(service: Service) -> list[str]:
    """Events, deliveries and audit rows among them."""
    with service.database.read() as connection:
        return [
            str(connection.execute(sa.select(one)).all()) for one in tables.METADATA.sorted_tables
        ]


def test_an_equal_model_is_promoted_with_its_numbers(stage: Releases, tmp_path: Path) -> None:
    stage.played.base_fails, stage.played.tuned_fails = range(40), range(36, 76)

    result = stage.release(tmp_path)

    assert result.outcome == "promoted"
    assert gate_of(result)["state"] == "pass"
    assert result.evaluation is not None
    assert {one.verdict for one in result.evaluation.slices} == {"no_harm_shown"}


@pytest.mark.parametrize(
    ("choice", "outcome"),
    [("hold", "rejected"), pytest.param("continue", "promoted", marks=pytest.mark.soak)],
)
def test_examples_that_cannot_decide_hold_as_the_release_says(
    stage: Releases, tmp_path: Path, choice: str, outcome: str
) -> None:
    result = stage.release(tmp_path, max_examples=50, on_inconclusive=choice)
    assert result.outcome == outcome
    assert gate_of(result)["state"] == "hold"
    assert any("too few" in note or "not decided" in note for note in result.notes)


def test_a_first_release_is_compared_with_its_base_model(stage: Releases, tmp_path: Path) -> None:
    stage.played.tuned_fails = range(0, 400, 2)

    result = stage.release(tmp_path, endpoint="first")

    assert (result.outcome, result.reason) == ("rejected", "evaluation")
    assert result.evaluation is not None
    made = stage.direct.evaluations.get(str(result.evaluation.evaluation_id))
    assert (made.candidate, made.baseline) == (
        *(result.candidate_deployment_id, result.baseline_deployment_id),
    )
    assert made.baseline_model == "tuneship-tiny"
    # The default of a release, which is not that of the service.
    assert made.settings.max_tokens == 64
    left = {one.id for one in stage.direct.deployments.iterate(status=DeploymentStatus.RUNNING)}
    assert left == {stage.baseline, stage.played.candidate}
    names = {one.name for one in stage.direct.canary_endpoints.iterate()}
    assert names == {"shop"}


def test_a_server_without_evaluations_is_asked_by_the_pipeline(
    stage: Releases, tmp_path: Path
) -> None:
    stage.proxy.play("POST", "/v1/evaluations", [refused(404, "resource_not_found")], for_ever=True)
    stage.played.tuned_fails = range(0, 400, 2)

    result = stage.release(tmp_path)

    assert (result.outcome, result.reason) == ("rejected", "evaluation")
    assert result.evaluation is not None
    assert result.evaluation.evaluation_id is None
    assert any("offers no evaluations" in note for note in result.notes)


@pytest.mark.soak
def test_a_bare_server_is_judged_by_clusters_too(stage: Releases, tmp_path: Path) -> None:
    stage.proxy.play("POST", "/v1/evaluations", [refused(404, "resource_not_found")], for_ever=True)

    result = stage.release(tmp_path, cluster_by="site", on_inconclusive="hold")

    assert gate_of(result)["state"] == "hold"
    assert result.evaluation is not None
    assert "clusters" in result.evaluation.sentence


def test_an_evaluation_that_did_not_complete_rejects_whatever_the_release_says(
    stage: Releases, tmp_path: Path
) -> None:
    async def cancelled_before_its_id_is_known(exchange: Exchange) -> None:
        stage.service.engines.may_answer.clear()
        answer = await exchange.pass_on()
        made = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["id"]
        path = f"/v1/evaluations/{made}/cancel"
        done = await asyncio.to_thread(stage.service.call, "POST", path)
        stage.service.engines.may_answer.set()
        assert done.status_code == 200, done.text
        await exchange.answer(answer)

    stage.proxy.play("POST", "/v1/evaluations", [cancelled_before_its_id_is_known])

    result = stage.release(tmp_path, on_inconclusive="continue")

    assert (result.outcome, result.gate) == ("rejected", "T12 evaluation")
    assert "did not complete" in gate_of(result)["note"]
    assert stage.shares() == {stage.baseline: 100}


def test_a_bare_server_refuses_graders_of_log_probabilities_before_anything_is_made(
    stage: Releases, tmp_path: Path
) -> None:
    stage.proxy.play("GET", "/v1/evaluations", [refused(404, "resource_not_found")], for_ever=True)
    graders = [{"name": "chapter", "type": "string_check"}, {"name": "l", "type": "loss"}]
    before = stage.service.call("GET", "/v1/deployments").json()["pagination"]["total"]

    with pytest.raises(BadInput, match=r"evaluation.graders\[1\].type: loss needs evaluations"):
        stage.release(tmp_path, graders=graders)

    after = stage.service.call("GET", "/v1/deployments").json()["pagination"]["total"]
    assert after == before


def test_lines_without_choices_end_a_release_before_anything_is_made(
    stage: Releases, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"evaluation.graders\[0\] needs metadata.choices.*line \d"):
        stage.release(tmp_path, graders=[{"name": "c", "type": "choice"}])
    assert stage.service.call("GET", "/v1/evaluations").json()["evaluations"] == []
