"""Keeps the log small when callers make the service log the same line thousands of times."""

import logging
from collections import Counter

from tuneship.contract.common import count


class LogBudget(logging.Filter):
    """Lets a number of lines of each kind through between two reports; a report counts those held back."""

    def __init__(self, lines: int) -> None:
        """`lines`: the number for each kind, which is the first line of a text before its arguments are filled in."""
        super().__init__()
        self._most = lines
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is among the first of its kind since the last report."""
        kind = str(record.msg).partition("\n")[0]  # asyncio adds lines with addresses of objects
        self._seen[kind] += 1
        return self._seen[kind] <= self._most

    def report(self, logger: logging.Logger) -> None:
        """Log how many lines were held back since the last report, if there were any."""
        seen, self._seen = self._seen, Counter()
        for kind, number in seen.items():
            if number > self._most:
                text = "left out %s of this kind: %s"
                logger.warning(text, count(number - self._most, "more line"), kind)
