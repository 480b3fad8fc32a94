"""GPUs are spread over the processes that use them, and those that share one know it."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tuneship.host import gpus, machine
from tuneship.host.gpus import GpuLeases, visible_gpus

VARIABLE = "CUDA_VISIBLE_DEVICES"


def test_processes_get_different_gpus_as_long_as_there_are_some() -> None:
    leases = GpuLeases(lambda: ("0", "1", "2"))
    with ExitStack() as held:
        first = held.enter_context(leases.lease(1))
        with leases.lease(1) as second:
            third = held.enter_context(leases.lease(1))
            assert (first.gpus, second.gpus, third.gpus) == (("0",), ("1",), ("2",))
            assert not any(one.is_shared for one in (first, second, third))
            assert first.others == ("1", "2")
        fourth = held.enter_context(leases.lease(2))
        assert (fourth.gpus, fourth.is_shared) == (("1", "0"), True)
        assert held.enter_context(leases.lease(1)).gpus == ("1",), "used as often as 2, and before"
    with leases.lease(9) as all_of_them:
        assert (all_of_them.gpus, all_of_them.is_shared) == (("0", "1", "2"), False)


def test_gpus_that_a_process_takes_by_name_are_left_to_it() -> None:
    leases = GpuLeases(lambda: ("0", "1"))
    with leases.lease(1, ("0",)) as named, leases.lease(1) as other:
        assert (named.gpus, other.gpus) == (("0",), ("1",))


def test_nothing_is_shared_on_a_machine_without_gpus() -> None:
    leases = GpuLeases(tuple)
    with leases.lease(1), leases.lease(2) as second:
        assert (second.gpus, second.is_shared) == ((), False)


@pytest.mark.parametrize(
    ("count", "variable", "visible"),
    [
        (2, None, ("0", "1")),
        (0, None, ()),
        (4, "2, 3", ("2", "3")),
        (4, "", ()),
        (4, "1,-1,2", ("1",)),
        (2, "1,2,0", ("1",)),
        (1, "MIG-a,GPU-b", ("MIG-a", "GPU-b")),
        (0, "1", ("1",)),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_sees(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    variable: str | None,
    visible: tuple[str, ...],
) -> None:
    for number in range(count):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "dev")
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    assert visible_gpus() == visible


def test_a_container_has_only_the_gpus_whose_device_files_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gpus/a", "gpus/b", "gpus/c", "dev/nvidia2", "dev/nvidia0", "dev/nvidiactl"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "dev")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert visible_gpus() == ("0", "1")
