"""The operations that pages offer as buttons, with the words of the question before them.

A button is shown where the session has the operation's scope, and the operation refuses what must not be.
"""

from dataclasses import dataclass
from typing import get_args

from tuneship.contract.common import DecisionReason


@dataclass(frozen=True)
class Action:
    """A button, and the page that asks once more before it does what cannot be taken back."""

    label: str
    # What will happen, as a question. None: the button acts at once.
    question: str | None = None
    consequence: str = ""
    is_danger: bool = False
    # The question takes who decides and why.
    is_decision: bool = False


REASONS = {str(one): str(one).replace("_", " ") for one in get_args(DecisionReason)}

# By the name of the operation.
ACTIONS = {
    "cancel_job": Action(
        "Cancel job",
        "Cancel this job?",
        "The training ends, and no model comes of it. A cancelled job cannot be resumed.",
        is_danger=True,
    ),
    "revert_canary_endpoint": Action(
        "Roll back",
        "Roll back this rollout?",
        "All traffic returns to the baseline at once, and the rollout ends.",
        is_danger=True,
        is_decision=True,
    ),
    "pause_canary_endpoint": Action(
        "Pause",
        "Pause this rollout?",
        "The split stays as it is until somebody resumes the rollout. Whatever speaks against the candidate still "
        "rolls it back.",
        is_decision=True,
    ),
    "resume_canary_endpoint": Action(
        "Resume",
        "Resume this rollout?",
        "The candidate gets more traffic as soon as its evidence allows it.",
        is_decision=True,
    ),
    "retry_webhook_delivery": Action("Send again"),
}
