"""Regular expressions of callers, which must cost neither much time nor much memory."""

import math

import regex

# A pattern's time for one answer, which the library counts of the processor. `re` knows no such limit.
SECONDS = 0.1
# Elements of a pattern with its repeats written out, as the compiler writes them: 300 bytes each.
MAXIMUM_ELEMENTS = 10_000
# The compiler writes out the least number of repeats. That of a group counts for all that the pattern has.
_REPEAT = regex.compile(r"(\)?)\{\s*(\d{1,9})")
# In these the place of a repeat does not show (flag x), or a search takes all memory in its time (recursion).
_REFUSED = regex.compile(r"\(\?(?:[a-wyzA-Z0-9-]*x|R|\d|&|P>|P&)")


class PatternUnusable(Exception):
    """A pattern cannot be used. The message quotes nothing of it."""


def compiled(pattern: str) -> regex.Pattern[str]:
    """Compile a pattern. Raises `PatternUnusable`."""
    if _REFUSED.search(pattern):
        raise PatternUnusable("must have neither the flag x nor recursion")
    if elements_of(pattern) > MAXIMUM_ELEMENTS:
        raise PatternUnusable(f"has more than {MAXIMUM_ELEMENTS} elements with all repeats written")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError):
        raise PatternUnusable("is no regular expression") from None


def elements_of(pattern: str) -> int:
    """An upper bound of the number of elements that a pattern has with its repeats written out."""
    repeats = [(bool(found[1]), int(found[2])) for found in _REPEAT.finditer(pattern)]
    of_groups = math.prod(max(number, 1) for is_group, number in repeats if is_group)
    return of_groups * (len(pattern) + sum(number for is_group, number in repeats if not is_group))
