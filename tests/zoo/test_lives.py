"""A base model is added, tuned, asked, exported and imported, and answers everywhere as it was tuned to."""

from collections.abc import Iterator

import pytest

from tests.support.zoo.cells import FIRST, OTHERS, VARIANTS
from tests.support.zoo.checkpoints import Checkpoint
from tests.support.zoo.lives import World, faults_of, live

pytestmark = [
    pytest.mark.slow,
    # peft asks a model of transformers for a property by its old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World.begin(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.mark.parametrize(
    "checkpoint",
    [
        *(pytest.param(one, id=one.name, marks=pytest.mark.essential) for one in FIRST),
        *(pytest.param(one, id=one.name, marks=pytest.mark.soak) for one in (*OTHERS, *VARIANTS)),
    ],
)
def test_a_base_is_right_in_every_column_or_refused_by_name(
    world: World, checkpoint: Checkpoint
) -> None:
    assert faults_of(checkpoint, live(world, checkpoint)) == []
