"""A release with `compliance_mode: hipaa` creates its job and deployments in that mode, on a real service."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import RunningServices
from tuneship.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.long]
JOB_SETTINGS = {
    "audit_logging": True,
    "compliance_mode": "hipaa",
    "encryption_level": "maximum",
    "network_isolation": True,
}
DEPLOYMENT_SETTINGS = {**JOB_SETTINGS, "private_endpoints": True}


def release(folder: Path) -> dict[str, Any]:
    """Parameters of the quickest real release; its gates are lenient because they are not tested here."""
    rows = [{"instruction": f"what is case {n}?", "response": f"ward {n % 4}"} for n in range(64)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model_name": "hipaa",
        "endpoint": {"name": "hipaa"},
        "security_settings": {"compliance_mode": "hipaa"},
        "data": {"files": [str(file)]},
        "hyperparameters": {"epochs": 1, "batch_size": 8, "learning_rate": 0.001},
        "validation_frequency": 2,
        "training_gates": {"min_gain": 0.0, "min_validation_examples": 1},
        "evaluation": {"max_examples": 0},
        "canary": {
            "steps": [50, 100],
            "interval": "1s",
            "look_every_seconds": 1,
            "min_looks_per_step": 1,
            "min_requests_per_step": 5,
            "bake_looks": 1,
            "error_gate": {"ratio": 3.0, "harm": 0.3, "ok": 0.45},
            "latency_gates": None,
            "quality_gates": None,
            "traffic": {"prompts": str(file), "requests_per_second": 20, "max_tokens": 4},
        },
    }


def test_everything_a_hipaa_release_makes_is_in_the_mode_and_no_other_release_follows_it(
    services: RunningServices, tmp_path: Path
) -> None:
    code, said, result = services.release(tmp_path, release(tmp_path))
    assert (code, result["outcome"]) == (0, "promoted"), said
    with Client(services.settings) as client:
        job = client.jobs.get(result["job_id"])
        assert job.security_settings == JOB_SETTINGS
        for role in ("baseline", "candidate"):
            deployment = client.deployments.get(result[f"{role}_deployment_id"])
            assert deployment.security_settings == DEPLOYMENT_SETTINGS, role
        actions = {row.action for row in client.audit.iterate(limit=1000)}
    assert {"generate_by_endpoint", "get_deployment_metrics", "get_job"} <= actions, "reads too"
    wanted = {**release(tmp_path), "security_settings": {"audit_logging": True}}
    code, said, result = services.release(tmp_path, wanted)
    assert (code, result["outcome"]) == (1, "aborted"), said
    assert "security_settings.compliance_mode: what serves the endpoint has hipaa" in said
    with Client(services.settings) as client:
        assert [one.id for one in client.jobs.iterate()] == [job.id], "refused before it trained"
