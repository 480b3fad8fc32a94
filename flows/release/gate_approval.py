"""Lets a person decide about a training gate that holds, where the release requires approval.

No traffic is at stake, so the chain simply waits. Next: `flows/shared/approval.py`.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from prefect import get_run_logger

from flows.shared.approval import ApprovalQuestion, ApprovalReply, answer_to, ask, withdraw
from flows.shared.signals import uninterrupted
from tuneship.cards.markdown import code, table
from tuneship.gates.gate_result import GateResult

POLL_SECONDS = 2.0


def ask_about(
    gates: Sequence[GateResult], model: str, run_key: str, timeout_seconds: int
) -> ApprovalReply:
    """Wait for a person's decision about a training whose gates hold; "timeout" without an answer in time."""
    question = ApprovalQuestion(
        title=f"deploy-{model}",
        text=question_text(gates, model),
        # With the run's key, so that a repeated run finds the question that it had asked.
        tag=f"{run_key}/training-gates",
        timeout_seconds=timeout_seconds,
    )
    run_id, until = ask(question)
    get_run_logger().warning("a person is asked until %s: flow run %s", until.isoformat(), run_id)
    try:
        while (answer := answer_to(run_id, until, datetime.now(UTC))) is None:
            time.sleep(POLL_SECONDS)
    except BaseException:  # stopped while it waits: nobody would hear the answer
        with uninterrupted():
            withdraw(question.tag, "the release was stopped")
        raise
    get_run_logger().info("the answer is: %s", answer.decision)
    return answer


def question_text(gates: Sequence[GateResult], model: str) -> str:
    """The text above the form."""
    title = f"## Deploy {code(model)} although gates hold?"
    why = [[gate.name, gate.note or "holds"] for gate in gates]
    return f"{title}\n\n{table(('gate', 'why'), why)}"
