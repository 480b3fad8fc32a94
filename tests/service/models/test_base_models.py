"""A damaged base model of a catalogue file is not offered and says why, and the others go on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.service.in_process import CATALOGUE, Service

Start = Callable[..., Service]
SHIPPED = CATALOGUE.default.path
JOBS = "/v1/fine-tuning/jobs"


def cut(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def with_base(start: Start, tmp_path: Path, damage: Callable[[Path], object]) -> Service:
    damage(shutil.copytree(SHIPPED, tmp_path / "own"))
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text("models: [{id: own, path: own}]")
    return start(model_catalogue=catalogue)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "its model.safetensors is cut or damaged"),
        (write("model.safetensors", "nothing"), "its model.safetensors cannot be read"),
        (remove("model.safetensors"), "it has no safetensors file"),
        (write("config.json", "{"), "its config.json cannot be read"),
        (write("config.json", "[]"), "its config.json is not an object"),
        (write("config.json", '{"max_position_embeddings": "many"}'), "that is no number"),
        (write("chat_template.jinja", "{% for"), "its chat template cannot be read"),
        (remove("tokenizer.json"), "it has no tokenizer.json"),
        (write("config.json", '{"model_type": "bloom"}'), "bloom models cannot be served"),
    ],
    ids=(
        *("cut", "no head", "no weights", "no JSON", "no object", "length", "template"),
        *("tokenizer", "engine"),
    ),
)
def test_an_unusable_base_model_is_not_offered_and_the_others_are(
    start: Start, tmp_path: Path, damage: Callable[[Path], object], why: str
) -> None:
    service = with_base(start, tmp_path, damage)
    listed = service.call("GET", "/v1/models").json()["models"]
    assert [one["id"] for one in listed] == ["tuneship-tiny"]
    body = {"base_model": "own", "dataset_id": service.dataset(), "model_name": "m"}
    requests = (
        ("POST", JOBS, {"json": body}),
        ("POST", "/v1/deployments", {"json": {"model_name": "own", "deployment_name": "d"}}),
        ("GET", "/v1/models/own", {}),
        ("GET", "/v1/models/own/limits", {}),
    )
    for method, path, content in requests:
        answer = service.call(method, path, **content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert why in answer.json()["error"]["message"]
        assert str(tmp_path) not in answer.text
    assert service.call("GET", JOBS).json()["pagination"]["total"] == 0
    assert service.model().startswith("ft:tuneship-tiny:")


def test_a_base_model_that_was_damaged_later_fails_its_deployment_by_name(
    start: Start, tmp_path: Path
) -> None:
    service = with_base(start, tmp_path, write("tokenizer.json", json.dumps({"model": 1})))
    body = {"model_name": "own", "deployment_name": "d"}
    deployment = service.call("POST", "/v1/deployments", json=body).json()["id"]
    service.until(lambda: service.deployment_status(deployment) == "failed")
    error = service.call("GET", f"/v1/deployments/{deployment}").json()["error"]
    assert error["code"] == "deployment_error"
    assert "its tokenizer.json cannot be read" in error["message"]


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (("model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head"), {"q_proj"}),
        (("transformer.h.3.mlp.dense_4h_to_h", "transformer.wte"), {"dense_4h_to_h"}),
        (("layers.11.mixer.in_proj",), {"in_proj"}),
        (("transformer.blocks.0.attn.Wqkv",), {"Wqkv"}),
    ],
)
def test_modules_are_read_from_the_names_of_the_tensors(
    tmp_path: Path, names: tuple[str, ...], modules: set[str]
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from tuneship.service.catalogues.base_models import CataloguedModel

    tensors = {f"{name}.weight": np.zeros((2, 2), np.float32) for name in names}
    tensors["model.layers.0.norm.weight"] = np.zeros(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert CataloguedModel("a", tmp_path, "a", "", "").linear_modules == modules
