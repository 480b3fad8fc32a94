"""Turns any exception into an error of the contract, in the same way for answers, streams and batches."""

import errno
import logging

from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tuneship.contract.errors import ApiError, InternalError
from tuneship.store.files.blobs import BlobsAway

logger = logging.getLogger(__name__)

# Errors of the operating system for a disk that is full or broken, or for too many open files.
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE,
)  # fmt: skip

# The error code of Postgres for a write to a server that has become a standby.
READ_ONLY_SQLSTATE = "25006"


def error_from_exception(error: BaseException, request_id: str) -> ApiError:
    """The contract's error for an exception; an unexpected one is logged with the request's id.

    No traceback, path or SQL ever leaves the service.
    """
    if isinstance(error, ApiError):
        return error
    logger.error("%s failed", request_id, exc_info=error)
    if isinstance(error, BlobsAway):
        return InternalError("the store of files is not available", status=503, retry_after=5)
    is_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
    is_disconnected = isinstance(error, DBAPIError) and (
        error.connection_invalidated or getattr(error.orig, "sqlstate", None) == READ_ONLY_SQLSTATE
    )
    if is_disk or is_disconnected or isinstance(error, OperationalError | PoolTimeout):
        return InternalError("the database or the disk is not available", status=503, retry_after=2)
    return InternalError("the service failed unexpectedly")
