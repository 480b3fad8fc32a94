"""Tests of what is said about the Python that runs a service."""

import pytest

from tuneship.host.interpreter import known_fault


@pytest.mark.parametrize("version", [(3, 11, 2), (3, 11, 9), (3, 12, 0), (3, 12, 5)])
def test_a_python_with_a_slow_tarfile_is_named(version: tuple[int, int, int]) -> None:
    fault = known_fault(version, is_corrected=False)
    assert fault is not None
    assert fault.startswith(f"Python {version[0]}.{version[1]}.{version[2]} has a fault")
    assert "\n" not in fault


@pytest.mark.parametrize("version", [(3, 11, 10), (3, 12, 6), (3, 13, 0), (3, 14, 1)])
def test_a_later_python_has_no_known_fault(version: tuple[int, int, int]) -> None:
    assert known_fault(version, is_corrected=False) is None


def test_an_old_python_that_its_distributor_has_corrected_has_no_known_fault() -> None:
    assert known_fault((3, 11, 2), is_corrected=True) is None
