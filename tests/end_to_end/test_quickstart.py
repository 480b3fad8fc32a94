"""The notebook runs from its first cell to its last against a real service, in a kernel as Jupyter starts one."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from flows.script.local_processes import embedded_service
from tests.end_to_end.conftest import ROOT, SURROUNDINGS
from tuneship.client import Client
from tuneship.settings import PipelineSettings

pytestmark = [pytest.mark.slow, pytest.mark.long]
EXAMPLES = ROOT / "examples"


def test_the_notebook_uploads_tunes_deploys_asks_and_cleans_up(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    with embedded_service(PipelineSettings(data_dir=tmp_path / "data"), SURROUNDINGS) as settings:
        runner = NotebookClient(
            notebook, timeout=900, resources={"metadata": {"path": str(EXAMPLES)}}
        )
        runner.execute(
            env={
                **SURROUNDINGS,
                "TUNESHIP_URL": settings.url,
                "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
                "TUNESHIP_CLIENT_ID": settings.client_id,
            }
        )
        with Client(settings) as client:
            assert [job.status for job in client.jobs.iterate()] == ["completed"]
            assert [one.num_examples for one in client.datasets.iterate()] == [100, 1900]
            assert list(client.deployments.iterate()) == []
    shown = "".join(_texts(notebook))
    for expected in ("1900", "validation_loss", "answer", "error_rate_request_count"):
        assert expected in shown


def _texts(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [str(output.get("data", output.get("text"))) for output in outputs]
