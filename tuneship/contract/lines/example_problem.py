"""Why a line of a dataset is refused. Pure."""

from dataclasses import dataclass


@dataclass(eq=False)
class ExampleProblem(Exception):
    """A line is refused, with a code, its field, and a message that quotes no content."""

    code: str
    field: str | None
    message: str
