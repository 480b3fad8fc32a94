"""Print how evaluations end: `python -m tests.unit.gates.drawn_evaluations --runs 2000` (and `--clusters`)."""

import argparse
from collections.abc import Iterator, Sequence

from tests.unit.gates.drawn_evaluations.clusters import CLUSTER_KINDS, MARGIN, SIZE, wrong_ends
from tests.unit.gates.drawn_evaluations.kinds import KINDS, SIZES, Ends, ends


def _cell(found: Ends, examples: int) -> str:
    """Format the percentages, and the mean number of examples where many stop early."""
    shares = " / ".join(_percent(found.shares[name]) for name in ("pass", "reject", "hold"))
    return shares + (f" @{found.examples:,.0f}" if found.examples < 0.9 * examples else "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.1 or not share else f"{100 * share:.1f}"


def table(names: Sequence[str], runs: int, first_seed: int) -> Iterator[str]:
    """Yield the table in Markdown."""
    seeds = range(first_seed, first_seed + runs)
    yield f"{runs} runs a cell, seeds {seeds.start} to {seeds.stop - 1}; percent: pass / reject / hold."
    yield ""
    yield f"| models | {' | '.join(f'{n:,}, margin {margin:g}' for n, margin in SIZES)} |"
    yield f"|{'---|' * (len(SIZES) + 1)}"
    for name in names:
        cells = [_cell(ends(KINDS[name], n, margin, seeds), n) for n, margin in SIZES]
        yield f"| {name} | {' | '.join(cells)} |"


def table_of_clusters(runs: int, first_seed: int) -> Iterator[str]:
    """Yield the table of examples that depend on each other."""
    seeds = range(first_seed, first_seed + runs)
    yield f"{runs} runs a row, seeds {seeds.start} to {seeds.stop - 1}; clusters of {SIZE}, margin {MARGIN}; percent."
    yield ""
    yield "| clusters | agree | examples that differ | on the margin: passes by t alone | passes now | equal: worse |"
    yield f"|{'---|' * 6}"
    for kind in CLUSTER_KINDS:
        found = wrong_ends(kind, seeds)
        shares = (found.passed_by_t, found.passed, found.worse)
        cells = [
            str(kind.clusters),
            f"{100 * kind.agreeing:.0f} %",
            f"{100 * kind.differing:.0f} %",
        ]
        yield f"| {' | '.join([*cells, *map(_percent, shares)])} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--row", choices=list(KINDS), action="append")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument(
        "--clusters", action="store_true", help="examples that depend on each other"
    )
    given = parser.parse_args()
    names = given.row or list(KINDS)
    lines = (
        table_of_clusters(given.runs, given.seed)
        if given.clusters
        else table(names, given.runs, given.seed)
    )
    for line in lines:
        print(line, flush=True)  # noqa: T201 - this is a command's output


if __name__ == "__main__":
    main()
