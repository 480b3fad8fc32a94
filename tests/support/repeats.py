"""How often a test runs: at each commit, and in `make soak`."""

from typing import Any

import pytest


def repeats(each_commit: int, soak: int) -> list[Any]:
    """Number the runs of a test, for `parametrize`; those beyond `each_commit` are for `make soak` alone."""
    more = range(each_commit, soak)
    return [*range(each_commit), *(pytest.param(one, marks=pytest.mark.soak) for one in more)]
