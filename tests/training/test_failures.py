"""What the owner of a job is told when something unforeseen ends it."""

import pytest
import torch

from tuneship.training.__main__ import failure_of


def caught(action: str) -> Exception:
    try:
        _ = torch.empty(1 << 60) if action == "allocate" else {}["CANARY" + "-9"]
    except (RuntimeError, KeyError) as error:
        return error
    raise AssertionError


def test_the_cpu_allocators_refusal_is_out_of_memory() -> None:
    assert failure_of(caught("allocate")).reason == "out_of_memory"
    assert failure_of(MemoryError()).reason == "out_of_memory"
    assert failure_of(torch.OutOfMemoryError()).reason == "out_of_memory"


def test_an_unforeseen_error_is_told_by_kind_and_place_not_by_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = failure_of(caught("fail"))
    assert failure.reason == "internal"
    assert failure.message.startswith("unexpected KeyError in test_failures.py line ")
    written = capsys.readouterr().err
    assert "test_failures.py" in written
    assert "CANARY-9" not in written
