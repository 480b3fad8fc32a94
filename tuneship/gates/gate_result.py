"""The result of one training gate."""

from dataclasses import dataclass
from typing import Literal

State = Literal["pass", "reject", "hold", "warn", "note", "not_available", "disabled"]


@dataclass(frozen=True)
class GateResult:
    """The result of one gate: its state, its value beside its limit, and a note."""

    name: str
    state: State
    value: float | None = None
    limit: float | None = None
    note: str = ""
