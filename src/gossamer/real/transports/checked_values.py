"""Values of the store are checked before use, because under torchrun anybody can write there."""

from __future__ import annotations

from gossamer.errors import Error


def broken_value(key: str, got: str, expected: str) -> Error:
    """Return the error for a value that no worker of this run can have written."""
    shown = got if len(got) <= 60 else f"{got[:60]}..."
    return Error(
        f"the store holds {shown!r} under {key!r} where {expected} was expected, so another program"
        " writes there; start the run again, where others cannot reach its store"
    )


def number_from(key: str, text: str, below: int | None = None) -> int:
    """Return the whole number of at least 0 that the text must be."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    if not is_number or (below is not None and int(text) >= below):
        limit = "" if below is None else f" below {below}"
        raise broken_value(key, text, f"a number{limit}")
    return int(text)


def numbers_from(key: str, text: str, separator: str, below: int | None = None) -> list[int]:
    """Return the numbers of a text, of which there is at least one."""
    return [number_from(key, part, below) for part in text.split(separator)]
