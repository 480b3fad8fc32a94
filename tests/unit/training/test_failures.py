"""Tests of the messages that the owner of a job gets when something unforeseen ends it."""

import errno

import pytest
import torch
from safetensors import SafetensorError

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
    text = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert failure_of(RuntimeError(text)).reason == "out_of_memory"


def test_a_full_disk_is_reported_as_such() -> None:
    failure = failure_of(OSError(errno.ENOSPC, "No space left on device", "CANARY"))
    assert (failure.reason, failure.message[:30]) == ("internal", "the service's disk is full: a ")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "CANARY"),
        SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"),
    ],
)
def test_a_broken_disk_is_reported_as_such_also_by_the_library_that_writes_tensors(
    error: Exception,
) -> None:
    failure = failure_of(error)
    assert (failure.reason, failure.message[:27]) == ("internal", "the service's disk failed: ")


def test_out_of_memory_names_what_to_lower() -> None:
    assert "a smaller lora_rank or batch_size" in failure_of(MemoryError()).message


def test_an_unforeseen_error_is_reported_by_kind_and_place_not_by_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = failure_of(caught("fail"))
    assert failure.reason == "internal"
    assert failure.message.startswith("unexpected KeyError in test_failures.py line ")
    written = capsys.readouterr().err
    assert "test_failures.py" in written
    assert "CANARY-9" not in written
