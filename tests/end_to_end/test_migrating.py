"""Every command and program of `docs/migrating/` runs, in the order of its page, as somebody does who reads it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT
from tests.support.models.families import build_family
from tests.support.models.gguf_files import write_gguf
from tests.support.models.peft_adapters import trained_elsewhere
from tests.support.repeats import variants
from tests.support.service.processes import COLOURS, Serve
from tuneship.client import Client
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.settings import ClientSettings

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
# The page that most people come by, and that each commit tries.
FIRST = "from-openai"
PAGES = sorted(
    (ROOT / "docs/migrating").glob("from-*.md"), key=lambda page: (page.stem != FIRST, page.name)
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Serve]:
    serve = Serve(tmp_path / "data")
    try:
        yield serve
    finally:
        serve.stop()


def prepare(folder: Path) -> None:
    """Put into the folder what a reader brings: rows, an adapter of peft, a GGUF file."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Which colour is number {number}?"},
                {"role": "assistant", "content": COLOURS[number % len(COLOURS)]},
            ]
        }
        for number in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained_elsewhere(SHIPPED / "tuneship-tiny", folder / "adapter")
    (folder / "models").mkdir()
    made = build_family(folder / "made", "llama")
    write_gguf(made, folder / "models" / "my-model.gguf")
    shutil.rmtree(made)


def surroundings(served: Serve) -> dict[str, str]:
    """The variables of a reader whose service runs on this machine, with its commands in PATH."""
    credentials = ClientSettings.from_credentials(served.data_dir / "credentials.json")
    kept = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TUNESHIP_DATA_DIR": str(served.data_dir),
        "TUNESHIP_URL": served.url,
        "TUNESHIP_API_KEY": credentials.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": credentials.client_id,
        "OPENAI_BASE_URL": f"{served.url}/openai/v1",
        "OPENAI_API_KEY": credentials.api_key.get_secret_value(),
    }


@pytest.mark.parametrize("page", variants(PAGES), ids=[page.stem for page in PAGES])
def test_a_page_runs_from_its_first_command_to_its_last(
    page: Path, served: Serve, tmp_path: Path
) -> None:
    prepare(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    said: list[str] = []
    for language, text in blocks:
        command = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
        run = subprocess.run(
            [*command, text],
            cwd=tmp_path,
            env=surroundings(served),
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, f"{text}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
        said.append(run.stdout)
    client: Client = served.client()
    tuned = [model.id for model in client.models.iterate()]
    assert tuned
    assert any(model in "".join(said) for model in tuned), said
    assert {job.status for job in client.jobs.iterate()} <= {"completed"}
