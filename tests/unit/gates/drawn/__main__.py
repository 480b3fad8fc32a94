"""Print how often each rule is wrong, and how soon it is right: `python -m tests.unit.gates.drawn --runs 60`."""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.unit.gates.drawn.kinds import KINDS, Kind
from tests.unit.gates.drawn.rules import Run, argo, kayenta, runs_of, share_wrong, watched


def _cell(kind: Kind, runs: Sequence[Run]) -> str:
    """Format the percentage of wrong ends (+ inconclusive), their reasons, and the median look of the right ends."""
    percent = 100.0 / len(runs)
    right = [run for run in runs if run.is_promoted == kind.must_be_promoted]
    wrong = [run for run in runs if run.is_promoted != kind.must_be_promoted]
    at = f" @{statistics.median(run.looks for run in right):.0f}" if right else ""
    unclear = sum(run.is_inconclusive for run in wrong)
    more = f" (+{percent * unclear:.0f})" if unclear else ""
    reasons = sorted({run.reason for run in wrong if run.reason and not run.is_inconclusive})
    why = f" {', '.join(reasons)}" if reasons else ""
    return f"{percent * (len(wrong) - unclear):.0f}{more}{why}{at}"


def _note(kind: Kind, runs: Sequence[Run]) -> str:
    """Return which bound these runs do not meet, or else the note of the kind."""
    if kind.most is not None and share_wrong(kind, runs) > kind.most:
        return f"bound {kind.most:.0%} not met"
    if kind.by is not None and statistics.median(run.looks for run in runs) > kind.by:
        return f"bound @{kind.by} not met"
    return kind.note


def _rivals(kind: Kind, seeds: Iterable[int]) -> list[list[Run]]:
    """Run Argo's rule with no and with three allowed failures, and Kayenta's rule, on the same traffic."""
    runs: list[list[Run]] = [[], [], []]
    for seed in seeds:
        hour, buckets = watched(kind, seed)
        runs[0].append(argo(hour, buckets, 0))
        runs[1].append(argo(hour, buckets, 3))
        runs[2].append(kayenta(buckets))
    return runs


def table(
    names: Sequence[str], runs: int, first_seed: int, fields: dict[str, Any], *, alone: bool
) -> Iterator[str]:
    """Yield the table in Markdown. A cell has the percentage of wrong ends, their reasons, and @ the median look."""
    seeds = range(first_seed, first_seed + runs)
    plan = f" Plan: {fields}." if fields else ""
    yield f"{runs} runs a row, seeds {seeds.start} to {seeds.stop - 1}.{plan}"
    yield ""
    yield "| kind | must | tuneship | Argo 0 | Argo 3 | Kayenta | |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        kind = KINDS[name]
        ours = runs_of(kind, seeds, **fields)
        cells = [_cell(kind, ours)]
        if kind.seconds == 60 and not alone:
            cells += [_cell(kind, runs) for runs in _rivals(kind, seeds)]
        else:
            cells += ["-"] * 3
        yield f"| {name} | {kind.must} | {' | '.join(cells)} | {_note(kind, ours)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--row", choices=list(KINDS), action="append")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument(
        "--plan", default="", help="fields of the plan as name=value, comma-separated"
    )
    parser.add_argument("--alone", action="store_true", help="without the rivals")
    given = parser.parse_args()
    pairs = [one.split("=") for one in given.plan.split(",") if one]
    fields = {name: int(value) for name, value in pairs}
    for line in table(given.row or list(KINDS), given.runs, given.seed, fields, alone=given.alone):
        print(line, flush=True)  # noqa: T201 - this is a command's output


if __name__ == "__main__":
    main()
