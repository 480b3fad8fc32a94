"""How often a test runs, and with what: at each commit, and in `make soak`."""

from collections.abc import Iterable
from typing import Any

import pytest


def repeats(each_commit: int, soak: int) -> list[Any]:
    """Number the runs of a test, for `parametrize`; those beyond `each_commit` are for `make soak` alone."""
    return variants(range(soak), each_commit)


def variants(values: Iterable[Any], each_commit: int = 1) -> list[Any]:
    """Return the values for `parametrize`; those after the first `each_commit` are for `make soak` alone."""
    marks = pytest.mark.soak
    return [
        value if number < each_commit else pytest.param(value, marks=marks)
        for number, value in enumerate(values)
    ]
