"""The text of a completion as its tokens come: whole characters only, and nothing of a stop text.

Goes token by token, so that the text and where it ends do not depend on how many tokens arrived together. Knows no
replica and no request; `handlers.py` feeds it.
"""

from collections.abc import Callable, Sequence

# What a decoder writes for the bytes of a character that is not whole yet.
UNFINISHED = "\ufffd"


class Completion:
    """Takes tokens, gives pieces of text that are certain; all pieces together are the completion."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """`decode` is the tokenizer's; the completion ends before the first text of `stops`."""
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._begin = self._settled = 0
        self._held = ""
        self._given: list[str] = []
        self.is_stopped = False
        """A stop text has come; nothing follows."""

    @property
    def text(self) -> str:
        """What was given so far."""
        return "".join(self._given)

    @property
    def tokens(self) -> int:
        """How many were taken."""
        return len(self._tokens)

    def take(self, token: int) -> str:
        """The next token; what is certain now, maybe nothing."""
        self._tokens.append(token)
        return self._give(self._unfolded(), is_last=False)

    def finish(self) -> str:
        """No token follows: what was held back."""
        if self.is_stopped:
            return ""
        before, after = self._around()
        return self._give(after[len(before) :], is_last=True)

    def _around(self) -> tuple[str, str]:
        """The text of the last whole piece, alone and with what came after it.

        A few tokens are decoded again each time, since some decoders treat the first token of a text in another way.
        """
        before = self._decode(self._tokens[self._begin : self._settled])
        return before, self._decode(self._tokens[self._begin :])

    def _unfolded(self) -> str:
        before, after = self._around()
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return ""
        self._begin, self._settled = self._settled, len(self._tokens)
        return after[len(before) :]

    def _give(self, text: str, *, is_last: bool) -> str:
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            given, self._held = self._held[: min(places)], ""
        else:
            kept = len(self._held) - (0 if is_last else self._begun())
            given, self._held = self._held[:kept], self._held[kept:]
        self._given.append(given)
        return given

    def _begun(self) -> int:
        """Length of the longest end of the held text that may be the beginning of a stop text."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        return next(
            (
                size
                for size in range(min(longest, len(self._held)), 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )
