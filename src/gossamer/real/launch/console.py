"""The output of the workers: whole lines, each with the label of its worker."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO

OUTPUTS = ("labelled", "rank0", "folder")
_ENDS = re.compile(rb"(\r\n|\n|\r)")
_LONGEST = 1 << 16
_KEPT = 80
_SHOWN_WITHOUT_TRACEBACK = 10
_TRACEBACK = "Traceback (most recent call last)"
_NOT_THE_FIRST = ("During handling of the above", "The above exception was", "Exception ignored")
"""The line above a traceback that continues another one, or that did not end the worker."""
_COLOURS = 6
# A progress bar redraws its line many times a second; one line a second is enough.
_REDRAW_S = 1.0


class Lines:
    """The bytes of a stream as whole lines.

    Text that a carriage return overwrites is shown at most once a second. The text at the end of a
    line is always shown.
    """

    def __init__(
        self, emit: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._partial = b""
        self._redrawn = float("-inf")

    def feed(self, data: bytes) -> None:
        whole = self._partial + data
        # A carriage return at the very end may be the first half of "\r\n".
        held = whole[-1:] if whole.endswith(b"\r") else b""
        pieces = _ENDS.split(whole.removesuffix(held))
        self._partial = pieces.pop() + held
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            if end != b"\r":
                self._show(text)
            elif text.strip() and self._clock() - self._redrawn >= _REDRAW_S:
                self._redrawn = self._clock()
                self._show(text)
        if len(self._partial) > _LONGEST:
            self.close()

    def close(self) -> None:
        """Show the line that has no end yet."""
        text, self._partial = self._partial.rstrip(b"\r"), b""
        if text:
            self._show(text)

    def _show(self, text: bytes) -> None:
        self._emit(text.decode("utf-8", "replace"))


class ConsoleOutput:
    """Shows the lines of all workers with labels or those of rank 0, or writes them into files."""

    def __init__(self, mode: str, folder: Path | None, ranks: Iterable[int]) -> None:
        self._mode = mode
        self._folder = folder
        self._files: dict[tuple[int, bool], IO[bytes]] = {}
        ranks = list(ranks)
        self._last = {rank: deque[str](maxlen=_KEPT) for rank in ranks}
        self._lines = {
            (rank, is_error): Lines(partial(self._line, rank, is_error))
            for rank in ranks
            for is_error in (False, True)
        }

    def feed(self, rank: int, is_error: bool, data: bytes) -> None:
        if self._mode == "folder":
            self._file(rank, is_error).write(data)
        self._lines[rank, is_error].feed(data)

    def end(self, rank: int, is_error: bool) -> None:
        """Nothing more comes from that stream."""
        self._lines[rank, is_error].close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def shows(self, rank: int) -> bool:
        """Whether the user sees the output of this worker."""
        return self._mode == "labelled" or (self._mode == "rank0" and rank == 0)

    def last_words(self, rank: int) -> list[str]:
        """Return the last traceback of a worker, or its last lines on standard error."""
        lines = list(self._last[rank])
        first, above = -_SHOWN_WITHOUT_TRACEBACK, ""
        for number, line in enumerate(lines):
            if line.startswith(_TRACEBACK) and (first < 0 or not above.startswith(_NOT_THE_FIRST)):
                first = number
            above = line.strip() or above
        return lines[first:]

    def _line(self, rank: int, is_error: bool, text: str) -> None:
        if is_error:
            self._last[rank].append(text)
        if self.shows(rank):
            stream = sys.stderr if is_error else sys.stdout
            label = "" if self._mode == "rank0" else f"{_label(rank, stream)} "
            put(stream, f"{label}{text}\n")

    def _file(self, rank: int, is_error: bool) -> IO[bytes]:
        key = (rank, is_error)
        if key not in self._files:
            assert self._folder is not None
            name = f"worker-{rank}.{'err' if is_error else 'out'}"
            self._files[key] = (self._folder / name).open("wb", buffering=0)
        return self._files[key]


def say(sentence: str) -> None:
    """Print a sentence of the launcher itself."""
    put(sys.stderr, f"gossamer: {sentence}\n")


def put(stream: IO[str], text: str) -> None:
    """Write text at once and in one piece; replace characters that the stream lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def _label(rank: int, stream: IO[str]) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return f"[{rank}]"
    return f"\x1b[3{1 + rank % _COLOURS}m[{rank}]\x1b[0m"
