"""After a kill, a service says in its log that its database's write-ahead log is not what it was."""

import os
from pathlib import Path

import pytest

from tests.support.service.processes import Serve
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate

pytestmark = pytest.mark.slow
MISSING = "changes that were acknowledged are missing"


def test_acknowledged_changes_that_a_cut_log_has_lost_are_reported_at_the_next_start(
    tmp_path: Path,
) -> None:
    serve = Serve(tmp_path / "data")
    log = tmp_path / "data" / "tuneship.sqlite-wal"

    try:
        serve.kill()
        serve.start()
        assert MISSING not in serve.log.read_text()
        with Client(serve.settings) as client:
            client.deployments.create(
                DeploymentCreate(model_name="tuneship-tiny", deployment_name="kept")
            )
        serve.kill()
        assert log.stat().st_size
        os.truncate(log, 0)
        serve.start()
        assert f"{MISSING}: " in serve.log.read_text()
        assert "(docs/operations.md)" in serve.log.read_text()
        reports = serve.log.read_text().count(MISSING)
        serve.kill()
        serve.start()
        assert serve.log.read_text().count(MISSING) == reports
    finally:
        serve.kill()
