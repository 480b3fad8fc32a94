"""Why a line of a dataset is refused. Pure."""

from dataclasses import dataclass


@dataclass(eq=False)
class ExampleProblem(Exception):
    """A line is refused: a code of the report, the field, and a message without content."""

    code: str
    field: str | None
    message: str
