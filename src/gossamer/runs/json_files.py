"""The files of a run folder, read without trusting them.

A run may have been killed while it wrote a line, copied partly or written by another version.
Whatever cannot be read becomes a sentence in `missing`, never an error.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gossamer.runs.result import Row

# No quantity of a run is larger, and its square is still finite.
_LARGEST = 1e100
_LARGEST_FILE = 200_000_000


def read_file(path: Path, where: str, missing: list[str]) -> bytes | None:
    """The content of a file; None if it does not exist or, with a reason, cannot be read."""
    try:
        kept = path.stat()
        # A device or a pipe in the place of a file may never end.
        if stat.S_ISREG(kept.st_mode) and kept.st_size <= _LARGEST_FILE:
            return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        missing.append(f"{where} was left out: it cannot be read ({error.strerror}).")
        return None
    why = "is too large" if stat.S_ISREG(kept.st_mode) else "is no ordinary file"
    missing.append(f"{where} was left out: it {why}.")
    return None


def read_object(path: Path, where: str, missing: list[str]) -> Row | None:
    """The JSON object of a file; None, with the reason in `missing`, if there is none."""
    raw = read_file(path, where, missing)
    if raw is None:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        missing.append(f"{where} is damaged and was left out: it is not valid JSON.")
        return None
    if not isinstance(found, dict):
        missing.append(f"{where} was left out: it holds no JSON object.")
        return None
    return cast(Row, found)


def read_lines(path: Path, where: str, missing: list[str]) -> list[Row]:
    """The JSON objects of a file of lines; `missing` says how many lines cannot be read."""
    raw = read_file(path, where, missing)
    if raw is None:
        return []
    lines = raw.split(b"\n")
    half = lines.pop()
    rows: list[Row] = []
    bad: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            rows.append(cast(Row, found))
        elif line.strip():
            bad.append(number)
    if bad:
        count = "1 line" if len(bad) == 1 else f"{len(bad)} lines"
        missing.append(f"{count} of {where} cannot be read (line {bad[0]} first); left out.")
    if half.strip():
        missing.append(f"The last line of {where} is half-written; left out.")
    return rows


def number(value: object) -> float | None:
    """A finite number of reasonable size; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST <= value <= _LARGEST else None


def count(value: object) -> int | None:
    """An integer; None for anything else."""
    found = number(value)
    return None if found is None or found != int(found) else int(found)


def numbers(value: object) -> list[float]:
    """A list of finite numbers; empty for anything else."""
    if not isinstance(value, list):
        return []
    found = [number(one) for one in cast(list[object], value)]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def members(value: object) -> Row:
    """The members of an object; empty for anything else."""
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}


def objects(value: object) -> list[Row]:
    """The objects in a list; empty for anything else."""
    if not isinstance(value, list):
        return []
    return [members(one) for one in cast(list[object], value) if isinstance(one, Mapping)]


def text(value: object) -> str:
    """A text; empty for anything else."""
    return value if isinstance(value, str) else ""


def texts(value: object) -> list[str]:
    """The texts in a list; empty for anything else."""
    if not isinstance(value, list):
        return []
    return [one for one in cast(list[object], value) if isinstance(one, str)]
