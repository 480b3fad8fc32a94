"""Lets a person decide about a training gate that holds, where the release requires approval.

No traffic is at stake, so the chain simply waits. A line of the release's record shows the question in the service.
Next: `flows/shared/approval.py`.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from prefect import get_run_logger

from flows.release.record_file import ReleaseRecord
from flows.shared.approval import (
    ANSWERED,
    ApprovalQuestion,
    ApprovalReply,
    answer_to,
    ask,
    is_prefect_shared,
    withdraw,
)
from flows.shared.signals import uninterrupted
from tuneship.cards.markdown import code, table
from tuneship.gates.gate_result import GateResult

# The service records each of these reads where a release is in the hipaa mode.
POLL_SECONDS = 5.0


def ask_about(
    gates: Sequence[GateResult],
    model: str,
    run_key: str,
    record: ReleaseRecord,
    timeout_seconds: int,
) -> ApprovalReply:
    """Wait for a person's decision about gates that hold, and record it; "timeout" without one in time."""
    question = ApprovalQuestion(
        title=f"deploy-{model}",
        text=question_text(gates, model),
        # With the run's key, so that a repeated run finds the question that it had asked.
        tag=f"{run_key}/training-gates",
        timeout_seconds=timeout_seconds,
    )
    asks = [gate.name for gate in gates]
    open_question = record.open_question(asks, datetime.now(UTC))
    # A question in Prefect is found there, and has its own id.
    if open_question is None or is_prefect_shared():
        question_id, until = ask(question)
        if open_question is None or open_question[0] != question_id:
            now, ends = datetime.now(UTC), until.isoformat()
            record.add("question", now, question=question_id, asks=asks, until=ends)
    else:
        question_id, until = open_question
    log = get_run_logger()
    log.warning("a person is asked until %s: %s", until.isoformat(), question_id)
    try:
        while (answer := answer_to(question_id, until, datetime.now(UTC), record.path)) is None:
            time.sleep(POLL_SECONDS)
    except BaseException:  # stopped while it waits: nobody would hear the answer
        with uninterrupted():
            withdraw(question.tag, "the release was stopped")
        raise
    record.add(
        "held_gates",
        datetime.now(UTC),
        said=answer.said,
        question=question_id,
        decision=answer.decision,
        approver=answer.approver,
        comment=answer.comment,
        person=answer.person.model_dump() if answer.person else None,
    )
    # The line closes the question in the service.
    withdraw(question.tag, ANSWERED)
    log.info("the answer is: %s", answer.decision)
    return answer


def question_text(gates: Sequence[GateResult], model: str) -> str:
    """The text above the form."""
    title = f"## Deploy {code(model)} although gates hold?"
    why = [[gate.name, gate.note or "holds"] for gate in gates]
    return f"{title}\n\n{table(('gate', 'why'), why)}"
