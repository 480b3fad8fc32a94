"""A pseudo-terminal with a program on it, and the screen that its output makes."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.waiting import PATIENCE_S

ESCAPES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\")
_STEP = re.compile(rf"{ESCAPES.pattern}|[\r\n]|[^\x1b\r\n]+")


class TerminalOf:
    """A program that runs on a terminal, and all that it has shown."""

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        *,
        columns: int = 80,
        output: IO[bytes] | None = None,
    ) -> None:
        """`output`: where its standard output goes instead, as in `tuneship ... > file`."""
        own, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        kept = {name: value for name, value in environment.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            command,
            env={"TERM": "xterm", **kept, "COLUMNS": str(columns)},
            stdin=its,
            stdout=its if output is None else output,
            stderr=its,
        )
        os.close(its)
        self.shown = ""
        self._own = own
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                rest += os.read(self._own, 1 << 16)
            except OSError:  # the other side is closed
                return
            # A character of several bytes may come in two pieces.
            text = rest.decode(errors="ignore")
            rest = rest[len(text.encode()) :]
            self.shown += text

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        os.close(self._own)
        return code

    @property
    def text(self) -> str:
        """Everything that was ever shown, without what moves the cursor."""
        return ESCAPES.sub("", self.shown).replace("\r\n", "\n")

    @property
    def screen(self) -> list[str]:
        """The lines as they stand in the end, with those that have scrolled out."""
        return screen_of(self.shown)


def screen_of(shown: str) -> list[str]:
    """The lines that remain of an output after all moves of the cursor that rich makes."""
    lines, row, column = [""], 0, 0
    top = 0
    for step in _STEP.finditer(shown):
        text, count, move = step[0], step[1], step[2]
        if text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            column = 0
        elif move == "A":
            row = max(top, row - int(count or 1))
        elif move == "K":
            lines[row] = ""
        elif move == "J":
            # What was there has scrolled out: a screen begins below it.
            top = row = len(lines)
            lines.append("")
        elif move == "H":
            row, column = top, 0
        elif move is None and not text.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]
