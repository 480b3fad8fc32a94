"""A rank that the base model's engine cannot serve is refused before anything is tuned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.service.in_process import Service
from tuneship.replicas.engine_kinds import OWN_ENGINE, VLLM_ENGINE, option_of
from tuneship.service.catalogues.base_models import SHIPPED

Start = Callable[..., Service]
OPTION = "--max-lora-rank"


def catalogue_file(folder: Path, *options: object) -> Path:
    entry = {"id": "theirs", "path": str(SHIPPED / "tuneship-tiny"), "runtime": "vllm"}
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [{**entry, "runtime_options": [*options]}]}))
    return file


def asked(service: Service, rank: int, base: str = "theirs") -> Any:
    body: dict[str, Any] = {"base_model": base, "model_name": "m"}
    body["dataset_id"] = service.dataset()
    body["hyperparameters"] = {"lora_rank": rank}
    return service.call("POST", "/v1/fine-tuning/jobs", json=body)


@pytest.mark.parametrize(
    ("options", "largest"),
    [((), 64), ((OPTION, 128), 128), (("--max_lora_rank=8", "--port", 1), 8), ((OPTION, 512), 512)],
)
def test_a_job_whose_rank_vllm_would_not_serve_is_refused(
    start: Start, tmp_path: Path, options: tuple[object, ...], largest: int
) -> None:
    service = start(model_catalogue=catalogue_file(tmp_path, *options))
    assert asked(service, largest).status_code == 201
    if largest == 512:  # the most that the API allows
        return
    refused = asked(service, largest + 1)
    assert refused.status_code == 422, refused.text
    error = refused.json()["error"]
    assert error["param"] == "hyperparameters.lora_rank"
    assert error["details"][0]["code"] == "out_of_range"
    text = f"must be at most {largest}: vllm serves this base model with {OPTION} {largest}"
    assert text in error["message"]
    assert "128, 256, 320, 512" in error["message"] or largest > 64
    assert asked(service, 512, "tuneship-tiny").status_code == 201, "our own engine has no limit"


def test_an_option_is_read_as_a_command_line_is() -> None:
    assert option_of(["-a", "1", "--b=2", "-a", "3"], "-a") == "3"
    assert option_of(["--b", "1", "--b=2="], "--b", "-b") == "2="
    assert option_of(["--c"], "--c") == ""
    assert option_of(["--c"], "--d") is None


def test_only_what_is_known_against_an_adapter_hinders_it() -> None:
    assert (
        VLLM_ENGINE.fault_of_adapter({"r": 64, "use_rslora": True, "rank_pattern": {}}, ()) is None
    )
    assert VLLM_ENGINE.fault_of_adapter({}, ()) is None
    assert OWN_ENGINE.fault_of_adapter({"r": 1000, "alpha_pattern": {"a": 1}}, ()) is None
