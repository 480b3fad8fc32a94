"""A base model that the catalogue assigns to vLLM is deployed, answers, and ends with the service."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.service.processes import ROOT, Serve, running_deployment
from tests.support.waiting import is_alive, until
from tuneship.contract.generation import Generate
from tuneship.service.catalogues.base_models import SHIPPED

pytestmark = pytest.mark.slow
SERVER = ROOT / "tests" / "support" / "fakes" / "openai_server.py"


@pytest.fixture
def notes_file(tmp_path: Path) -> Path:
    return tmp_path / "seen.jsonl"


@pytest.fixture
def serve(tmp_path: Path, notes_file: Path, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """A service whose servers run as processes of its own, or of agents."""
    # It has a path of its own, because replicas are kept by the path of their model.
    (tmp_path / "base").symlink_to(SHIPPED / "tuneship-tiny", target_is_directory=True)
    entry = {
        "id": "big",
        "path": "base",
        "runtime": "vllm",
        "runtime_options": ["--seen", str(notes_file)],
    }
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [entry]}))
    started = Serve(
        tmp_path / "data",
        model_catalogue=str(file),
        agents=request.param,
        vllm_command=shlex.join([sys.executable, str(SERVER)]),
    )
    yield started
    started.stop()


@pytest.mark.parametrize(("serve", "agents"), [("none", 0), ("local", 1)], indirect=["serve"])
def test_a_base_of_vllm_is_deployed_answers_and_ends_with_the_service(
    serve: Serve, agents: int, notes_file: Path
) -> None:
    client = serve.client()
    deployment = running_deployment(client, "one", "big")
    answer = client.deployments.generate(
        deployment, Generate(prompt="Say something.", max_tokens=4, seed=5)
    )
    assert answer.usage.completion_tokens == 4
    assert answer.finish_reason == "length"
    assert len(serve.workers("tuneship.agents.agent")) == agents
    notes = [json.loads(line) for line in notes_file.read_text().splitlines()]
    asked = [one["asked"] for one in notes if "asked" in one][-1]
    assert len(asked["prompt"]) == answer.usage.prompt_tokens
    assert asked["seed"] == 5
    (pids,) = [(one["pid"], one["child"]) for one in notes if "pid" in one]
    serve.kill()
    until(lambda: not any(map(is_alive, pids)))
