"""A release leaves its dataset, model and deployment as assets in the Prefect server, each with where it came from."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_API_URL

from flows.shared.assets import asset_key
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.whole_service import WholeService
from tests.support.waiting import until
from tuneship.contract.model_card import ModelCard

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def materialized(key: str, since: datetime) -> list[dict[str, Any]]:
    """The events of an asset that the server has stored; other tests use the same server, and the same ids."""
    within = {"since": since.isoformat(), "until": datetime.now(UTC).isoformat()}
    wanted = {"filter": {"resource": {"id": [key]}, "occurred": within}, "limit": 50}
    answer = httpx.post(f"{PREFECT_API_URL.value()}/events/filter", json=wanted, trust_env=False)
    answer.raise_for_status()
    return [
        one
        for one in answer.json()["events"]
        if one["event"] == "prefect.asset.materialization.succeeded"
    ]


def test_dataset_model_and_deployment_are_assets_with_numbers_and_their_origin(
    service: WholeService, tmp_path: Path
) -> None:
    file = write(tmp_path / "data" / "secret-name.jsonl", 0, 80)
    began = datetime.now(UTC)
    result = tune_and_deploy(release(tmp_path, files=[str(file)]))
    assert result.outcome == "promoted"
    job = service.jobs[str(result.job_id)]
    keys = {
        "dataset": asset_key("dataset", job["dataset_id"]),
        "model": asset_key("model", str(result.model)),
        "deployment": asset_key("deployment", str(result.candidate_deployment_id)),
    }
    [dataset] = until(lambda: materialized(keys["dataset"], began))
    [model] = until(lambda: materialized(keys["model"], began))
    [deployment] = until(lambda: materialized(keys["deployment"], began))

    tags = service.datasets[job["dataset_id"]]["tags"]
    assert dataset["payload"]["sha256"] == [tags["content_sha256"]]
    assert model["payload"]["decision"] == "pass"
    assert {gate["name"] for gate in result.training_gates} >= set(model["payload"]["gates"])
    assert model["payload"]["gates"]
    assert deployment["payload"]["outcome"] == "promoted"
    assert deployment["payload"]["measures"]
    origins = [
        {one["prefect.resource.id"] for one in event["related"]} & set(keys.values())
        for event in (dataset, model, deployment)
    ]
    assert origins == [set(), {keys["dataset"]}, {keys["model"]}]
    assert "secret-name" not in json.dumps([dataset, model, deployment])

    # The model card names the same gates.
    card = ModelCard.model_validate_json(Path(str(result.model_card)).read_bytes())
    assert card.decisions is not None
    assert {one.name for one in card.decisions.gates} >= set(model["payload"]["gates"])
