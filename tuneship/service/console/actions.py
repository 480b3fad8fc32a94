"""The operations that pages offer as buttons, with the words of the question before them.

A button is shown where the session has the operation's scope, and the operation refuses what must not be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Action:
    """A button, and the page that asks once more before it does what cannot be taken back."""

    label: str
    # What will happen, as a question. None: the button acts at once.
    question: str | None = None
    consequence: str = ""
    is_danger: bool = False
    # The one button of a page that leads on.
    leads_on: bool = False
    # The operation, where the action has another name.
    operation: str = ""
    # Fields of its body: those that the button sets, those that come with the page, those that a person fills in.
    sets: Mapping[str, str] = field(default_factory=dict[str, str])
    given: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    # Fields of the form that the operation does not have.
    leaves_out: tuple[str, ...] = ()
    # Its answer is shown on the page that the form is on; others lead to another page.
    is_shown: bool = False


# Who decides, and why.
DECISION = ("name", "reason", "ticket")
_ANSWER: dict[str, Any] = {
    "operation": "answer_release",
    "given": ("question",),
    "asks": DECISION,
}
# By the name of the operation, or their own.
ACTIONS = {
    "cancel_job": Action(
        "Cancel job",
        "Cancel this job?",
        "The training stops, and no model is made. A cancelled job cannot be resumed.",
        is_danger=True,
    ),
    "revert_canary_endpoint": Action(
        "Roll back",
        "Roll back this rollout?",
        "All traffic returns to the baseline at once, and the rollout ends.",
        is_danger=True,
        asks=DECISION,
    ),
    "pause_canary_endpoint": Action(
        "Pause",
        "Pause this rollout?",
        "The split does not change until somebody resumes the rollout. Evidence of harm still rolls it back.",
        asks=DECISION,
    ),
    "resume_canary_endpoint": Action(
        "Resume",
        "Resume this rollout?",
        "The candidate gets more traffic as soon as the evidence allows it.",
        leads_on=True,
        asks=DECISION,
    ),
    "retry_webhook_delivery": Action("Send again"),
    "promote_release": Action(
        "Promote",
        "Promote the new model?",
        "At its next check, the pipeline continues if the gates are proven; no answer overrides harm. If gates "
        "held before any traffic, the release continues in spite of them.",
        leads_on=True,
        sets={"decision": "promote"},
        **_ANSWER,
    ),
    "roll_back_release": Action(
        "Roll back",
        "Roll back?",
        "At its next check the pipeline returns all traffic to the model that served before, and ends the release.",
        is_danger=True,
        sets={"decision": "roll back"},
        **_ANSWER,
    ),
    "create_job": Action("Start training"),
    "upload_dataset": Action("Upload"),
    "validate_dataset": Action(
        "Check without storing", leaves_out=("name", "description"), is_shown=True
    ),
    "create_deployment": Action("Deploy"),
    "create_endpoint": Action("Make endpoint"),
    "create_canary_endpoint": Action("Make endpoint"),
    "update_endpoint": Action("Cut over"),
    "update_canary_endpoint": Action("Change the split"),
    "delete_dataset": Action(
        "Delete",
        "Delete this dataset?",
        "Its file and its row are removed; this cannot be undone. Models that were tuned on it are kept.",
        is_danger=True,
    ),
    "delete_model": Action(
        "Delete",
        "Delete this model?",
        "Its files are removed; this cannot be undone. The job that made it is kept.",
        is_danger=True,
    ),
    "delete_deployment": Action(
        "Delete",
        "Delete this deployment?",
        "It accepts no more requests, and ends when the running ones are answered. Its model is kept.",
        is_danger=True,
        given=("force",),
    ),
    "delete_endpoint": Action(
        "Delete",
        "Delete this endpoint?",
        "Its address stops answering at once.",
        is_danger=True,
    ),
    "delete_canary_endpoint": Action(
        "Delete",
        "Delete this endpoint?",
        "Its address stops answering at once.",
        is_danger=True,
    ),
}
