"""What end-to-end tests share: one service and one Prefect server, started as the scripts start them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.script.local_processes import embedded_service, prefect_server
from tuneship.settings import ClientSettings, PipelineSettings

ROOT = Path(__file__).parents[2]
SURROUNDINGS = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "TUNESHIP_"))},
    "PYTHONPATH": str(ROOT),  # also where tuneship is not installed
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}


@dataclass(frozen=True)
class Place:
    """A running service, and the environment in which a user works with it."""

    settings: ClientSettings
    environment: Mapping[str, str]

    def start(self, *arguments: str, **changes: str) -> "subprocess.Popen[str]":
        """`python ARGUMENTS` in the repository, as a user types it."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**self.environment, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def release(
        self, folder: Path, release: Mapping[str, Any], **changes: str
    ) -> "tuple[int, str, dict[str, Any]]":
        """Run the chain: exit code, what it said, the result file."""
        params, result = folder / "release.json", folder / "out" / "result.json"
        params.write_text(json.dumps(release))
        run = self.start(
            *("flows/tune_and_deploy.py", "--params", str(params), "--result", str(result)),
            **changes,
        )
        _, said = run.communicate(timeout=900)
        return run.returncode, said, json.loads(result.read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One service and one Prefect server for all tests of a file."""
    folder = tmp_path_factory.mktemp("place")
    own = {**SURROUNDINGS, "PREFECT_HOME": str(folder / "prefect")}
    with (
        embedded_service(PipelineSettings(data_dir=folder / "data"), own) as settings,
        prefect_server(own, folder / "prefect.log") as prefect_url,
    ):
        yield Place(
            settings,
            own
            | {
                "PREFECT_API_URL": prefect_url,
                "TUNESHIP_URL": settings.url,
                "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
                "TUNESHIP_CLIENT_ID": settings.client_id,
                "TUNESHIP_RECORDS": str(folder / "records"),
                "TUNESHIP_REPORTS": str(folder / "reports"),
            },
        )
