"""A question to a person: a flow run in state Paused, which the Prefect UI shows with a form and a Resume button.

No process waits in it. The run that requests approval goes on, polls for the answer, and still finds it after a crash,
because the paused run is stored in the server. Knows no rollout; next: `flows/rollout/promotion_approval.py`.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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

from tuneship.contract.common import ONE_LINE

Decision = Literal["promote", "roll back", "timeout"]
PAUSE_KEY = "approval"
# Where the form is stored. The paused state names these keys, so that Prefect's UI finds it.
KEYS = keyset_from_base_key(f"paused-{PAUSE_KEY}")
SERVER_FAILURES = (HTTPError, PrefectHTTPStatusError)
_LOG = get_logger("tuneship.approval")
_own_servers: list[str] = []


class Approval(RunInput):
    """The form that a person fills in."""

    decision: Literal["promote", "roll back"] = Field(
        default="roll back", description="promote: go on; roll back: keep what serves now."
    )
    approver: str = Field(
        min_length=1,
        max_length=200,
        pattern=ONE_LINE,
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
    """A person's answer, or a time-out without one."""

    decision: Decision
    approver: str = ""
    comment: str = ""


@flow(name="approval")
def approval(question: str) -> None:
    """Represent the question as a paused run: a person resumes it, and it runs no code."""


def mark_as_own_server(server: str) -> None:
    """Remember a Prefect server that ends with this process, where nobody can see a form."""
    _own_servers.append(server)


def can_be_answered() -> bool:
    """Whether this run's Prefect server is one that people can open."""
    url = PREFECT_API_URL.value()
    return bool(url) and url not in _own_servers


def ask(question: ApprovalQuestion) -> tuple[str, datetime]:
    """Show the form. Returns the id of the run that holds the question, and its deadline."""
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


def answer_to(run_id: str, until: datetime, now: datetime) -> ApprovalReply | None:
    """Read the answer; None if there is none yet. After the deadline it is "timeout"; an outage is no answer."""
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(UUID(run_id))
    except ObjectNotFound:
        return ApprovalReply("roll back", comment="the question was deleted")
    except SERVER_FAILURES as error:
        _LOG.warning("the answer could not be read (%s)", type(error).__name__)
        return ApprovalReply("timeout") if now >= until else None
    state = run.state
    if state is None or state.is_paused():
        return ApprovalReply("timeout") if now >= until else None
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
            for run in _open(client, tag, StateType.PAUSED, StateType.PENDING):
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
