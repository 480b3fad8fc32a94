"""A directory of a checkpoint exists completely or not at all."""

from pathlib import Path

import pytest
import torch

from tuneship.training.checkpoints import Checkpoints, make_directory


def saved(directory: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(directory, "this run")
    for step in steps:
        checkpoints.save(step, {"loss": 0.1 + 0.2}, {"weights": torch.full((3,), float(step))})
    return checkpoints


def test_the_latest_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    found = saved(tmp_path, 3, 12, 120).latest()
    assert found is not None
    assert (found.step, found.state) == (120, {"loss": 0.1 + 0.2})
    assert found.tensors["weights"].tolist() == [120.0] * 3
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000012",
        "step-000000120",
    ]


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flipped byte", "cut", "missing"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    path = tmp_path / "step-000000002" / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 255]) + content[-2:])
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1


def test_a_checkpoint_of_another_run_is_not_resumed(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert Checkpoints(tmp_path, "another run").latest() is None


def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    newer = Checkpoints(tmp_path, "this run, by another rule", earlier_fingerprint="this run")
    found = newer.latest()
    assert found is not None
    assert found.step == 5


def test_checkpoints_of_another_run_do_not_outlive_those_of_this_one(tmp_path: Path) -> None:
    saved(tmp_path, 5, 6)
    mine = Checkpoints(tmp_path, "another run")
    assert mine.latest() is None
    mine.save(1, {}, {"weights": torch.ones(1)})
    found = mine.latest()
    assert found is not None
    assert found.step == 1


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-000000009").mkdir()
    (tmp_path / ".tmp-step-000000009" / "state.json").write_text("{}")
    assert saved(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_filled_does_not_appear(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        make_directory(tmp_path / "adapter", fill)
    assert not (tmp_path / "adapter").exists()
