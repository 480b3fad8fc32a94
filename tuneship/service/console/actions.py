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
    # The operation, where the action has another name.
    operation: str = ""
    # Fields of its body: those that the button sets, those that come with the page, those that a person fills in.
    sets: Mapping[str, str] = field(default_factory=dict[str, str])
    given: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()


_ANSWER: dict[str, Any] = {
    "operation": "answer_release",
    "given": ("question",),
    "asks": ("name", "reason", "ticket"),
}
# By the name of the operation, or their own.
ACTIONS = {
    "cancel_job": Action(
        "Cancel job",
        "Cancel this job?",
        "The training ends, and no model comes of it. A cancelled job cannot be resumed.",
        is_danger=True,
    ),
    "promote_release": Action(
        "Promote",
        "Promote the new model?",
        "The pipeline goes on at its next look, while its gates are proven: no answer leads past harm. Where gates "
        "held before any traffic, the release goes on without them.",
        sets={"decision": "promote"},
        **_ANSWER,
    ),
    "roll_back_release": Action(
        "Roll back",
        "Roll back?",
        "At its next look the pipeline returns all traffic to the model that served before, and ends the release.",
        is_danger=True,
        sets={"decision": "roll back"},
        **_ANSWER,
    ),
}
