"""A real service takes in an adapter from peft, serves it and hands it out again, whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.families import build_family
from tests.support.models.peft_adapters import trained_elsewhere
from tests.support.service.processes import Serve, running_deployment, start
from tests.support.waiting import until
from tuneship.contract.generation import Generate
from tuneship.host.weight_files import ADAPTER_CONFIG
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.serving.adapters import read_adapter
from tuneship.settings import service_variables

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

TINY = SHIPPED / "tuneship-tiny"
PROMPT = Generate(prompt="Chronic eczema of both hands", max_tokens=8, temperature=0)


def command(
    *arguments: str, prelude: str = "", **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Run `tuneship models` in a process of its own; `prelude` is run there first."""
    program = f"{prelude}\nimport sys\nfrom tuneship.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "models", *arguments],
        env=os.environ | {f"TUNESHIP_{name.upper()}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_elsewhere(TINY, tmp_path_factory.mktemp("elsewhere") / "adapter")


def test_an_adapter_goes_in_serves_and_comes_out(tmp_path: Path, adapter: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    serve = Serve(data)
    try:
        client = serve.client()
        place = {"data_dir": str(data)}
        base = ("--base-model", "tuneship-tiny")
        done = command("import", str(adapter), *base, "--name", "elsewhere", "--json", **place)
        assert done.returncode == 0, done.stderr
        model = json.loads(done.stdout)["id"]
        deployment = running_deployment(client, "d", model)
        assert client.deployments.generate(deployment, PROMPT).deployment_id == deployment

        wanted = ("download", model, str(out), "--format", "gguf")
        done = command(*wanted, **place)
        assert "this key lacks the scope models:content" in done.stderr
        named = service_variables(serve.settings_with("models:read,models:content"))
        own = {name.removeprefix("TUNESHIP_").lower(): text for name, text in named.items()}
        done = command(*wanted, **own)
        assert done.returncode == 0, done.stderr
        assert {file.name for file in out.iterdir()} == {
            "README.md",
            "model.gguf",
            "model_card.json",
        }
        card = (out / "README.md").read_text()
        assert "It was trained elsewhere and imported" in card
        assert 'license: "apache-2.0"' in card
        scratch = [path.name for path in (data / "scratch").iterdir()]
        assert [name for name in scratch if name.startswith((".exporting", ".importing"))] == []

        result = tmp_path / "result.json"
        released = json.loads((out / "model_card.json").read_text())
        gate = {"name": "T5 overfit", "state": "pass", "value": 1.01, "limit": 1.05}
        decided = {"run_key": "k", "outcome": "promoted", "reason": "none", "gates": [gate]}
        (tmp_path / "card.json").write_text(json.dumps(released | {"decisions": decided}))
        result.write_text(json.dumps({"model_card": "card.json"}))
        plain = str(tmp_path / "plain")
        done = command("export", model, plain, "--release", str(adapter / ADAPTER_CONFIG), **place)
        assert done.stderr.splitlines()[-1].endswith(
            "is no result file of a release with a model card"
        )
        done = command("export", model, plain, "--release", str(result), **place)
        assert done.returncode == 0, done.stderr
        assert (
            "| T5 overfit | pass | 1.01 | 1.05 |" in (tmp_path / "plain" / "README.md").read_text()
        )
        again = read_adapter(tmp_path / "plain")
        ours = read_adapter(adapter)
        assert all((again[name].b == ours[name].b).all() for name in ours)
        # What was exported is taken in again.
        done = command("import", str(tmp_path / "plain"), **place)
        assert done.returncode == 0, done.stderr
    finally:
        serve.stop()


@pytest.mark.soak
def test_a_failed_command_prints_one_line_and_leaves_nothing(tmp_path: Path, adapter: Path) -> None:
    data = tmp_path / "data"
    serve = Serve(data)
    try:
        place = {"data_dir": str(data)}
        done = command("import", str(adapter), "--base-model", "tuneship-tiny", "--json", **place)
        model = json.loads(done.stdout)["id"]
        foreign = trained_elsewhere(build_family(tmp_path / "b", "llama"), tmp_path / "foreign")
        (foreign / "chat_template.jinja").unlink()
        done = command("import", str(foreign), "--base-model", "tuneship-tiny", **place)
        assert done.returncode == 1
        assert "do not fit the base model" in done.stderr
        assert done.stderr.count("tuneship: ") == 1
        assert [one.id for one in serve.client().models.list(fine_tuned_only=True).models] == [
            model
        ]
    finally:
        serve.stop()

    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    full = tmp_path / "full"
    done = command("export", model, str(full), "--format", "merged", prelude=limit, **place)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tuneship: the model cannot be exported: ")
    assert "too large" in done.stderr
    done = command("export", model, str(full), "--format", "onnx", **place)
    assert done.returncode == 2
    assert not full.exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".exporting")] == []


@pytest.mark.soak
def test_an_export_that_is_killed_leaves_nothing_that_the_next_does_not_remove(
    tmp_path: Path, adapter: Path
) -> None:
    data, target = tmp_path / "data", tmp_path / "out"
    serve = Serve(data)
    place = ("--data-dir", str(data))
    try:
        done = command(
            "import", str(adapter), "--base-model", "tuneship-tiny", "--json", data_dir=str(data)
        )
        model = json.loads(done.stdout)["id"]
    finally:
        serve.stop()
    arguments = ("models", "export", model, str(target), *place)
    process = start("tuneship.cli.main", *arguments, stderr=subprocess.PIPE)
    until(lambda: list(tmp_path.glob(".exporting-*/log")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    done = command(*arguments[1:])
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob(".exporting-*")) == []
    assert (target / "README.md").is_file()


@pytest.mark.soak
def test_an_adapter_with_another_template_is_served_once_an_operator_has_added_it(
    tmp_path: Path, adapter: Path
) -> None:
    own = Path(shutil.copytree(adapter, tmp_path / "own"))
    template = (own / "chat_template.jinja").read_text().replace("<|system|>", "<|system|>Brief. ")
    (own / "chat_template.jinja").write_text(template + "{# another #}")
    config = json.loads((own / ADAPTER_CONFIG).read_text())
    (own / ADAPTER_CONFIG).write_text(
        json.dumps({**config, "base_model_name_or_path": "tiny-brief"})
    )
    serve = Serve(tmp_path / "data")
    try:
        place = {"data_dir": str(tmp_path / "data")}
        done = command("import", str(own), "--base-model", "tuneship-tiny", **place)
        assert done.returncode == 1
        assert "has a chat template of its own" in done.stderr
        # As docs/models.md says it.
        base = Path(shutil.copytree(TINY, tmp_path / "tiny-brief"))
        shutil.copyfile(own / "chat_template.jinja", base / "chat_template.jinja")
        done = command("add", str(base), "--id", "tiny-brief", **place)
        assert done.returncode == 0, done.stderr
        done = command("import", str(own), "--base-model", "tiny-brief", "--json", **place)
        assert done.returncode == 0, done.stderr
        client = serve.client()
        deployment = running_deployment(client, "d", json.loads(done.stdout)["id"])
        assert client.deployments.generate(deployment, PROMPT).deployment_id == deployment
    finally:
        serve.stop()
