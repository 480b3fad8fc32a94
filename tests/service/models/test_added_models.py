"""Base models that are added to the data directory are offered at once, and a removed one is forgotten."""

import json
import shutil
from pathlib import Path

from tuneship.service.catalogues.base_models import SHIPPED, Catalogue
from tuneship.service.catalogues.origins import Origin

TINY = SHIPPED / "tuneship-tiny"
ORIGIN = Origin(
    kind="gguf",
    source="tiny.gguf",
    source_sha256={"tiny.gguf": "0" * 64},
    sha256={},
    versions={"transformers": "5"},
    added_at="2026-11-23T12:00:00Z",
    licence="apache-2.0",
    loss_before=1.0,
    loss_after=1.0,
)


def place(folder: Path, name: str) -> Path:
    """Put a model there as `tuneship models add` does: made elsewhere, then renamed."""
    made = shutil.copytree(TINY, folder.parent / f"made-{name}")
    ORIGIN.write(made)
    folder.mkdir(exist_ok=True)
    return made.rename(folder / name)


def ids(catalogue: Catalogue) -> list[str]:
    return [model.id for model in catalogue]


def test_a_model_is_offered_from_the_moment_of_its_rename_until_it_is_removed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "base_models"
    catalogue = Catalogue(added=folder)
    assert ids(catalogue) == ["tuneship-tiny"]
    path = place(folder, "own")
    assert ids(catalogue) == ["own", "tuneship-tiny"]
    own = catalogue.get("own")
    assert own is not None
    assert (own.path, own.parameters) == (path, 1_180_800)
    assert own.description == "Added from tiny.gguf (gguf), licence apache-2.0"
    assert own.engine.is_own
    assert catalogue.get("own") is own  # with all that it has read
    assert catalogue.default.id == "tuneship-tiny"
    path.rename(folder / ".removing-1")
    assert catalogue.get("own") is None
    assert ids(catalogue) == ["tuneship-tiny"]


def test_a_model_that_replaced_another_of_its_name_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "base_models"
    catalogue = Catalogue(added=folder)
    place(folder, "own")
    first = catalogue.get("own")
    assert first is not None
    assert first.context_length == 512
    shutil.rmtree(folder / "own")
    made = shutil.copytree(TINY, tmp_path / "made")
    config = json.loads((made / "config.json").read_text()) | {"max_position_embeddings": 64}
    (made / "config.json").write_text(json.dumps(config))
    made.rename(folder / "own")
    second = catalogue.get("own")
    assert second is not None
    assert second.context_length == 64


def test_a_folder_that_is_being_added_or_is_no_model_is_not_offered(tmp_path: Path) -> None:
    folder = tmp_path / "base_models"
    place(folder, ".adding-1")
    place(folder, "own")
    (folder / "file").touch()
    (folder / "link").symlink_to(folder / "own")
    assert ids(Catalogue(added=folder)) == ["own", "tuneship-tiny"]


def test_neither_a_shipped_model_nor_one_of_the_operators_file_is_hidden(tmp_path: Path) -> None:
    folder, file = tmp_path / "base_models", tmp_path / "models.yaml"
    place(folder, "tuneship-tiny")
    place(folder, "own")
    file.write_text(json.dumps({"models": [{"id": "own", "path": str(TINY), "name": "theirs"}]}))
    catalogue = Catalogue(file, folder)
    own, shipped = catalogue.get("own"), catalogue.get("tuneship-tiny")
    assert own is not None
    assert shipped is not None
    assert (own.name, shipped.path) == ("theirs", TINY)
    assert [model.path for model in catalogue] == [own.path, TINY]


def test_a_damaged_origin_hides_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "base_models"
    (place(folder, "own") / "origin.json").write_text("{}")
    own = Catalogue(added=folder).get("own")
    assert own is not None
    assert own.fault is None
    assert own.description == "Added base model"
