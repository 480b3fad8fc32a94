"""The catalogue file adds base models and names the engine that serves each."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tuneship.service.catalogues.base_models import SHIPPED, Catalogue, CatalogueFault

TINY = SHIPPED / "tuneship-tiny"


def catalogue(folder: Path, **entry: object) -> Catalogue:
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [{"id": "own", "path": str(TINY), **entry}]}))
    return Catalogue(file)


def test_a_base_is_served_by_our_own_engine_unless_it_names_another(tmp_path: Path) -> None:
    own = catalogue(tmp_path).get("own")
    assert own is not None
    assert (own.runtime, own.runtime_options) == ("replica", ())
    other = catalogue(tmp_path, runtime="vllm", runtime_options=["--max-model-len", 4096]).get(
        "own"
    )
    assert other is not None
    assert (other.runtime, other.runtime_options) == ("vllm", ("--max-model-len", "4096"))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"runtime": "other"}, "must be one of: replica, vllm"),
        ({"runtime": "vllm", "runtime_options": "--port 1"}, "must be a list"),
        ({"runtime_options": ["--max-model-len"]}, "for vllm only"),
        ({"weights": "int3"}, "must be one of: float32, bfloat16, int8, int4, auto"),
        ({"weights": ["int4"]}, "must be one of: float32, bfloat16, int8, int4, auto"),
        ({"runtime": "vllm", "weights": "int4"}, "by runtime_options of vllm"),
        *(
            ({"runtime": "vllm", "runtime_options": options}, "one of: 1, 8, 16, 32, 64, 128, 256")
            for options in (
                ["--max-lora-rank", 100],
                ["--max-lora-rank=x"],
                ["--max_lora_rank"],
                ["--max-lora-rank", 64, "--max-lora-rank", 1024],
            )
        ),
    ],
)
def test_an_engine_that_nobody_has_is_refused(
    tmp_path: Path, entry: dict[str, object], why: str
) -> None:
    with pytest.raises(CatalogueFault, match=why):
        catalogue(tmp_path, **entry)


@given(st.text(min_size=1))
def test_no_token_stands_for_more_characters_than_the_bound(text: str) -> None:
    base = Catalogue().default
    tokenizer: Any = base.tokenizer
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert base.longest_token is not None
    assert len(text) <= tokens * base.longest_token
    assert not base.is_surely_longer(len(text), tokens)
    assert base.is_surely_longer(len(text) * 1000, len(text) * 1000 // base.longest_token - 1)


def test_a_base_is_served_in_the_format_that_its_entry_names(tmp_path: Path) -> None:
    own = catalogue(tmp_path, weights="int4").get("own")
    assert own is not None
    assert own.weights == "int4"
    known = catalogue(tmp_path, weights="int4")
    assert known.weights_of(own.path) == "int4"
    assert known.weights_of(tmp_path / "another") is None


def test_one_folder_is_served_in_one_format(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    entries = [{"id": name, "path": str(TINY), "weights": name} for name in ("int8", "int4")]
    file.write_text(yaml.safe_dump({"models": entries}))
    with pytest.raises(CatalogueFault, match="the weights of int8 and int4 must be the same"):
        Catalogue(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
    ],
    ids=["changes text", "drops white space", "not of bytes"],
)
def test_no_bound_is_known_for_a_tokenizer_that_may_remove_text(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    for file in TINY.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    rules = json.loads((TINY / "tokenizer.json").read_text()) | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    own = catalogue(tmp_path, path=str(tmp_path)).get("own")
    assert own is not None
    assert own.longest_token is None
    assert not own.is_surely_longer(1_000_000, 1)
