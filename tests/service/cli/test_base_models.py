"""`tuneship models add | bases | show | check | remove`: what goes wrong leaves nothing and says why in one line."""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from tests.support.models.families import build_family
from tests.support.models.gguf_files import write_gguf
from tests.support.repeats import variants
from tests.support.service.processes import ROOT, Serve
from tests.support.waiting import until
from tuneship.cli.main import app
from tuneship.conversion import running
from tuneship.conversion.order import ReadingReport
from tuneship.processes.forked_workers import ForkedProcesses
from tuneship.service.catalogues.adding import refuse_unusable, staged, sweep
from tuneship.service.catalogues.base_models import SHIPPED, AddedModels
from tuneship.service.catalogues.sources import AddingRefused

TINY = SHIPPED / "tuneship-tiny"
Change = Callable[[Path], object]

LOG_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d+ \| ")


@pytest.fixture(scope="module", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork the processes that read models, which need torch and transformers. Those of real commands load them."""
    log = tmp_path_factory.mktemp("forks") / "fork-server.log"
    libraries = {"tuneship.conversion": ("torch", "tuneship.conversion.__main__")}
    with (
        closing(ForkedProcesses(isolated=False, log=log, libraries=libraries)) as runtime,
        patch.object(running, "LocalProcesses", lambda **_: runtime),
    ):
        yield


def models(data: Path, *arguments: str, **variables: str) -> Result:
    """Run `tuneship models` on a data directory."""
    command = ["models", *arguments, "--data-dir", str(data)]
    return CliRunner().invoke(app, command, env={f"TUNESHIP_{n}": v for n, v in variables.items()})


def answer(data: Path, *arguments: str) -> dict[str, Any]:
    done = models(data, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refusal(data: Path, *arguments: str, **variables: str) -> str:
    """The one line of a refusal, which leaves nothing behind."""
    done = models(data, *arguments, **variables)
    assert done.exit_code == 1, done.output
    # Threads of other tests in this process may log meanwhile.
    *progress, line = (text for text in done.stderr.splitlines() if not LOG_LINE.match(text))
    assert [text for text in progress if not text.endswith(" ...")] == []
    assert line.startswith("tuneship: ")
    assert left_over(data) == []
    return line.removeprefix("tuneship: ")


def left_over(data: Path) -> list[str]:
    """Names in the folder of added models that are no models."""
    folder = data / "base_models"
    return (
        [file.name for file in folder.iterdir() if file.name.startswith(".")]
        if folder.exists()
        else []
    )


def checkpoint(folder: Path, change: Change = lambda _: None) -> Path:
    change(shutil.copytree(TINY, folder))
    return folder


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def indexed(file: str) -> Change:
    """Put the weights into the second of two shards, whose index names another file for a tensor."""

    def change(folder: Path) -> None:
        second = "model-00002-of-00002.safetensors"
        (folder / "model.safetensors").rename(folder / second)
        index = {"metadata": {}, "weight_map": {"a": file, "model.norm.weight": second}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (pickled, "holds its weights as pickles only"),
        (cut, "its model.safetensors is cut or damaged"),
        (remove("model.safetensors"), "it has no safetensors file"),
        (remove("tokenizer.json"), "it has no tokenizer.json"),
        (remove("config.json"), "its config.json cannot be read"),
        (write("chat_template.jinja", "{% for"), "its chat template cannot be read"),
        (write("tokenizer_config.json", "[]"), "its chat template cannot be read"),
        (write("config.json", '{"model_type": "bloom"}'), "bloom models cannot be served"),
        (
            write("adapter_config.json", "{}"),
            "it holds an adapter beside its weights: merge it, or",
        ),
        (
            indexed("../../etc/passwd.safetensors"),
            "its model.safetensors.index.json names files that are no",
        ),
        (
            indexed("model-00001-of-00002.safetensors"),
            "its model-00001-of-00002.safetensors is missing",
        ),
        (
            indexed("model-00002-of-00002.safetensors"),
            "its index names the tensor a, which no file has",
        ),
    ],
    ids=(
        *("pickles", "cut", "no weights", "no tokenizer", "no config", "template", "no object"),
        *("engine", "adapter", "index of elsewhere", "index of nothing", "index of too much"),
    ),
)
def test_a_directory_that_cannot_be_served_is_refused_before_anything_is_copied(
    tmp_path: Path, change: Change, why: str
) -> None:
    source = checkpoint(tmp_path / "own", change)
    assert why in refusal(tmp_path / "data", "add", str(source))


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert refusal(data, "add", "/no/where") == "/no/where: no such file or directory"
    assert refusal(data, "add", "a.gguf") == "a.gguf: no such file or directory"
    why = "the model some/model is neither a directory nor in the local cache"
    assert refusal(data, "add", "some/model") == f"{why}: `hf download some/model` downloads it"
    (tmp_path / "text.gguf").write_text("no model")
    why = "text.gguf cannot be added: it is not a GGUF file"
    assert refusal(data, "add", str(tmp_path / "text.gguf")) == why


@pytest.mark.parametrize("identifier", ["", "a b", "../a", "a/b", "ft:a", ".a", "a" * 65, "é"])
def test_an_id_that_fits_no_url_is_refused(tmp_path: Path, identifier: str) -> None:
    assert "choose it with --id" in refusal(tmp_path, "add", str(TINY), "--id", identifier)


def test_an_id_that_is_taken_is_refused(tmp_path: Path) -> None:
    why = "there is a base model tuneship-tiny already: choose another id with --id"
    assert refusal(tmp_path, "add", str(TINY)) == why


def test_a_disk_without_room_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    room = {"MINIMUM_FREE_DISK_BYTES": str(1 << 60)}
    why = refusal(tmp_path, "add", str(TINY), "--id", "own", **room)
    assert "the disk has no room for it: 0.0 GiB are needed" in why


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_nobody_adds_files_that_the_services_user_cannot_read(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    assert "belongs to another user" in refusal(tmp_path, "add", str(TINY), "--id", "own")


def test_a_model_that_was_not_added_cannot_be_removed(tmp_path: Path) -> None:
    assert "was not added" in refusal(tmp_path, "remove", "tuneship-tiny")
    for command in ("remove", "show", "check"):
        assert "there is no base model with this id" in refusal(tmp_path, command, "own")


def test_a_killed_command_leaves_nothing_for_long(tmp_path: Path) -> None:
    (tmp_path / ".adding-killed" / "model").mkdir(parents=True)
    (tmp_path / ".adding-killed" / "lock").touch()
    (tmp_path / ".removing-begun").mkdir()
    (tmp_path / "own").mkdir()
    with staged(tmp_path, ".adding-") as stage:
        assert {path.name for path in tmp_path.iterdir()} == {stage.name, "own"}
        sweep(tmp_path)  # as the service does when it starts
        assert stage.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"own"}


@pytest.mark.parametrize("difference", [0.02, math.nan, math.inf])
def test_a_model_that_our_engine_reads_otherwise_is_refused(difference: float) -> None:
    refuse_unusable("own", ReadingReport(loss_before=3.0, loss_after=3.001, difference=0.002))
    with pytest.raises(AddingRefused, match="and single tokens"):
        refuse_unusable(
            "own", ReadingReport(loss_before=3.0, loss_after=3.5, difference=difference)
        )


@pytest.mark.slow
@pytest.mark.long
def test_a_base_is_added_in_the_number_format_in_which_it_is_served(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = answer(data, "add", str(TINY), "--id", "small", "--weights", "int4")
    assert done["weights"] == "int4"
    assert 0 < abs(done["served_loss"] - done["loss_after"]) < 0.5
    assert answer(data, "show", "small")["weights"] == "int4"
    checked = answer(data, "check", "small")
    assert checked["served_format"] == "int4"
    assert abs(checked["served_loss"] - done["served_loss"]) < 1e-3


@pytest.mark.slow
@pytest.mark.soak
def test_the_number_format_that_is_measured_to_be_fastest_is_a_good_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    measured = answer(data, "add", str(TINY), "--id", "measured", "--weights", "auto")
    assert measured["weights"] in ("float32", "bfloat16", "int8", "int4")
    assert measured["served_loss"] <= 1.01 * measured["loss_after"]


def test_a_number_format_that_nobody_has_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    why = refusal(tmp_path / "data", "add", str(TINY), "--id", "own", "--weights", "int3")
    assert why == "--weights must be one of: float32, bfloat16, int8, int4, auto"


@pytest.mark.slow
def test_a_directory_is_added_shown_checked_and_removed(tmp_path: Path) -> None:
    data, source = tmp_path / "data", checkpoint(tmp_path / "my model")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (source / "code.py").write_text("raise SystemExit")
    done = answer(data, "add", str(source))
    assert done["id"] == "my-model"
    assert abs(done["loss_before"] - done["loss_after"]) < 1e-4
    assert not (data / "base_models" / "my-model" / "code.py").exists()

    listed = {one["id"]: one for one in answer(data, "bases")["base_models"]}
    assert set(listed) == {"my-model", "tuneship-tiny"}
    own = listed["my-model"]
    assert (own["parameters"], own["context_length"], own["licence"]) == (1_180_800, 512, "mit")
    assert (own["origin"]["kind"], own["origin"]["source"]) == ("directory", "my model")
    assert own["in_use_by"] == {"jobs": [], "deployments": [], "models": []}
    names, row, _ = (line.split("\t") for line in models(data, "bases").stdout.splitlines())
    assert dict(zip(names, row, strict=True)) == {
        "id": "my-model",
        "fault": "",
        "parameters": "1180800",
        "context": "512",
        "weights": "",
        "kind": "directory",
        "in_use_by": "nobody",
        "licence": "mit",
        "source": "my model",
    }

    shown = answer(data, "show", "my-model")
    assert shown["sha256"] == shown["source_sha256"]
    checked = answer(data, "check", "my-model")
    assert checked["faults"] == []
    assert isinstance(checked["answer"], str)

    weights = data / "base_models" / "my-model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = bytes(4)
    weights.write_bytes(content)
    wrong = models(data, "check", "my-model")
    assert wrong.exit_code == 4
    assert "my-model: its model.safetensors is not the file that was added" in wrong.output

    assert answer(data, "remove", "my-model") == {"id": "my-model", "removed": True}
    assert list((data / "base_models").iterdir()) == []


@pytest.mark.slow
def test_files_can_be_shared_instead_of_copied(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "own")
    answer(tmp_path / "data", "add", str(source), "--hard-links")
    added = tmp_path / "data" / "base_models" / "own" / "model.safetensors"
    assert added.samefile(source / "model.safetensors")


@pytest.mark.slow
def test_a_model_of_the_hubs_local_cache_is_added_by_its_id(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--some--tiny"
    for folder in ("refs", "blobs", "snapshots/1234"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs" / "main").write_text("1234")
    for number, file in enumerate(TINY.iterdir()):
        shutil.copyfile(file, cached / "blobs" / str(number))
        (cached / "snapshots" / "1234" / file.name).symlink_to(f"../../blobs/{number}")
    command = [sys.executable, "-m", "tuneship.cli.main", "models", "add", "some/tiny", "--json"]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path / "data")],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")},
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout)["id"] == "tiny"
    weights = tmp_path / "data" / "base_models" / "tiny" / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (TINY / "model.safetensors").read_bytes()
    origin = answer(tmp_path / "data", "show", "tiny")["origin"]
    assert (origin["kind"], origin["source"]) == ("hub", "some/tiny")


@pytest.mark.slow
@pytest.mark.parametrize("family", variants(["llama", "qwen2", "qwen3"]))
def test_a_gguf_file_becomes_the_checkpoint_that_it_was_made_of(
    tmp_path: Path, family: str
) -> None:
    made = build_family(tmp_path / "made", family)
    file = write_gguf(made, tmp_path / "tiny.gguf")
    done = answer(tmp_path / "data", "add", str(file))
    assert done["id"] == "tiny"
    assert abs(done["loss_before"] - done["loss_after"]) < 1e-3
    added = tmp_path / "data" / "base_models" / "tiny"
    before, after = (load_file(folder / "model.safetensors") for folder in (made, added))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    template = (added / "chat_template.jinja").read_text()
    assert template.strip() == (made / "chat_template.jinja").read_text().strip()
    assert answer(tmp_path / "data", "show", "tiny")["licence"] == "apache-2.0"


@pytest.mark.slow
@pytest.mark.soak
def test_the_rotation_of_llama_3_is_found_again(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made = build_family(tmp_path / "made", "llama", rope_parameters=rope, head_dim=64)
    answer(tmp_path / "data", "add", str(write_gguf(made, tmp_path / "tiny.gguf")))
    config = json.loads((tmp_path / "data" / "base_models" / "tiny" / "config.json").read_text())
    assert config["rope_parameters"] == pytest.approx(rope)

    rope["original_max_position_embeddings"] = 4096
    made = build_family(tmp_path / "other", "llama", rope_parameters=rope, head_dim=64)
    file = write_gguf(made, tmp_path / "other.gguf")
    assert "differently from Llama's" in refusal(tmp_path / "data", "add", str(file))


@pytest.mark.slow
@pytest.mark.parametrize("number_format", variants(["Q4_1", "BF16", "F16", "Q8_0"]))
def test_a_gguf_file_of_fewer_bits_is_kept_in_sixteen(tmp_path: Path, number_format: str) -> None:
    file = write_gguf(
        build_family(tmp_path / "made", "llama"), tmp_path / "tiny.gguf", number_format
    )
    answer(tmp_path / "data", "add", str(file))
    config = json.loads((tmp_path / "data" / "base_models" / "tiny" / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if number_format == "BF16" else "float16")
    assert "quantization_config" not in config


@pytest.mark.slow
@pytest.mark.soak
def test_weights_that_are_not_finite_or_missing_are_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    def spoilt(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
        source = checkpoint(tmp_path / name)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        return refusal(tmp_path / "data", "add", str(source))

    name = "model.layers.0.self_attn.q_proj.weight"
    assert "not finite" in spoilt("infinite", lambda tensors: tensors[name][0].fill_(torch.inf))
    assert f"{name} first" in spoilt("missing", lambda tensors: tensors.pop(name))


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_a_folder_that_the_next_command_removes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "tuneship.cli.main", "models", "add", str(TINY), "--id", "own"]
    process = subprocess.Popen([*command, "--data-dir", str(data)], cwd=ROOT)
    (stage,) = until(lambda: list(data.glob("base_models/.adding-*/log")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [one["id"] for one in answer(data, "bases")["base_models"]] == ["tuneship-tiny"]
    assert answer(data, "add", str(TINY), "--id", "own")["id"] == "own"
    assert not stage.exists()
    assert left_over(data) == []


def test_a_removal_that_is_killed_before_it_is_sure_is_undone(tmp_path: Path) -> None:
    folder = tmp_path / "base_models"
    (folder / ".removing-x" / "model").mkdir(parents=True)
    (folder / ".removing-x" / "model" / "config.json").write_text("{}")
    (folder / ".removing-x" / "name").write_text("own")
    sweep(folder)
    assert [str(one.relative_to(folder)) for one in folder.rglob("*")] == ["own", "own/config.json"]


def test_a_model_that_goes_while_the_folder_is_read_takes_no_other_with_it(tmp_path: Path) -> None:
    for name in ("kept", "gone"):
        (tmp_path / name).mkdir()

    scanned = os.scandir

    def scandir(folder: Any) -> Any:
        entries = list(scanned(folder))
        (tmp_path / "gone").rmdir()
        return nullcontext(iter(entries))

    with patch("os.scandir", scandir):
        assert list(AddedModels(tmp_path).present()) == ["kept"]


@pytest.mark.slow
def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tuneship.cli.main", "models", "add", str(TINY), "--id", "own"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    until(lambda: list(tmp_path.glob("base_models/.adding-*/log")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "tuneship: interrupted: nothing was added"
    assert list((tmp_path / "base_models").iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_fills_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    made = build_family(tmp_path / "made", "llama", hidden_size=512, intermediate_size=2048)
    file = write_gguf(made, tmp_path / "tiny.gguf")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
    run = "sys.argv[0] = 'tuneship'; from tuneship.cli.main import main; main()"
    for source in (file, made):
        data = tmp_path / f"data-{source.name}"
        command = [sys.executable, "-c", f"{limit} {run}", "models", "add", str(source)]
        done = subprocess.run(
            [*command, "--data-dir", str(data)],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr.splitlines()[-1].endswith(os.strerror(errno.EFBIG))
        assert "Traceback" not in done.stderr
        assert list((data / "base_models").iterdir()) == []


@pytest.mark.slow
def test_a_running_service_offers_trains_and_serves_a_model_that_is_added_meanwhile(
    tmp_path: Path,
) -> None:
    from tests.support.service.processes import ended_job, rows_file
    from tuneship.contract.datasets import DatasetUpload
    from tuneship.contract.deployments import DeploymentCreate
    from tuneship.contract.jobs import Hyperparameters, JobCreate

    data = tmp_path / "data"
    serve = Serve(data, preload_training="true")
    try:
        client = serve.client()
        until(lambda: serve.workers("tuneship.processes.fork_server"))
        assert answer(data, "add", str(checkpoint(tmp_path / "own")))["id"] == "own"
        assert {model.id for model in client.models.list().models} == {"own", "tuneship-tiny"}
        with rows_file(tmp_path / "rows.jsonl", 64).open("rb") as rows:
            dataset = client.datasets.upload(DatasetUpload(name="d", format="instruction"), rows)
        job = client.jobs.create(
            JobCreate(
                base_model="own",
                dataset_id=dataset.id,
                model_name="m",
                hyperparameters=Hyperparameters(epochs=1, batch_size=8, learning_rate=1e-3),
            )
        )
        assert job.id in refusal(data, "remove", "own")
        done = ended_job(client, job.id)
        assert done.status == "completed", done
        assert done.fine_tuned_model is not None
        assert done.fine_tuned_model in refusal(data, "remove", "own")
        deployment = client.deployments.create(
            DeploymentCreate(model_name=done.fine_tuned_model, deployment_name="tuned")
        )
        until(lambda: client.deployments.get(deployment.id).status == "running")
        assert deployment.id in refusal(data, "remove", "own")
        (own,) = (one for one in answer(data, "bases")["base_models"] if one["id"] == "own")
        assert own["in_use_by"]["deployments"] == [deployment.id]
        assert own["in_use_by"]["models"] == [done.fine_tuned_model]

        client.deployments.delete(deployment.id)
        until(lambda: client.deployments.get(deployment.id).status == "deleted")
        client.models.delete(done.fine_tuned_model)
        assert answer(data, "remove", "own")["removed"]
        assert [model.id for model in client.models.list().models] == ["tuneship-tiny"]
    finally:
        serve.stop()
