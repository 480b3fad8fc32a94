"""Tests of what is read from a peft directory, and of what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tuneship.contract.declaring.limits import MAX_LORA_RANK
from tuneship.serving.adapters import AdapterRefused, Matrices, read_adapter
from tuneship.serving.lora import Lora, Site

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write(tmp_path, {"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    return tmp_path


def write_config(directory: Path, config: dict[str, object]) -> None:
    config = {"target_modules": ["q_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def write(directory: Path, config: dict[str, object], suffix: str = "weight") -> None:
    write_config(directory, config)
    name = f"base_model.model.{MODULE}"
    tensors = {
        f"{name}.lora_A.{suffix}": torch.ones(2, 3),
        f"{name}.lora_B.{suffix}": torch.ones(5, 2),
    }
    save_file(tensors, directory / "adapter_model.safetensors")


def test_the_scale_is_folded_into_b(adapter: Path) -> None:
    matrices = read_adapter(adapter)[MODULE]
    assert matrices.a.shape == (2, 3)
    assert torch.equal(matrices.b, torch.full((2, 5), 2.0))


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"lora_alpha": 6}, 3),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / 2**0.5),
        ({"lora_alpha": 6, "alpha_pattern": {MODULE: 10}}, 5),
        ({"lora_alpha": 6, "target_modules": [MODULE, "o_proj"]}, 3),
        ({"lora_alpha": 6, "target_modules": "all-linear"}, 3),
    ],
)
def test_the_scale_follows_the_rules_of_peft(
    adapter: Path, options: dict[str, object], scale: float
) -> None:
    write(adapter, {"peft_type": "LORA", "r": 2, **options})
    assert float(read_adapter(adapter)[MODULE].b[0, 0]) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "LoRA option bias"),
        ({"peft_type": "IA3"}, "its peft_type is IA3"),
        ({"task_type": "SEQ_CLS"}, "its task_type is SEQ_CLS"),
        ({"of_a_newer_peft": 0.5}, "LoRA option of_a_newer_peft"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is loftq"),
        ({"init_lora_weights": "of_a_newer_peft"}, "init_lora_weights is of_a_newer_peft"),
        ({"target_modules": ["k_proj"]}, "adapter_config.json leaves out"),
        # Imports replace what chooses modules by their names.
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, "option exclude_modules"),
        ({"layers_to_transform": [1]}, "option layers_to_transform"),
        ({"layers_pattern": "layers"}, "option layers_pattern"),
        ({"target_modules": ".*"}, "has a regular expression as its target_modules"),
        ({"alpha_pattern": {"q_proj": 10}}, "alpha_pattern in adapter_config.json names another"),
        ({"alpha_pattern": {r".{8}([\w.]+)+!": 1}}, "alpha_pattern in adapter_config.json names"),
        ({"target_modules": None}, "has no target_modules"),
        ({"r": 8}, "are of rank 2, and adapter_config.json says 8"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern in adapter_config.json names another"),
        ({"alpha_pattern": 3}, "is not understood"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(
    adapter: Path, options: dict[str, object], message: str
) -> None:
    write(adapter, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **options})
    with pytest.raises(AdapterRefused, match=message):
        read_adapter(adapter)


def test_a_tensor_of_another_kind_is_refused(adapter: Path) -> None:
    write(adapter, {"peft_type": "LORA", "r": 2}, suffix="bias")
    with pytest.raises(AdapterRefused, match="not a LoRA matrix"):
        read_adapter(adapter)


def test_a_rank_beyond_that_of_jobs_is_refused(adapter: Path) -> None:
    name, rank = f"base_model.model.{MODULE}", MAX_LORA_RANK + 1
    tensors = {
        f"{name}.lora_A.weight": torch.ones(rank, 3),
        f"{name}.lora_B.weight": torch.ones(5, rank),
    }
    save_file(tensors, adapter / "adapter_model.safetensors")
    write_config(adapter, {"peft_type": "LORA", "r": rank, "lora_alpha": 4})
    with pytest.raises(
        AdapterRefused, match=f"are of rank {rank}, and {MAX_LORA_RANK} is the most"
    ):
        read_adapter(adapter)


def test_a_file_that_is_too_large_for_the_free_memory_is_not_read(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneship.serving.adapters.free_memory", lambda: 100)
    with pytest.raises(AdapterRefused, match="the free memory is not enough for the adapter"):
        read_adapter(adapter)


def test_values_that_are_not_finite_are_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(AdapterRefused, match="not finite"):
        read_adapter(adapter)


@pytest.mark.parametrize("damage", ["missing", "cut", "not json"])
def test_files_that_cannot_be_read_are_refused(adapter: Path, damage: str) -> None:
    if damage == "missing":
        shutil.rmtree(adapter)
    elif damage == "cut":
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    else:
        (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterRefused, match="cannot be read"):
        read_adapter(adapter)


def one_site() -> Lora:
    return Lora([Site(("linear",), 3, (5,), (None,))], torch.float32)


def matrices(rank: int, value: float) -> dict[str, Matrices]:
    return {"linear": Matrices(a=torch.full((rank, 3), 1.0), b=torch.full((rank, 5), value / rank))}


def deltas(lora: Lora, rows: list[str | None]) -> list[float]:
    """Return what each row gets for an input of ones, which is 3 x the value of its adapter."""
    out = torch.zeros(len(rows), 5)
    lora.add(0, torch.ones(len(rows), 3), out, lora.route(rows, ()))
    return out[:, 0].tolist()


def test_matrices_of_another_model_are_refused() -> None:
    lora = one_site()
    with pytest.raises(AdapterRefused, match="no linear layer elsewhere"):
        lora.load("a", {"elsewhere": Matrices(torch.ones(1, 3), torch.ones(1, 5))})
    with pytest.raises(AdapterRefused, match="do not fit"):
        lora.load("a", {"linear": Matrices(torch.ones(1, 4), torch.ones(1, 5))})
    assert "a" not in lora


def test_rows_get_their_own_delta_whatever_the_ranks_and_the_order_of_joining() -> None:
    lora = one_site()
    for rank in (1, 2, 7, 3):
        lora.load(f"rank {rank}", matrices(rank, value=rank))
        lora.acquire(f"rank {rank}")
    rows = ["rank 7", None, "rank 1", "rank 7", "rank 3", "rank 2"]
    assert deltas(lora, rows) == pytest.approx([21, 0, 3, 21, 9, 6])
    assert deltas(lora, ["rank 2"] * 4) == pytest.approx([6] * 4)
    assert deltas(lora, [None, None]) == [0, 0]


def test_a_prompt_gets_the_delta_of_its_adapter_on_every_token() -> None:
    lora = one_site()
    for rank in (1, 2):
        lora.load(str(rank), matrices(rank, value=rank))
        lora.acquire(str(rank))
    out = torch.zeros(6, 5)
    routes = lora.route(["1"], [("1", 1, 3), (None, 3, 4), ("2", 4, 6)])
    lora.add(0, torch.ones(6, 3), out, routes)
    assert out[:, 0].tolist() == pytest.approx([3, 3, 3, 0, 6, 6])


def test_slots_are_given_to_whoever_runs() -> None:
    lora = one_site()
    for n in range(40):
        lora.load(str(n), matrices(1, value=n))
    crowd = [str(n) for n in range(20)]
    for name in crowd:
        lora.acquire(name)
    assert deltas(lora, list(crowd)) == pytest.approx([3 * n for n in range(20)])
    for name in crowd[:-2]:
        lora.release(name)
    assert deltas(lora, ["18", "19", "18"]) == pytest.approx([54, 57, 54])
    for name in ("38", "39", "0"):
        lora.acquire(name)
    assert deltas(lora, ["39", "18", "0", "38", "19"]) == pytest.approx([117, 54, 0, 114, 57])


def test_an_adapter_that_runs_is_neither_replaced_nor_unloaded() -> None:
    lora = one_site()
    lora.load("a", matrices(1, value=1))
    lora.acquire("a")
    with pytest.raises(AdapterRefused):
        lora.load("a", matrices(1, value=2))
    with pytest.raises(AdapterRefused):
        lora.unload("a")
    lora.release("a")
    lora.load("a", matrices(1, value=2))
    lora.acquire("a")
    assert deltas(lora, ["a"]) == pytest.approx([6])
