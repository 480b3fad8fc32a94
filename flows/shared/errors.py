"""The error of a bad input: a message for people that names the place, raised before anything is created."""

from collections.abc import Sequence


class BadInput(Exception):
    """A parameter, file or dataset line that is refused. `problems` name places and codes, never content."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        """Show at most 20 problems, and the number of the others."""
        shown = [f"  {problem}" for problem in problems[:20]]
        if len(problems) > len(shown):
            shown.append(f"  and {len(problems) - len(shown)} more")
        super().__init__("\n".join([message, *shown]))
