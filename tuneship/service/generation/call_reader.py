"""Reads the calls of functions out of an answer while it is written: pieces of text in, text and pieces of calls out.

The answer follows a grammar (`tool_grammar.py`), so each call is written exactly as the template writes it; an answer
that its limit or a stop text cuts ends anywhere. Knows no tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tuneship.contract.schemas.tools import WrittenCall, WrittenFunction
from tuneship.prompts.tool_syntax import NAME_CHARACTER, CallSyntax
from tuneship.store.database.identifiers import new_id


@dataclass
class ReadPiece:
    """The content of a piece of an answer: text outside of calls, and pieces of calls."""

    text: str = ""
    calls: list[WrittenCall] = field(default_factory=list[WrittenCall])


class CallReader:
    """Reads calls from one answer. `is_complete`: its last call has ended. `calls`: the calls begun so far."""

    def __init__(
        self, syntax: CallSyntax, *, is_text_before: bool = False, needs_call: bool = False
    ) -> None:
        """`is_text_before`: calls may follow free text; otherwise an answer begins with a call or has none.

        `needs_call`: it is calls, and nothing else.
        """
        self._syntax = syntax
        self._marker = syntax.marker if is_text_before else ""
        self._rest = ""
        self._piece = ReadPiece()
        self._read: Callable[[bool], bool] = self._text if self._marker else self._beginning
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        # The text outside of calls so far.
        self.text = ""
        self.calls: list[WrittenCall] = []
        self.is_complete = True
        if needs_call:
            self._begin_calls()

    def feed(self, text: str, *, is_last: bool = False) -> ReadPiece:
        """Take the next piece of the answer; return the parts that can no longer change."""
        self._rest += text
        self._piece = ReadPiece()
        while self._read(is_last):
            pass
        self.text += self._piece.text
        return self._piece

    def _text(self, is_last: bool) -> bool:
        """Read free text up to the marker of a call. Space before a marker is no part of the text, so space is held
        back.
        """
        place = self._rest.find(self._marker)
        if place >= 0:
            self._piece.text += self._rest[:place].rstrip()
            self._rest = self._rest[place:]
            self._begin_calls()
            return True
        end = len(self._rest)
        if not is_last:
            sizes = range(min(len(self._marker), end), 0, -1)
            end -= next((one for one in sizes if self._marker.startswith(self._rest[-one:])), 0)
            end = len(self._rest[:end].rstrip())
        self._piece.text += self._rest[:end]
        self._rest = self._rest[end:]
        return False

    def _beginning(self, is_last: bool) -> bool:
        """The first characters, which distinguish calls from text."""
        begin = self._syntax.begin
        if self._rest.startswith(begin):
            self._begin_calls()
            return True
        if not is_last and begin.startswith(self._rest):
            return False
        self._read = self._only_text
        return True

    def _only_text(self, is_last: bool) -> bool:  # noqa: ARG002 - all readers have it
        self._piece.text += self._rest
        self._rest = ""
        return False

    def _begin_calls(self) -> None:
        self.is_complete = False
        self._read = self._begin

    def _begin(self, is_last: bool) -> bool:  # noqa: ARG002 - all readers have it
        return self._skip(self._syntax.begin, self._name)

    def _name(self, is_last: bool) -> bool:  # noqa: ARG002 - all readers have it
        """Read a function's name, which is reported only when complete."""
        size = 0
        while size < len(self._rest) and NAME_CHARACTER.match(self._rest[size]):
            size += 1
        if size == len(self._rest):
            return False
        function = WrittenFunction(name=self._rest[:size], arguments="")
        call = WrittenCall(
            index=len(self.calls), id=new_id("call"), type="function", function=function
        )
        self.calls.append(call.model_copy(update={"index": None}))
        self._piece.calls.append(call)
        self._rest = self._rest[size:]
        self._read = self._middle
        return True

    def _middle(self, is_last: bool) -> bool:  # noqa: ARG002 - all readers have it
        self._depth, self._is_in_string, self._is_escaped = 0, False, False
        return self._skip(self._syntax.middle, self._arguments)

    def _arguments(self, is_last: bool) -> bool:  # noqa: ARG002 - all readers have it
        """The characters of a JSON object, up to its last brace."""
        size = self._size_of_object()
        if not size:
            return False
        number, piece = len(self.calls) - 1, self._rest[:size]
        self._rest = self._rest[size:]
        function = self.calls[-1].function
        longer = function.model_copy(update={"arguments": function.arguments + piece})
        self.calls[-1] = self.calls[-1].model_copy(update={"function": longer})
        self._piece.calls.append(
            WrittenCall(index=number, function=WrittenFunction(arguments=piece))
        )
        if self._depth:
            return False
        self._read = self._behind
        return True

    def _size_of_object(self) -> int:
        """The number of waiting characters that belong to the object."""
        for place, character in enumerate(self._rest):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = character == "\\"
                self._is_in_string = character != '"'
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(self._rest)

    def _behind(self, is_last: bool) -> bool:
        """Read the text after a call, which leads to another call or ends the answer."""
        between, end = self._syntax.between, self._syntax.end
        self.is_complete = self._rest == end
        if between and self._rest.startswith(between):
            return self._skip(between, self._name)
        if is_last:
            self._rest = ""
        return False

    def _skip(self, text: str, following: Callable[[bool], bool]) -> bool:
        """Continue after an expected text, once it is complete."""
        if not self._rest.startswith(text):
            return False
        self._rest = self._rest[len(text) :]
        self._read = following
        return True
