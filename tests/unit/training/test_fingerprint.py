"""A training is known by what decides its course, wherever the files of it lie."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster.training_nodes import spec_of
from tuneship.training.examples.data_files import Data
from tuneship.training.examples.tokenized_examples import TokenizedExamples

ROWS = TokenizedExamples(
    np.array([1, 2, 3], dtype=np.int32),
    np.array([False, True, True]),
    np.array([0, 3], dtype=np.int64),
)
DATA = Data(ROWS, ROWS.all_indices, ROWS, ROWS.all_indices)
SPEC = replace(spec_of(), base_digest="digest")


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"base_model": "/mnt/one"},
        {"training_file": Path("there/data.jsonl"), "output_dir": Path("there")},
        {"max_runtime_seconds": 30.0},
    ],
)
def test_another_machine_may_go_on(elsewhere: dict[str, object]) -> None:
    assert DATA.fingerprint(replace(SPEC, **elsewhere)) == DATA.fingerprint(SPEC)


@pytest.mark.parametrize(
    "change",
    [
        {"base_digest": "another"},
        {"base_digest": None},
        {"validation_frequency": 0.5},
        {"hyperparameters": replace(SPEC.hyperparameters, seed=2)},
    ],
)
def test_another_training_does_not_go_on(change: dict[str, object]) -> None:
    assert DATA.fingerprint(replace(SPEC, **change)) != DATA.fingerprint(SPEC)


def test_on_one_machine_the_base_model_is_known_by_the_name_of_its_folder() -> None:
    """An upgrade may move the shipped models."""
    here = replace(SPEC, base_digest=None, base_model="/opt/base")
    moved = replace(here, base_model=f"/mnt/{Path(here.base_model).name}")
    other = replace(here, base_model="/mnt/one")
    assert DATA.fingerprint(moved) == DATA.fingerprint(here) != DATA.fingerprint(other)
    of_26_12_0 = [DATA.fingerprint(one, of_26_12_0=True) for one in (here, moved)]
    assert len({*of_26_12_0, DATA.fingerprint(here)}) == 3
