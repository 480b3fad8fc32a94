"""The text of a completion while its tokens arrive: whole characters only, and nothing of a stop text.

Works token by token, so that the text and where it ends do not depend on how many tokens arrived together. Knows no
replica and no request; `generation_run.py` feeds it.
"""

from collections.abc import Callable, Sequence

# What a decoder writes for the bytes of a character that is not complete yet.
UNFINISHED = "\ufffd"


class Completion:
    """Takes tokens and returns the pieces of text that are certain; all pieces together are the completion."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """`decode` is the tokenizer's; the completion ends before the first of the texts in `stops`."""
        self._decode = decode
        self._stops = tuple(stops)
        self._longest_start = max((len(stop) - 1 for stop in self._stops), default=0)
        self._tokens: list[int] = []
        # The tokens of the last decoded piece are self._tokens[self._piece_start : self._piece_end].
        self._piece_start = self._piece_end = 0
        self._held_back = ""
        self._pieces: list[str] = []
        self.is_stopped = False
        """Whether a stop text has come; no text follows it."""

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return "".join(self._pieces)

    @property
    def tokens(self) -> int:
        """Number of tokens taken so far."""
        return len(self._tokens)

    def take(self, token: int) -> str:
        """Take the next token; return the text that is certain now, which may be empty."""
        self._tokens.append(token)
        before, after = self._decoded()
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return self._release("", is_last=False)
        self._piece_start, self._piece_end = self._piece_end, len(self._tokens)
        return self._release(after[len(before) :], is_last=False)

    def finish(self) -> str:
        """Return the text that was held back; no token follows."""
        if self.is_stopped:
            return ""
        before, after = self._decoded()
        return self._release(after[len(before) :], is_last=True)

    def _decoded(self) -> tuple[str, str]:
        """The text of the last piece, alone and with the tokens after it.

        These few tokens are decoded again each time, since some decoders treat the first token of a text differently.
        """
        before = self._decode(self._tokens[self._piece_start : self._piece_end])
        return before, self._decode(self._tokens[self._piece_start :])

    def _release(self, text: str, *, is_last: bool) -> str:
        """Return the text up to a stop text, or up to what may be the beginning of one."""
        held = self._held_back + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            piece, self._held_back = held[: min(places)], ""
        else:
            end = len(held)
            if not is_last:
                # Hold back the longest end of the text that a stop text may begin with.
                for size in range(min(self._longest_start, len(held)), 0, -1):
                    if any(stop.startswith(held[-size:]) for stop in self._stops):
                        end -= size
                        break
            piece, self._held_back = held[:end], held[end:]
        self._pieces.append(piece)
        return piece
