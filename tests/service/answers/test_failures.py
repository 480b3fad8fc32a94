"""Any exception becomes an error of the contract, which says whether it passes and nothing of the inside."""

import errno

import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError

from tuneship.contract.errors import ResourceNotFound
from tuneship.service.answers.failures import error_from_exception
from tuneship.store.files.blobs import BlobsAway

SECRET = "/data/a.sqlite: select 1"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(errno.ENOSPC, SECRET), 503, "the database or the disk is not available"),
        (OSError(errno.EACCES, SECRET), 500, "the service failed unexpectedly"),
        (
            OperationalError(SECRET, None, Exception(SECRET)),
            503,
            "the database or the disk is not available",
        ),
        (
            ProgrammingError(SECRET, None, Exception(SECRET)),
            500,
            "the service failed unexpectedly",
        ),
        (BlobsAway(SECRET), 503, "the store of files is not available"),
        (ValueError(SECRET), 500, "the service failed unexpectedly"),
    ],
)
def test_an_unforeseen_exception_is_an_error_of_the_service(
    error: Exception, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = error_from_exception(error, "req_1")
    assert (refusal.status, str(refusal), refusal.retryable) == (status, message, True)
    assert [record.getMessage() for record in caplog.records] == ["req_1 failed"]


def test_an_error_of_the_contract_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    error = ResourceNotFound("no such dataset")
    assert error_from_exception(error, "req_1") is error
    assert not caplog.records
