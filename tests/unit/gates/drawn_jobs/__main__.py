"""Print how often the training gates are wrong, before and now: `python -m tests.unit.gates.drawn_jobs --runs 300`."""

import argparse
from collections.abc import Iterator, Sequence

from tests.unit.gates.drawn_jobs.kinds import KINDS, JobKind, Judge, share_wrong, shares


def _cell(kind: JobKind, judge: Judge, seeds: Sequence[int]) -> str:
    """Format the percentage of wrong ends, and of holds where there are any."""
    ends = shares(judge, seeds)
    holds = f" ({100 * ends['hold']:.0f} hold)" if ends["hold"] else ""
    return f"{100 * share_wrong(kind, ends):.3g}{holds}"


def table(names: Sequence[str], runs: int, first_seed: int) -> Iterator[str]:
    """Yield the table in Markdown."""
    seeds = range(first_seed, first_seed + runs)
    yield f"{runs} runs a row, seeds {seeds.start} to {seeds.stop - 1}; percent."
    yield ""
    yield "| job | must | wrong before | wrong now |"
    yield "|---|---|---|---|"
    for name in names:
        kind = KINDS[name]
        cells = [_cell(kind, judge, seeds) for judge in (kind.before, kind.after)]
        yield f"| {name} | {kind.must} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--row", choices=list(KINDS), action="append")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    given = parser.parse_args()
    for line in table(given.row or list(KINDS), given.runs, given.seed):
        print(line, flush=True)  # noqa: T201 - this is a command's output


if __name__ == "__main__":
    main()
