"""A program that plays services which die by SIGKILL inside of an operation; `conftest.py` starts it.

Each line on standard input is `operation <tab> point <tab> data folder <tab> database URL`; the answer is `killed`.
The services are children of one process, so that Python and its modules are loaded once.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.service.in_process import Service
from tests.service.test_idempotency import create
from tuneship.service import job_progress, training_runs
from tuneship.service.context import Context
from tuneship.service.resources import SERVED
from tuneship.store import idempotency, leases


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(work: Callable[..., Any]) -> Callable[..., Any]:
    def and_die(*given: Any, **named: Any) -> None:
        work(*given, **named)
        _die()

    return and_die


def arm(name: str, point: str) -> None:
    """Make the create die at a point."""
    served = SERVED[name]
    match point:
        case "before the key is taken":
            idempotency.begin = _die  # type: ignore[assignment]
        case "while the key is taken":
            idempotency.begin = _after(idempotency.begin)
        case "before the work":
            object.__setattr__(served, "handler", _die)
        case "after the work":
            object.__setattr__(served, "handler", _after(served.handler))
        case "before the commit":
            Context.commit = _die  # type: ignore[method-assign, assignment]
        case "after the commit":
            Context.commit = _after(Context.commit)  # type: ignore[method-assign]
        case _:
            raise ValueError(point)


def arm_completion(point: str) -> None:
    """Make the registration of a model die at a point."""
    match point:
        case "before the row":
            leases.end = _die
        case "before the commit":
            job_progress.tell = _die
        case "after the commit":
            training_runs.clear = _die
        case _:
            raise ValueError(point)


def play(name: str, point: str, folder: str, url: str) -> None:
    """In a child: a service with what the operation works on, then the operation that kills it."""
    with Service(Path(folder), **({"database_url": url} if url else {})) as service:
        if name == "complete_job":
            job_id = service.job()
            trainer = service.trainer_of(job_id)
            trainer.start_of(2)
            service.until(lambda: service.job_status(job_id) == "running")
            arm_completion(point)
            trainer.complete(end=False)
            signal.pause()
        if name == "create_job":
            service.dataset()
        arm(name, point)
        create(service, name)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            play(*line.rstrip("\n").split("\t"))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print("killed" if os.WIFSIGNALED(status) else f"lived: {status}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
