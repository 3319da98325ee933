"""A terminal for a worker whose launcher has one.

Workers write into pipes and read nothing, but scripts ask for the terminal's size, by
`os.get_terminal_size()` or `stty size`, and die where there is none.
"""

from __future__ import annotations

import os
import shutil
import termios
from dataclasses import dataclass


@dataclass(frozen=True)
class Terminal:
    """Which of a worker's streams are terminals, and how large."""

    is_input: bool
    is_output: bool
    lines: int
    columns: int

    @staticmethod
    def own() -> Terminal | None:
        """As this process has it; None without one."""
        is_input, is_output = os.isatty(0), os.isatty(1)
        size = shutil.get_terminal_size()
        if not is_input and not is_output:
            return None
        return Terminal(is_input, is_output, size.lines, size.columns)

    def open(self) -> tuple[int, int]:
        """The launcher's side and the worker's. What is written comes through as it is, and who
        reads is at the end at once, as in /dev/null."""
        outer, inner = os.openpty()
        modes = termios.tcgetattr(inner)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        modes[6][termios.VMIN] = modes[6][termios.VTIME] = 0
        termios.tcsetattr(inner, termios.TCSANOW, modes)
        termios.tcsetwinsize(inner, (self.lines, self.columns))
        return outer, inner
