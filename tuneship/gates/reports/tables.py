"""The tables about a rollout, as text cells, each limit beside its value. Pure; the caller escapes the cells.

Next: `flows/rollout/page.py` shows them as Markdown.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tuneship.gates.gate_types import GateReading, ThresholdReading
from tuneship.gates.record import Look

LOOKS_SHOWN = 40


class Table(NamedTuple):
    """A table as text; the rows whose numbers are in `stressed` are those to look at first."""

    titles: Sequence[str]
    rows: Sequence[Sequence[object]]
    stressed: frozenset[int] = frozenset()


def evidence_table(gates: Sequence[GateReading]) -> Table:
    """The gates that are on, in few columns: narrow enough for the approval form."""
    rows = [
        [
            f"{gate.name}: {gate.state}",
            share(gate.candidate_bad, gate.candidate_requests),
            share(gate.baseline_bad, gate.baseline_requests),
            _beside(_exp(gate.log_e_ok), _exp(gate.log_e_ok_limit)),
        ]
        for gate in gates
        if gate.state != "disabled"
    ]
    return Table(("gate", "candidate", "baseline", "E (limit)"), rows)


def gate_table(gates: Sequence[GateReading]) -> Table:
    """Every gate with its counts and its evidence."""
    rows: list[list[str]] = []
    for gate in gates:
        ratio = None
        if gate.candidate_share is not None and gate.baseline_share:
            ratio = gate.candidate_share / gate.baseline_share
        rows.append(
            [
                gate.name,
                gate.state,
                share(gate.candidate_bad, gate.candidate_requests),
                share(gate.baseline_bad, gate.baseline_requests),
                _beside(ratio, gate.ratio_limit),
                _beside(_exp(gate.log_e_harm), _exp(gate.log_e_harm_limit)),
                _beside(_exp(gate.log_e_ok), _exp(gate.log_e_ok_limit)),
                _beside(gate.z, gate.z_limit),
            ]
        )
    evidence = ("ratio (limit)", "harm: E (limit)", "proof: E (limit)", "z (limit)")
    return Table(("gate", "state", "candidate", "baseline", *evidence), rows)


def threshold_table(thresholds: Sequence[ThresholdReading]) -> Table:
    """Each plain threshold with the candidate's value; exceeded thresholds are stressed."""
    rows = [[one.name, _beside(one.value, one.limit), one.requests] for one in thresholds]
    above = frozenset(index for index, one in enumerate(thresholds) if one.is_above)
    return Table(("threshold", "candidate (limit)", "requests"), rows, above)


def look_table(looks: Sequence[Look]) -> Table:
    """The latest looks, and the number of earlier ones."""
    rows: list[list[object]] = []
    if len(looks) > LOOKS_SHOWN:
        rows.append(["...", "", "", f"{len(looks) - LOOKS_SHOWN} earlier checks", "", ""])
    for look in looks[-LOOKS_SHOWN:]:
        why = ", ".join(look.reasons) or look.reason
        weight, missing = f"{look.weight} %", look.missing or ""
        rows.append([look.number, weight, look.verdict, why, look.step_requests, missing])
    titles = ("check", "step", "verdict", "why", "requests at this step", "missing")
    return Table(titles, rows)


def share(bad: int, requests: int) -> str:
    """Bad requests of all, and in per cent; a dash without any request."""
    return f"{bad}/{requests} = {100 * bad / requests:.2f} %" if requests else "-"


def _exp(logarithm: float | None) -> float | None:
    """E from its logarithm; beyond a double's range it is shown as infinite."""
    if logarithm is None:
        return None
    return math.exp(logarithm) if logarithm < 700 else math.inf


def _beside(value: float | None, limit: float | None) -> str:
    if limit is None:
        return "-"
    return f"{'-' if value is None else f'{value:.3g}'} ({limit:.3g})"
