"""The text of a completion while its tokens arrive: whole characters only, and nothing of a stop text.

It is decoded as a continuation of the prompt, and what the chat template puts around the content of a turn is left out.

Works token by token, so that the text and where it ends do not depend on how many tokens arrived together. Knows no
replica and no request; `generation_run.py` feeds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What a decoder writes for the bytes of a character that is not complete yet.
UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class AnswerCut:
    """How to cut an answer's text out of the model's output."""

    # The last tokens of the prompt: decoders treat the first token of a text differently.
    before: Sequence[int] = ()
    # Text that the model writes before the content of an answer; it is left out.
    lead: str = ""
    # Text that it writes between the content and the end of its turn; it is left out where the turn has ended.
    pad: str = ""
    # The completion ends before the first of these texts.
    stops: Sequence[str] = ()


class Completion:
    """Takes tokens and returns the pieces of text that are certain; all pieces together are the completion."""

    def __init__(self, decode: Callable[[list[int]], str], cut: AnswerCut) -> None:
        """`decode`: the tokenizer's function."""
        self._decode = decode
        self._cut = cut
        held_back = [len(stop) - 1 for stop in cut.stops]
        self._longest_start = max(*held_back, len(cut.pad), 0) if held_back else len(cut.pad)
        self._tokens: list[int] = list(cut.before)
        # The tokens of the last decoded piece are self._tokens[self._piece_start : self._piece_end].
        self._piece_start, self._piece_end = 0, len(self._tokens)
        self._held_back: str = ""
        self._is_lead_over = not cut.lead
        self._pieces: list[str] = []
        # Whether a stop text has come; no text follows it.
        self.is_stopped = False
        # Number of characters of the lead that were left out.
        self.left_out = 0

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return "".join(self._pieces)

    @property
    def tokens(self) -> int:
        """Number of tokens taken so far."""
        return len(self._tokens) - len(self._cut.before)

    def take(self, token: int) -> str:
        """Take the next token; return the text that is certain now, which may be empty."""
        self._tokens.append(token)
        before, after = self._decoded()
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return self._release("", is_last=False)
        self._piece_start, self._piece_end = self._piece_end, len(self._tokens)
        return self._release(after[len(before) :], is_last=False)

    def finish(self, *, has_ended: bool = False) -> str:
        """Return the text that was held back; no token follows. `has_ended`: the model has ended its turn."""
        if self.is_stopped:
            return ""
        before, after = self._decoded()
        pad = self._cut.pad if has_ended else ""
        return self._release(after[len(before) :], is_last=True, pad=pad)

    def _decoded(self) -> tuple[str, str]:
        """The text of the last piece, alone and followed by the next tokens.

        These few tokens are decoded again each time, since some decoders treat the first token of a text differently.
        """
        before = self._decode(self._tokens[self._piece_start : self._piece_end])
        return before, self._decode(self._tokens[self._piece_start :])

    def _release(self, text: str, *, is_last: bool, pad: str = "") -> str:
        """Return the text up to a stop text, or up to the possible beginning of one."""
        held = self._without_lead(self._held_back + text, is_last=is_last)
        if held is None:
            self._held_back += text
            return ""
        places = [place for stop in self._cut.stops if (place := held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            piece, self._held_back = held[: min(places)], ""
        elif is_last:
            piece, self._held_back = held.removesuffix(pad), ""
        else:
            end = len(held) - self._uncertain(held)
            piece, self._held_back = held[:end], held[end:]
        self._pieces.append(piece)
        return piece

    def _without_lead(self, held: str, *, is_last: bool) -> str | None:
        """The text after the lead; None while the text may still be part of the lead."""
        lead = self._cut.lead
        if self._is_lead_over:
            return held
        if len(held) < len(lead) and lead.startswith(held) and not is_last:
            return None
        self._is_lead_over = True
        self.left_out = len(lead) if held.startswith(lead) else 0
        return held[self.left_out :]

    def _uncertain(self, held: str) -> int:
        """The length of the longest end of the text that a stop text, or the pad, may begin with."""
        beginnings = (*self._cut.stops, self._cut.pad)
        for size in range(min(self._longest_start, len(held)), 0, -1):
            if any(one.startswith(held[-size:]) for one in beginnings):
                return size
        return 0
