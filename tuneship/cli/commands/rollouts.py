"""`tuneship rollouts`: decides a recorded rollout again, from its record alone.

`replay` exits with 0 when every look decides as it is recorded, and with 4 when one does not or a line of the record
was changed. It asks no service: the record has the counts that each look read.
"""

from pathlib import Path
from typing import Annotated

import typer

from tuneship.cli.common import fail
from tuneship.contract.common import count

DIFFERENT = 4

app = typer.Typer(no_args_is_help=True, help="Recorded rollouts: replay their decisions.")


@app.callback()
def _group() -> None:
    """A group keeps its name before a single command."""


@app.command()
def replay(
    record: Annotated[str, typer.Argument(help="The file of a record, or the id of its rollout.")],
) -> None:
    """Decide every check of a rollout again, and name the first difference from its record."""
    try:
        from tuneship.gates.canary import first_difference  # noqa: PLC0415 - starts slowly
        from tuneship.gates.canary import replay as decide_again  # noqa: PLC0415
        from tuneship.gates.record import ChangedLine, Ended, from_lines  # noqa: PLC0415
    except ModuleNotFoundError as error:  # the distribution of the client has no gates
        fail(f"this needs `pip install tuneship` (missing: {error.name})")

    path = _find(record)
    try:
        known = from_lines(path.read_text().splitlines())
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except ChangedLine as error:
        fail(f"{path}: {error}", DIFFERENT)
    except ValueError as error:
        problem = "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)
        fail(f"{path}: {problem}", DIFFERENT)
    looks = 0
    try:
        for recorded, decided in decide_again(known):
            if difference := first_difference(recorded, decided):
                fail(f"{path}: look {recorded.number}{difference}", DIFFERENT)
            looks += 1
    except (
        ValueError
    ) as error:  # no beginning, another formula, or a plan or counts that cannot be read
        lines = str(error).splitlines()
        fail(f"{path}: {lines[0]}", DIFFERENT)
    ends = [fact for fact in known.facts if isinstance(fact, Ended)]
    end = f"{ends[-1].outcome} ({ends[-1].reason})" if ends else "it has not ended"
    same = count(looks, "check decides as it is recorded", "checks decide as they are recorded")
    typer.echo(f"{path.stem}: {same}; {end}")


def _find(record: str) -> Path:
    from tuneship.settings import PipelineSettings  # noqa: PLC0415 - starts slowly

    path = Path(record)
    if path.suffix == ".jsonl" or path.exists():
        return path
    root = PipelineSettings().records.expanduser()
    found = sorted(root.glob(f"*/{path.name}.jsonl"))
    if len(found) != 1:
        many = "several records" if found else "no record"
        fail(f"{many} of this rollout in {root}: name the file")
    return found[0]
