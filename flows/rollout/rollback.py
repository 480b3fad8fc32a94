"""Returns the traffic to the baseline when the flow stops: by an exception, Ctrl-C, SIGTERM or a cancel.

It is done in two places, because each may be missed: the rollback of a transaction around the rollout, and state hooks,
which Prefect may run in a new process, so they know only the run's parameters and the record. Both are idempotent.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging import get_logger
from prefect.transactions import Transaction
from pydantic import ValidationError

from flows.rollout.endings import is_baked, lost, promote, roll_back
from flows.rollout.promotion_approval import withdraw_question
from flows.rollout.record_file import RecordFolder, records_in_use
from flows.rollout.split import (
    PLAIN,
    Log,
    NotConfirmed,
    RolloutSplit,
    SplitLost,
    describe,
    split_of_record,
)
from flows.shared.signals import uninterrupted
from tuneship.client import ServiceUnreachable, TuneshipError
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Ended

# A process that was signalled to end has little time; the hooks, the next run and the lease come after it.
STOP_TRIES = 6


@contextmanager
def rollback_on_error(split: RolloutSplit) -> Generator[None]:
    """Return the traffic when the block raises.

    The transaction is held by hand and not entered: tasks inside `with transaction()` join it, and a single failed try
    of one of them, even if it is retried or caught, rolls the whole of it back (seen on Prefect 3.8.8).
    """
    transaction = Transaction()
    stopped_by: list[BaseException] = []

    def return_the_traffic(_: Transaction) -> None:
        abort(split, "error" if isinstance(stopped_by[0], Exception) else "cancelled")

    transaction.stage(None, on_rollback_hooks=[return_the_traffic])
    try:
        yield
    except BaseException as error:
        stopped_by.append(stopping_signal(error))
        with uninterrupted():
            transaction.rollback()
        if stopped_by[0] is not error:
            raise stopped_by[0] from None
        raise
    transaction.commit()


def stopping_signal(error: BaseException) -> BaseException:
    """The signal behind an error: while Prefect sets a task up, a signal ends as a ValueError (seen on 3.8.8)."""
    behind: BaseException | None = error
    while behind is not None:
        if not isinstance(behind, Exception):
            return behind
        behind = behind.__context__
    return error


def abort(split: RolloutSplit, reason: str) -> Ended | None:
    """End a rollout that was stopped from outside; None where it had ended already. A promoted one stays promoted."""
    if split.file.is_paused or not split.file.may_have_traffic:
        return None
    split.calls = PLAIN
    ended = end_stopped(split, reason)
    split.file.append_if_possible(ended)
    withdraw_question(split.file, ended.outcome)
    return ended


def end_stopped(split: RolloutSplit, reason: str) -> Ended:
    """End a rollout whose driver stopped: promote it if it passed its bake, else return its traffic."""
    if is_baked(split.file.record):
        try:
            return promote(split)
        except (NotConfirmed, SplitLost):
            split.log.exception("a baked rollout was stopped before its end")
    last = split.file.record.facts[-1]
    try:
        if isinstance(last, Ended):  # a rollback that was decided and not confirmed
            return roll_back(split, last.reason, tries=STOP_TRIES)
        return roll_back(split, reason, outcome="aborted", tries=STOP_TRIES)
    except SplitLost as error:
        return lost(split, error.reason)


def return_traffic(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001 - names by Prefect
    """Return the traffic as a state hook: crashed, failed or cancelled. Prefect calls it with exactly these names."""
    log = get_logger("tuneship.rollback")
    reason = "error" if state.is_failed() else "cancelled"
    try:
        plan = CanaryPlan.model_validate(flow_run.parameters["plan"])
        folder = records_in_use()
    except (ValidationError, ServiceUnreachable) as error:
        log.warning("the run never began (%s)", type(error).__name__)
        return
    try:
        _return_all(plan, folder, log, reason)
    except OSError as error:
        place = plan.endpoint_id or plan.endpoint_name
        log.critical("%s: the records cannot be read (%s)", folder.path, error.strerror)
        log.critical("check the split of the endpoint %s", place)


def _return_all(plan: CanaryPlan, folder: RecordFolder, log: Log, reason: str) -> None:
    """Return the traffic of every open rollout of this plan, unless it is alive in another process."""
    with folder.lock(plan) as is_free:
        if not is_free:
            return
        for damaged in folder.damaged():
            if damaged.blocks(plan):
                log.critical("%s: check the split of its endpoint", damaged.why)
        for file in folder.of(plan):
            if not file.may_have_traffic or file.is_paused:
                continue
            try:
                split = split_of_record(plan, file, log, PLAIN)
            except TuneshipError as error:
                log.critical("the traffic was not returned (%s); the lease will", describe(error))
            else:
                abort(split, reason)
