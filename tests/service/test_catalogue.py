"""The catalogue file: further base models, and whose engine serves them."""

from pathlib import Path

import pytest
import yaml

from tuneship.service.catalogue import SHIPPED, Catalogue, CatalogueFault

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
    ],
)
def test_an_engine_that_nobody_has_is_refused(
    tmp_path: Path, entry: dict[str, object], why: str
) -> None:
    with pytest.raises(CatalogueFault, match=why):
        catalogue(tmp_path, **entry)
