"""A job whose process cannot be started says so, is tried three times and then fails; others go on meanwhile."""

import errno
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.support.service.in_process import Service
from tuneship.service.jobs.training_keeper import START_AGAIN_AFTER
from tuneship.store.database import rows, tables
from tuneship.store.database.rows import Row

pytestmark = pytest.mark.both_databases(postgres="soak")
Break = Callable[[Service], None]


def without_a_work_folder(service: Service) -> None:
    """Replace the work folder by a file, which stops even root, unlike missing permissions."""
    work = service.settings.data_dir / "work"
    work.rename(work.with_name("aside"))
    work.touch()


def repaired(service: Service) -> None:
    work = service.settings.data_dir / "work"
    work.unlink()
    work.with_name("aside").rename(work)


def raising(error: Exception) -> Break:
    def broken(service: Service) -> None:
        service.engines.start_error = error

    return broken


def row_of(service: Service, job_id: str) -> Row:
    with service.database.read() as connection:
        row = rows.fetch(connection, tables.jobs, job_id, client_id=None)
    assert row is not None
    return row


def attempts_failed(service: Service, job_id: str, number: int) -> None:
    service.until(lambda: row_of(service, job_id)["attempts_without_progress"] == number)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (without_a_work_folder, "Not a directory"),
        (raising(OSError(errno.ENOSPC, "No space left on device", "/secret/path")), "No space"),
        (raising(PermissionError(errno.EACCES, "Permission denied")), "Permission denied"),
        (raising(FileNotFoundError(errno.ENOENT, "No such file or directory")), "No such file"),
        (raising(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")), "Resource"),
        (raising(RuntimeError("text of /secret/path")), "RuntimeError"),
    ],
)
def test_three_attempts_that_cannot_start_fail_the_job(
    service: Service, broken: Break, why: str
) -> None:
    broken(service)
    job_id = service.job()
    for number, pause in enumerate(START_AGAIN_AFTER, 1):
        attempts_failed(service, job_id, number)
        shown = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()
        assert (shown["status"], shown.get("error")) == ("queued", None)
        service.clock.ahead += pause + timedelta(seconds=1)
    service.until(lambda: service.job_status(job_id) == "failed")
    error = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["error"]
    assert error["reason"] == "no_progress"
    assert "3 attempts" in error["message"]
    assert why in error["message"]
    logs = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}/logs").text
    assert logs.count("could not be started") == 3
    assert "secret" not in error["message"] + logs
    assert row_of(service, job_id)["attempt"] == 3
    assert service.engines.trainers == []


def test_a_job_goes_on_once_it_can_be_started(service: Service) -> None:
    without_a_work_folder(service)
    job_id = service.job()
    attempts_failed(service, job_id, 1)
    repaired(service)
    service.clock.ahead += START_AGAIN_AFTER[0] + timedelta(seconds=1)
    service.trainer_of(job_id).start_of(1)
    service.until(lambda: service.job_status(job_id) == "running")
    assert row_of(service, job_id)["attempt"] == 2


def test_other_jobs_start_while_one_waits_for_its_next_attempt(service: Service) -> None:
    raising(OSError(errno.EIO, "Input/output error"))(service)
    first = service.job()
    attempts_failed(service, first, 1)
    service.engines.start_error = None
    second = service.job("bob")
    service.trainer_of(second).start_of(1)
    service.until(lambda: service.job_status(second, "bob") == "running")
    assert service.job_status(first) == "queued"


def test_one_that_waits_can_be_cancelled(service: Service) -> None:
    raising(OSError(errno.EIO, "Input/output error"))(service)
    job_id = service.job()
    attempts_failed(service, job_id, 1)
    service.call("POST", f"/v1/fine-tuning/jobs/{job_id}/cancel")
    service.until(lambda: service.job_status(job_id) == "cancelled")
