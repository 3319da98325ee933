"""The command line as a user meets it, without the two seconds that a new process takes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.commands.cli import main
from gossamer.commands.console import out as console


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of standard output: with --json nothing else goes there."""
        assert self.out.count("\n") == 1, self.out
        return strict(self.out)


def strict(text: str) -> Any:
    """JSON as its standard has it: NaN and infinity are errors."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def gossamer(*arguments: str) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["gossamer", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        return Said(int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
        console.stderr = False  # as --json left it
    raise AssertionError("a command ends with a status")


def numbers_in(value: Any) -> list[float]:
    """Every number of a JSON value."""
    if isinstance(value, Mapping):
        return [number for member in value.values() for number in numbers_in(member)]
    if isinstance(value, list):
        return [number for member in value for number in numbers_in(member)]
    return [value] if isinstance(value, int | float) else []
