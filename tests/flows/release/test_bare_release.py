"""A whole release on a server of the bare description: without endpoint lists, leases, versions and counts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.forms.release_form import EndpointChoice
from flows.shared.errors import BadInput
from flows.tune_and_deploy import tune_and_deploy
from tasks.deployments import create_deployment
from tests.flows.conftest import in_use
from tests.flows.release.test_retrain import ended, release, write
from tests.support.fakes.whole_service import WholeService
from tuneship.contract.deployments import DeploymentCreate
from tuneship.gates.plan import QualityGates
from tuneship.settings import PipelineSettings

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@pytest.fixture
def bare(
    prefect_api: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeService]:
    with in_use(WholeService(extensions=False), tmp_path / "reports", monkeypatch) as running:
        yield running


def test_a_release_that_says_what_serves_is_promoted(bare: WholeService, tmp_path: Path) -> None:
    serving = DeploymentCreate(model_name="tuneship-tiny", deployment_name="serving")
    serves = create_deployment(serving, "before").id
    wanted = release(tmp_path, files=[str(write(tmp_path / "data" / "a.jsonl", 0, 80))])
    place = EndpointChoice(name="shop", baseline_deployment_id=serves)
    canary = wanted.canary.model_copy(update={"quality_gates": QualityGates(empty=None)})

    result = tune_and_deploy(wanted.model_copy(update={"endpoint": place, "canary": canary}))

    assert ended(result) == "promoted (none)"
    assert bare.weights[str(result.candidate_deployment_id)] == 100
    assert bare.validated_for == 2 * ["tuneship-tiny"]
    assert ["comparison" in job for job in bare.jobs.values()] == [False], "it is refused here"
    facts = [
        json.loads(line)
        for file in PipelineSettings().records.rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    plan = next(fact["plan"] for fact in facts if "plan_digest" in fact)
    # A tuned model is meant to answer unlike its base.
    assert plan["output_length"] is None
    assert (plan["quality_gates"]["short"], plan["quality_gates"]["long"]) == (None, None)


def test_a_release_that_does_not_is_refused_before_anything_is_made(
    bare: WholeService, tmp_path: Path
) -> None:
    wanted = release(tmp_path, files=[str(write(tmp_path / "data" / "a.jsonl", 0, 80))])
    with pytest.raises(BadInput, match=r"^endpoint.baseline_deployment_id: "):
        tune_and_deploy(wanted)
    assert not bare.jobs
    assert not bare.datasets
