"""Approval of a promotion: requested when all is proven, read between two looks, withdrawn when it is moot.

The looks go on meanwhile, so that the lease is renewed and a regression beats any approval. Next:
`flows/shared/approval.py` shows the form; `tuneship/gates/rules.py` acts on the answer.
"""

from datetime import UTC, datetime

from flows.rollout.record_file import RecordFile
from flows.rollout.split import RolloutSplit, service_time
from flows.shared.approval import (
    ANSWERED,
    SERVER_FAILURES,
    ApprovalQuestion,
    answer_to,
    ask,
    withdraw,
)
from tuneship.cards.markdown import code, table
from tuneship.contract.common import count
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import ApprovalAnswered, ApprovalAsked, Phase, RolloutRecord
from tuneship.gates.reports.tables import evidence_table


def ask_for_approval(split: RolloutSplit) -> None:
    """Show the form, and record the question under which its answer is found."""
    record, plan = split.file.record, split.plan
    question = ApprovalQuestion(
        title=f"promote-{plan.candidate_deployment_id}",
        text=question_text(record, plan),
        tag=_tag(split.file),
        timeout_seconds=plan.approval_timeout_seconds,
    )
    try:
        question_id, until = ask(question)
    except SERVER_FAILURES as error:  # the next look tries again
        split.log.warning("approval could not be requested (%s)", type(error).__name__)
        return
    split.file.append(ApprovalAsked(service_time(record), question_id, until))
    split.log.warning("approval is requested until %s: %s", until.isoformat(), question_id)


def question_text(record: RolloutRecord, plan: CanaryPlan) -> str:
    """The text above the form."""
    candidate, baseline = code(plan.candidate_deployment_id), code(plan.baseline_deployment_id)
    bake = f"It then bakes at {plan.bake_weight or 100} % for {count(plan.bake_looks, 'check')}"
    bake += " before it gets the rest." if plan.bake_weight else "."
    text = [
        f"## Give {candidate} all traffic of {code(record.begun.endpoint_id)}?",
        f"It has {record.weight} % now, and every gate is proven. Baseline: {baseline}. {bake}",
        table(*evidence_table(record.looks[-1].gates)) if record.looks else "",
    ]
    return "\n\n".join(text)


def record_answer(split: RolloutSplit) -> None:
    """Record the answer once it has come. An approval that was not used in time counts as a timeout."""
    record = split.file.record
    if record.phase is not Phase.WAIT:
        return
    asked, known = record.asked, record.answer
    # The rollout was paused since, and a person resumed it.
    if asked is None or asked.until is None:
        ask_for_approval(split)
        return
    now = datetime.now(UTC)
    if known is not None:
        if known.decision == "promote" and now >= asked.until:
            split.file.append(ApprovalAnswered("timeout"))
        return
    answer = answer_to(asked.question, asked.until, now, split.file.path)
    if answer is not None:
        said = (answer.decision, answer.approver, answer.comment, answer.person)
        split.file.append(ApprovalAnswered(*said))
        # The line closes the question in the service.
        withdraw(_tag(split.file), ANSWERED)
        split.log.info("the approval is answered: %s", answer.decision)


def withdraw_question(file: RecordFile, why: str) -> None:
    """Withdraw the question of a rollout that has ended, so that no late answer is accepted."""
    if file.record.begun.plan["approval"] == "required":
        withdraw(_tag(file), f"the rollout has ended: {why}")


def _tag(file: RecordFile) -> str:
    return f"{file.path.parent.name}/{file.path.stem}"
