"""Lines out of streams: whole, in order, nothing lost but what was drawn over."""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.real.launch.console import ConsoleOutput, Lines


def lines_of(*pieces: bytes, clock: float = 0.0) -> list[str]:
    found: list[str] = []
    lines = Lines(found.append, clock=lambda: clock)
    for piece in pieces:
        lines.feed(piece)
    lines.close()
    return found


@given(st.text(alphabet="aä→\n", max_size=60), st.lists(st.integers(0, 120), max_size=6))
def test_lines_do_not_depend_on_how_the_bytes_come(text: str, cuts: list[int]) -> None:
    """Also where a cut goes through a character; a last line without an end counts."""
    data = text.encode()
    at = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(at)]
    assert lines_of(*pieces) == text.removesuffix("\n").split("\n") * bool(text)


@given(st.text(alphabet="ab\r\n", max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_carriage_returns_do_not_depend_on_it_either(text: str, cuts: list[int]) -> None:
    data = text.encode()
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(at)]
    assert lines_of(*pieces) == lines_of(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\r 1%\r 2%\r 3%\n", [" 1%", " 3%"]),
        (b"1%\r2%\r3%\r", ["1%", "3%"]),
        (b"\n\nx", ["", "", "x"]),
        (b"\xff\xfe\n", ["��"]),
        (b"x" * 70_000, ["x" * 70_000]),
        (b"", []),
    ],
)
def test_what_is_drawn_over_is_shown_once_and_what_stays_always(
    data: bytes, expected: list[str]
) -> None:
    """The clock stands still here, so of many redrawings within a second one is shown."""
    assert lines_of(data) == expected


def test_a_progress_bar_is_shown_once_a_second() -> None:
    now, found = [0.0], list[str]()
    lines = Lines(found.append, clock=lambda: now[0])
    for quarter in range(12):
        now[0] = quarter / 4
        lines.feed(b"\r%d" % quarter)
    lines.feed(b"\n")
    assert found == ["0", "4", "8", "11"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_labels_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where NO_COLOR says so."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown: list[str] = []
    for stream, plain in ((Terminal(), ""), (io.StringIO(), ""), (Terminal(), "1")):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("NO_COLOR", plain)
        output = ConsoleOutput("labelled", None, range(2))
        output.feed(1, False, b"text\n")
        shown.append(stream.getvalue())
    assert shown == ["\x1b[32m[1]\x1b[0m text\n", "[1] text\n", "[1] text\n"]


def test_last_words_are_the_traceback_or_the_last_lines(tmp_path: Path) -> None:
    """Whatever was printed before, and although nobody saw it."""
    output = ConsoleOutput("folder", tmp_path, range(2))
    output.feed(0, True, b"noise\nTraceback (most recent call last):\n  File x\nValueError: y\n")
    output.feed(1, True, b"".join(b"%d\n" % number for number in range(50)))
    assert output.last_words(0) == [
        "Traceback (most recent call last):",
        "  File x",
        "ValueError: y",
    ]
    assert output.last_words(1) == [str(number) for number in range(40, 50)]
    output.close()


HANDLED = "Traceback (most recent call last):\n  File a\nOSError: tried again\n"
REASON = "Traceback (most recent call last):\n  File b\nKeyError: 1\n"
CHAINED = [
    "\nDuring handling of the above exception, another exception occurred:\n\n",
    "\nThe above exception was the direct cause of the following exception:\n\n",
]
FATAL = "Traceback (most recent call last):\n  File c\nValueError: y\n"
IGNORED = (
    "Exception ignored in atexit callback: <x>\nTraceback (most recent call last):\n  File d\n"
)


@pytest.mark.parametrize(
    ("before", "last"),
    [
        (HANDLED, FATAL),
        (HANDLED + "noise\n", REASON + CHAINED[0] + FATAL),
        (HANDLED, REASON + CHAINED[0] + REASON + CHAINED[1] + FATAL),
        (HANDLED, FATAL + IGNORED),
        (CHAINED[0], FATAL),
        ("", IGNORED.partition("\n")[2]),
    ],
)
def test_last_words_begin_with_the_traceback_that_came_last(
    tmp_path: Path, before: str, last: str
) -> None:
    """All of it, with the errors that led to it; not with one that was handled before, nor with
    one that Python ignored while it ended."""
    output = ConsoleOutput("folder", tmp_path, range(1))
    output.feed(0, True, (before + last).encode())
    assert output.last_words(0) == last.splitlines()
    output.close()
