"""The operations that pages offer as buttons, with the words of the question before them.

A button is shown where the session has the operation's scope, and the operation refuses what must not be.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """A button, and the page that asks once more before it does what cannot be taken back."""

    label: str
    # What will happen, as a question. None: the button acts at once.
    question: str | None = None
    consequence: str = ""
    is_danger: bool = False


# By the name of the operation.
ACTIONS = {
    "cancel_job": Action(
        "Cancel job",
        "Cancel this job?",
        "The training ends, and no model comes of it. A cancelled job cannot be resumed.",
        is_danger=True,
    ),
    "create_job": Action("Tune again"),
}
