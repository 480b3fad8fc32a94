"""A question to a person: a flow run in state Paused, which the Prefect UI shows with a form and a Resume button.

No process waits in it. The run that requests approval goes on, polls for the answer, and still finds it after a crash,
because the paused run is stored in the server. The service shows the question, too, by the line of the record; what is
found first counts. Knows no rollout; next: `flows/rollout/promotion_approval.py`.
"""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, cast
from uuid import UUID

from httpx import HTTPError
from prefect import Task, flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.input import RunInput
from prefect.input.run_input import keyset_from_base_key
from prefect.logging import get_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Paused, Pending
from prefect.utilities.asyncutils import run_coro_as_sync
from pydantic import Field

from flows.shared.release_events import given_answer, takes_answers
from tuneship.contract.common import READS_AS_WRITTEN, SignedInPerson
from tuneship.contract.endpoints import CanaryDecided
from tuneship.contract.releases import GivenAnswer

Decision = Literal["promote", "roll back", "timeout"]
PAUSE_KEY = "approval"
# Where the form is stored. The paused state names these keys, so that Prefect's UI finds it.
KEYS = keyset_from_base_key(f"paused-{PAUSE_KEY}")
# Why a question is withdrawn in Prefect that somebody may have answered in the service.
ANSWERED = "the question is answered"
SERVER_FAILURES = (HTTPError, PrefectHTTPStatusError)
_LOG = get_logger("tuneship.approval")
_own_servers: list[str] = []


class Approval(RunInput):
    """The form that a person fills in."""

    decision: Literal["promote", "roll back"] = Field(
        default="roll back", description="promote: continue; roll back: keep what serves now."
    )
    approver: str = Field(
        min_length=1,
        max_length=200,
        pattern=READS_AS_WRITTEN,
        description="Your name, kept in the audit trail.",
    )
    comment: str = Field(
        default="", max_length=2000, description="Why; kept in the audit trail. No patient data."
    )


@dataclass(frozen=True)
class ApprovalQuestion:
    """A question and its time limit. `tag` identifies it: an open question is not asked twice."""

    title: str
    text: str
    tag: str
    timeout_seconds: int


@dataclass(frozen=True)
class ApprovalReply:
    """A person's answer, or a time-out without one. `person`: the approver, where the service knows who signed in."""

    decision: Decision
    approver: str = ""
    comment: str = ""
    person: SignedInPerson | None = None

    @property
    def said(self) -> str:
        """The decision, and who made it."""
        return f"{self.decision} by {self.approver}" if self.approver else self.decision


@flow(name="approval")
def approval(question: str) -> None:
    """Represent the question as a paused run: a person resumes it, and it runs no code."""


def mark_as_own_server(server: str) -> None:
    """Remember a Prefect server that ends with this process, where nobody can see a form."""
    _own_servers.append(server)


def is_prefect_shared() -> bool:
    """Whether this run's Prefect server is one that people can open."""
    url = PREFECT_API_URL.value()
    return bool(url) and url not in _own_servers


def can_be_answered() -> bool:
    """Whether people can answer this run's questions, in Prefect or in the service. Raises `TuneshipError`."""
    return is_prefect_shared() or takes_answers()


def ask(question: ApprovalQuestion) -> tuple[str, datetime]:
    """Show the form. Returns the id of the question, in Prefect that of the run that holds it, and its deadline."""
    if not is_prefect_shared():
        until = datetime.now(UTC) + timedelta(seconds=question.timeout_seconds)
        return secrets.token_hex(8), until
    state = Paused(timeout_seconds=question.timeout_seconds, pause_key=PAUSE_KEY)
    state.state_details.run_input_keyset = {str(key): name for key, name in KEYS.items()}
    until = datetime.now(UTC) + timedelta(seconds=question.timeout_seconds)
    with get_client(sync_client=True) as client:
        # Only an open question is reused: an answer to an earlier one of the same name approves nothing here.
        for run in _open(client, question.tag, StateType.PAUSED):
            asked_until = run.state.state_details.pause_timeout if run.state else None
            if asked_until is not None and asked_until > datetime.now(UTC):
                return str(run.id), asked_until
        parent, node = FlowRunContext.get(), None
        if parent is not None:
            # A task run in the current flow run, so that its page shows the question as one of its steps.
            place = Task(name=approval.name, fn=approval.fn)
            node = run_coro_as_sync(place.create_run(flow_run_context=parent, parameters={})).id
        run = client.create_flow_run(
            approval,
            name=question.title,
            parameters={"question": question.title},
            tags=[question.tag, PAUSE_KEY],
            parent_task_run_id=node,
            state=Pending(),
        )
        # The form comes first: nobody could resume a paused run without one.
        Approval.with_initial_data(description=question.text).save(KEYS, flow_run_id=run.id)
        # Forced, because the server lets only a running run pause.
        client.set_flow_run_state(run.id, state, force=True)
    return str(run.id), until


def answer_to(question: str, until: datetime, now: datetime, record: Path) -> ApprovalReply | None:
    """Read the answer to a question of this record; None if there is none yet. Without one in time it is "timeout"."""
    run_id = _run_of(question)
    in_prefect = _timeout(until, now) if run_id is None else _in_prefect(run_id, until, now)
    if in_prefect is not None and in_prefect.decision != "timeout":
        return in_prefect
    given = given_answer(record, question)
    if given is None or given.at > until:
        return in_prefect
    decision = "promote" if given.decision == "promote" else "roll back"
    return ApprovalReply(decision, given.name, reasons_of(given), given.person)


def reasons_of(decided: GivenAnswer | CanaryDecided) -> str:
    """Reason and ticket of a decision at the service, as the comment of a record."""
    return ", ".join(part for part in (decided.reason, decided.ticket) if part)


def _run_of(question: str) -> UUID | None:
    """The run that holds a question; None for one that was asked without a Prefect server that people can open."""
    with suppress(ValueError):
        return UUID(question) if is_prefect_shared() else None
    return None


def _timeout(until: datetime, now: datetime) -> ApprovalReply | None:
    return ApprovalReply("timeout") if now >= until else None


def _in_prefect(run_id: UUID, until: datetime, now: datetime) -> ApprovalReply | None:
    """Read the answer in Prefect; an outage is none."""
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(run_id)
    except ObjectNotFound:
        return ApprovalReply("roll back", comment="the question was deleted")
    except SERVER_FAILURES as error:
        _LOG.warning("the answer could not be read (%s)", type(error).__name__)
        return _timeout(until, now)
    state = run.state
    if state is None or state.is_paused():
        return _timeout(until, now)
    if state.is_failed():
        return ApprovalReply("timeout")  # the server ends a pause by itself
    if not (state.is_running() or state.is_completed()):
        return ApprovalReply("roll back", comment="the question was cancelled")

    # Prefect's signature also covers its asynchronous form.
    given = cast("Approval", Approval.load(KEYS, flow_run_id=run.id))
    if not state.is_final():
        # Resuming made it Running, but no process runs it, so nothing else would end it.
        try:
            with get_client(sync_client=True) as client:
                message = f"{given.decision} by {given.approver}"
                client.set_flow_run_state(run.id, Completed(message=message))
        except SERVER_FAILURES as error:
            _LOG.warning("the question's run was not ended (%s)", type(error).__name__)
    return ApprovalReply(given.decision, given.approver, given.comment)


def withdraw(tag: str, why: str) -> None:
    """Withdraw an open question, so that no late answer is accepted. Never raises: the rollout is over."""
    try:
        with get_client(sync_client=True) as client:
            # A running one was answered too late to be read.
            for run in _open(client, tag, StateType.PAUSED, StateType.PENDING, StateType.RUNNING):
                client.set_flow_run_state(run.id, Cancelled(message=why))
    except Exception as error:  # noqa: BLE001 - the rollout is over, and a failure of Prefect must not change that
        _LOG.warning("the question was not withdrawn (%s)", type(error).__name__)


def _open(client: SyncPrefectClient, tag: str, *states: StateType) -> list[FlowRun]:
    """Find runs of this question: paused ones can be answered, pending ones lost their process before the form
    appeared.
    """
    among = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))
    tagged = FlowRunFilterTags(all_=[tag])
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tagged, state=among))
