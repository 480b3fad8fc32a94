"""The last number of a text, with separators of thousands and percent signs understood."""

import math
import re
from dataclasses import dataclass

# Spaces that do not break, thin spaces and apostrophes separate thousands; a usual space separates numbers.
_NUMBER = re.compile(
    r"(?:(?<![\w.,])[-+\u2212])?\d+(?:[.,'\u2019\u00a0\u2009\u202f]\d+)*(?:[eE][-+]?\d{1,3}(?!\w))?(?:[\s\u00a0\u202f]?%)?",
    re.ASCII,
)
_NO_SEPARATOR = str.maketrans("", "", "'\u2019\u00a0\u2009\u202f")
# Two ways to write a number, such as 59.3 % and 0.593, differ by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TextNumber:
    """A number, and whether a percent sign follows it."""

    value: float
    is_percent: bool


def last_number(text: str) -> TextNumber | None:
    """The last number of a text, None where there is none."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - only the last one counts
        pass
    if found is None:
        return None
    written = found[0].replace("\u2212", "-")
    is_percent = written.endswith("%")
    return TextNumber(float(_plain(written.rstrip("%").strip())), is_percent)


def _plain(written: str) -> str:
    """The number as Python writes it."""
    written = written.translate(_NO_SEPARATOR)
    digits, exponent = re.match(r"([^eE]*)(.*)", written, re.DOTALL).groups()  # type: ignore[union-attr]
    decimal = max(digits.rfind("."), digits.rfind(","))
    if decimal < 0:
        return written
    mark, whole, rest = digits[decimal], digits[:decimal], digits[decimal + 1 :]
    is_repeated = digits.count(mark) > 1
    groups = re.split("[.,]", digits)[1:]
    if is_repeated and any(len(group) != 3 for group in groups):
        return groups[-1] + exponent  # of a date, a version or a list
    # 1,234 has a thousand; 0,234 and 12345,678 have decimals.
    is_group = mark == "," and len(rest) == 3 and re.fullmatch(r"[-+]?[1-9]\d{0,2}", whole)
    whole = whole.replace(".", "").replace(",", "")
    return f"{whole}{'' if is_repeated or is_group else '.'}{rest}{exponent}"


def are_close(one: TextNumber, wanted: TextNumber, tolerance: float, relative: float) -> bool:
    """Whether a number is the wanted one; where only one has a percent sign, 45 and 0.45 both are 45 %."""
    pairs = [(one.value, wanted.value)]
    if one.is_percent and not wanted.is_percent:
        pairs.append((one.value / 100.0, wanted.value))
    elif wanted.is_percent and not one.is_percent:
        pairs.append((one.value, wanted.value / 100.0))
    return any(
        a == b
        or math.isclose(a, b, rel_tol=_ROUNDING)
        or abs(a - b) <= max(tolerance, relative * abs(b))
        for a, b in pairs
    )
