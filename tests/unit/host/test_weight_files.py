"""Which files hold a checkpoint's weights is decided as transformers decides it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models.families import build_family
from tuneship.host.weight_files import INDEX, SINGLE, WeightsFault, weight_files
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.catalogues.sources import CheckpointSource
from tuneship.serving.replica import load_model
from tuneship.serving.weights_choice import losses_of_engine, token_losses

TOKENS = list(range(5, 25))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several shards."""
    folder = build_family(tmp_path_factory.mktemp("shards") / "base", "llama", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / SINGLE).unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def zeros(folder: Path, *names: str) -> None:
    """Write all tensors of the model into other files, as zeros."""
    files = folder.glob("model-*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name in names:
        save_file({key: torch.zeros_like(one) for key, one in found.items()}, folder / name)


def stray_files(folder: Path) -> None:
    zeros(folder, "consolidated.safetensors", "model-00009-of-00009.safetensors", "a.safetensors")
    lora = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 32)}
    save_file(lora, folder / "adapter_model.safetensors")


def one_file_beside_the_index(folder: Path) -> None:
    zeros(folder, SINGLE)


def tensors_in_two_shards(folder: Path) -> None:
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    again = {name: torch.zeros_like(one) for name, one in load_file(first).items()}
    save_file({**load_file(last), **again}, last)


def named_by_the_configuration(folder: Path) -> None:
    zeros(folder, "other.safetensors", SINGLE)
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "other.safetensors"
    (folder / "config.json").write_text(json.dumps(config))


def links(folder: Path) -> None:
    """As in the cache of the hub."""
    (folder / "blobs").mkdir()
    for number, file in enumerate([*folder.glob("*.safetensors"), folder / INDEX]):
        file.rename(folder / "blobs" / str(number))
        file.symlink_to(folder / "blobs" / str(number))


@pytest.mark.parametrize(
    "change",
    [
        stray_files,
        one_file_beside_the_index,
        tensors_in_two_shards,
        named_by_the_configuration,
        links,
    ],
)
def test_a_checkpoint_is_read_as_transformers_reads_it(
    shards: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = copied(shards, tmp_path)
    change(folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder)
    catalogued = CataloguedModel("a", folder, "a", "1", "")
    assert catalogued.fault is None
    weights = weight_files(folder)
    used = {*weights.files, *([weights.index] if weights.index else [])}
    copied_by_add = CheckpointSource("directory", "a", folder).files()
    assert {name for name in copied_by_add if "safetensors" in name} == {one.name for one in used}
    engine = load_model(folder)
    assert catalogued.parameters == engine.facts.parameters == reference.num_parameters()
    with torch.inference_mode():
        expected = token_losses(reference(input_ids=torch.tensor([TOKENS])).logits[0], TOKENS)
        torch.testing.assert_close(losses_of_engine(engine, TOKENS), expected)


def copied(shards: Path, folder: Path) -> Path:
    for file in shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def index_of(**shards: object) -> dict[str, str]:
    return {INDEX: json.dumps({"weight_map": shards})}


def named(name: object) -> dict[str, str]:
    return {"config.json": json.dumps({"transformers_weights": name})}


NOT_BESIDE = f"its {INDEX} names files that are no safetensors files beside it"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({}, "it has no safetensors file"),
        (
            {"a.safetensors": "", "b.safetensors": ""},
            f"it has several safetensors files (2), and neither {SINGLE} nor {INDEX}",
        ),
        (index_of(), f"its {INDEX} names no file"),
        (
            {"b.safetensors": "", **index_of(a="b.safetensors", c="a.safetensors")},
            "its a.safetensors is missing",
        ),
        (index_of(a="../b.safetensors"), NOT_BESIDE),
        (index_of(a="/b.safetensors"), NOT_BESIDE),
        (index_of(a="a/b.safetensors"), NOT_BESIDE),
        (index_of(a="model.bin"), NOT_BESIDE),
        (index_of(a=INDEX), NOT_BESIDE),
        (index_of(a=3), NOT_BESIDE),
        (index_of(a=["b"]), f"its {INDEX} cannot be read"),
        ({INDEX: "[]"}, f"its {INDEX} cannot be read"),
        (named("b.safetensors"), "its b.safetensors is missing"),
        (named("b.safetensors.index.json"), "its b.safetensors.index.json cannot be read"),
        (named("../b.safetensors"), "its config.json names no file beside it"),
        (named(3), "its config.json names no file beside it"),
    ],
)
def test_weights_that_are_not_all_there_are_refused_by_name(
    tmp_path: Path, written: dict[str, str], why: str
) -> None:
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(WeightsFault) as fault:
        weight_files(tmp_path)
    assert str(fault.value).startswith(why)
