"""Continues a sum over buckets from where the look before ended, so that a long rollout's looks stay cheap.

A memory and nothing else: what is remembered is used only for buckets that are equal, so that a restart or a replay
gives the same numbers bit by bit.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

# A look changes the newest buckets where requests still hang, so a few states back are kept.
_STATES_KEPT, _FOLDS_KEPT = 32, 512
_S = TypeVar("_S")
_T = TypeVar("_T")
_folds: dict[Hashable, tuple[list[Any], list[Any]]] = {}


def fold(key: Hashable, items: Sequence[_T], start: _S, step: Callable[[_S, _T], _S]) -> _S:
    """Reduce `items` by `step`. `key` names the fold and all that `step` depends on."""
    return _states(key, items, start, step, _STATES_KEPT)[-1]


def scan(key: Hashable, items: Sequence[_T], start: _S, step: Callable[[_S, _T], _S]) -> list[_S]:
    """The state after each of the items, the first of them first."""
    return _states(key, items, start, step, None)[1:]


def _states(
    key: Hashable,
    items: Sequence[_T],
    start: _S,
    step: Callable[[_S, _T], _S],
    kept: int | None,
) -> list[_S]:
    seen, states = _folds.get(key, ([], [start]))
    new = list(items)
    same = len(seen)
    if seen != new[:same]:
        pairs = zip(seen, new, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(seen), len(new)))
    # The states are those after the newest items seen; without one for this place, all begins again.
    back = len(seen) - same
    states, same = (states[: len(states) - back], same) if back < len(states) else ([start], 0)
    for item in new[same:]:
        states.append(step(states[-1], item))
    if kept:
        states = states[-kept:]
    if len(_folds) >= _FOLDS_KEPT:
        _folds.clear()
    _folds[key] = new, states
    return states
