"""The remaining steps of a rendering, and the cost of reading, copying and writing values.

A step takes about 0.1 microseconds, three times as long at worst. Whatever is spent here is spent before it is done.
Next: `bounded_functions.py` (what filters, tests, methods and functions cost).
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from types import BuiltinMethodType, MethodType, NoneType
from typing import Any, cast

from jinja2 import TemplateError, Undefined
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Namespace  # pyright: ignore[reportPrivateUsage]

# The longest text that a template may write or make on the way; datasets have lines of 8 MiB.
MOST_CHARACTERS = 16 * 1024 * 1024
CHARACTERS_A_STEP = 8
MOST_ITEMS = 1024 * 1024
ITEMS_A_STEP = 4
# Texts of up to this many characters cost nothing beyond the code that handles them.
SHORT_TEXT = 100
# Levels of lists within lists: Python's own functions go down by recursion.
MOST_DEPTH = 100
MOST_BITS = 4096
# The most steps of reading one value: Python's own functions keep all other threads waiting meanwhile.
MOST_AT_ONCE = 2_100_000
# The largest number that says how wide a text will be, or how many parts something has.
MOST_NUMBER = 100_000
# The steps of a filter, a test, a call or a lookup, beside those of what it reads.
USE_STEPS = 10
LONG_NUMBER = re.compile(r"\d{6}")
# Values that cost nothing, whatever is done with them.
UNREAD = {int, float, bool, NoneType}
SETTLED = UNREAD | {str, list, dict, tuple}
# Python looks at the first ones faster.
MAPPINGS, SEQUENCES = (dict, Mapping), (list, tuple, Sequence)
OPERANDS = (int, float, Undefined)
# A width that stands in the values of a format.
GIVEN_WIDTH = re.compile(r"%[-+ #0-9.]*\*")


class RenderingTooLong(Exception):
    """A template would compute or write more than it may. The error text quotes no message."""


class NotAllowed(TemplateError):
    """A template uses a name that is not on the lists of allowed ones. The error text gives the name and no message."""


@dataclass(frozen=True)
class RenderLimits:
    """How much one rendering may compute and write."""

    steps: int
    characters: int


# One or two seconds.
ANYWHERE = RenderLimits(10_000_000, MOST_CHARACTERS)
# For a question of one word; what a template writes there is tokenized again and again.
PLAIN = RenderLimits(ANYWHERE.steps // 10, 100_000)


class _Budget(threading.local):
    """The steps that are left of the rendering in this thread."""

    steps = ANYWHERE.steps


budget = _Budget()


def spend(steps: int) -> None:
    budget.steps -= steps
    if budget.steps < 0:
        raise RenderingTooLong("it computes for too long")


def spend_text(characters: int) -> None:
    """Charge the steps of reading or writing a text."""
    if characters > MOST_CHARACTERS:
        raise RenderingTooLong("it makes a text that is too long")
    spend(characters // CHARACTERS_A_STEP)


def size_of(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def spend_list(value: Any, times: int = 1) -> Any:
    """Charge the steps of copying a list, but not of its items, which are shared; return the list."""
    size = size_of(value) * max(times, 0)
    if size > MOST_ITEMS:
        raise RenderingTooLong("it makes a list that is too long")
    spend(size // ITEMS_A_STEP)
    return value


def copied(value: Any, times: int = 1) -> Any:
    """Charge the steps of copying a text or a list; return it."""
    if not isinstance(value, str):
        return spend_list(value, times)
    spend_text(len(value) * max(times, 0))
    return value


def spend_value(value: Any, indentation: int = 0) -> int:
    """Charge the steps of reading a value, with each part counted as often as it occurs; return the steps.

    Its text has no more than eight characters for each of these. `indentation` is written before each part, once for
    each level.
    """
    if type(value) is str:
        if len(value) > SHORT_TEXT:
            spend_text(len(value))
        return len(value) // CHARACTERS_A_STEP + 1
    if type(value) in UNREAD and (type(value) is not int or value.bit_length() <= 64):
        return 4
    left, steps, characters = min(budget.steps, MOST_AT_ONCE), 0, 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        inner: Sequence[Any] = ()
        size = depth * indentation
        if isinstance(one, str):
            size += len(one)
        else:
            inner = _within(one)
        characters += size
        if characters > MOST_CHARACTERS:
            raise RenderingTooLong("it makes a text that is too long")
        steps += 8 * len(inner) + 1 + size // CHARACTERS_A_STEP
        if depth > MOST_DEPTH or steps > left:
            raise RenderingTooLong("it computes for too long")
        if inner and not isinstance(inner, range):
            depth += 1
            waiting += [(part, depth) for part in inner]
    spend(steps)
    return steps


Spends = Callable[..., object]


@dataclass(frozen=True)
class BoundedFunction:
    """A function that templates may call. They see no name that begins with an underscore."""

    _made: Callable[..., Any]
    _spends: Spends


# Values without parts that their texts would show.
LEAVES = (NoneType, Undefined, Iterator, Macro, BuiltinMethodType, MethodType, BoundedFunction)


def _within(value: Any) -> Sequence[Any]:
    """The parts of a value, which its text would show. Raises NotAllowed for one that has others out of sight."""
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise RenderingTooLong("it computes with a number that is too large")
        # A step for every sixteen bits.
        return range(value.bit_length() // 128)
    if isinstance(value, float):
        # Writing its digits takes two microseconds.
        return range(3)
    if isinstance(value, Namespace):
        value = vars(value)["_Namespace__attrs"]
    if isinstance(value, MAPPINGS):
        return list(chain.from_iterable(cast("Mapping[Any, Any]", value).items()))
    if isinstance(value, SEQUENCES):
        return value
    if isinstance(value, Set | MappingView):
        return list(cast("Iterable[Any]", value))
    if isinstance(value, LEAVES) and not isinstance(value, LoopContext):
        return ()
    raise NotAllowed(f"it reads a {type(value).__name__}, which is not for chat templates")


def spend_values(*values: Any, **more: Any) -> int:
    """Charge the steps of reading values; return the steps."""
    return sum(map(spend_value, (*values, *more.values()) if more else values))


def settled(value: Any) -> Any:
    """The value; a lazy sequence is turned into a list first, so that its items can be counted."""
    is_yet_to_come = isinstance(value, Iterator) and not isinstance(value, LoopContext)
    return list(cast("Iterator[Any]", value)) if is_yet_to_come else value


def seen(value: Any) -> Any:
    """Charge the steps of comparing or looking up a value; return the value."""
    kind = type(value)
    if kind not in UNREAD and (kind is not str or len(value) > SHORT_TEXT):
        value = settled(value)
        spend_value(value)
    return value


def is_in(value: Any, whole: Any) -> bool:
    return seen(value) in (whole if isinstance(whole, Mapping) else seen(whole))


def text_of(value: Any) -> str:
    """The text of a value, as jinja prints it."""
    if type(value) is str:
        return value
    spend_value(value)
    return str(value)


def concatenated(pieces: Iterable[str]) -> str:
    texts = pieces if isinstance(pieces, list) else list(pieces)
    spend_text(sum(map(len, texts)))
    return "".join(texts)


def joined(pieces: Iterable[Any]) -> str:
    return concatenated(list(map(text_of, pieces)))


def plus(left: Any, right: Any) -> Any:
    """Compute `left + right`, the most frequent operation."""
    if type(left) is not str or type(right) is not str:
        spend_operator("+", left, right)
    elif len(left) + len(right) > SHORT_TEXT:
        spend_text(len(left) + len(right))
    return left + right


def spend_operator(operator: str, left: Any, right: Any) -> None:
    """Charge the steps of `left operator right`. Raises TypeError for operators that templates do not use."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
        if bits > MOST_BITS:
            raise RenderingTooLong("it computes with a number that is too large")
    elif operator == "%" and isinstance(left, str):
        values: tuple[Any, ...] = cast("Any", right) if isinstance(right, tuple) else (right,)
        width = sum_of_numbers(*values) if GIVEN_WIDTH.search(left) else 0
        spend_text(longest_formatted(left, "%", values) + width)
    elif operator == "*":
        value, times = (left, right) if isinstance(right, int) else (right, left)
        copied(value, times if isinstance(times, int) else 0)
    elif operator == "+":
        copied(left)
        copied(right)
    elif not isinstance(left, OPERANDS) or not isinstance(right, OPERANDS):
        raise TypeError


def longest_formatted(form: str, mark: str, values: Any) -> int:
    """The maximum length of a format with these values, if each placeholder writes all of them. Raises
    RenderingTooLong.
    """
    spend(2 * len(form))
    if LONG_NUMBER.search(form):
        raise RenderingTooLong("it writes a text that is too wide")
    longest = (spend_value(values) + 1) * CHARACTERS_A_STEP
    widest = max((int(number[0]) for number in re.finditer(r"\d+", form)), default=0)
    return len(form) + form.count(mark) * (longest + widest)


def sum_of_numbers(*values: Any, **more: Any) -> int:
    """The sum of the numbers among arguments, which say how wide a text will be. Raises RenderingTooLong."""
    found = sum(abs(one) for one in (*values, *more.values()) if isinstance(one, int))
    if found > MOST_NUMBER:
        raise RenderingTooLong("it writes a text that is too wide")
    return found


def rendered(work: Callable[[], str], limits: RenderLimits) -> str:
    """The text that `work` renders. Raises RenderingTooLong."""
    budget.steps = limits.steps
    text = work()
    if len(text) > limits.characters:
        raise RenderingTooLong("it writes a text that is too long")
    return text
