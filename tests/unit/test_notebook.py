"""The notebook is committed without outputs, which would age and may hold what nobody meant to publish."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
    assert all(cell["metadata"] == {} for cell in cells)
