"""What the store says is checked before it is believed: under torchrun anybody can write there."""

from __future__ import annotations

from gossamer.errors import Error


def broken_value(key: str, got: str, expected: str) -> Error:
    """The sentence about a value that no worker of this run has written."""
    shown = got if len(got) <= 60 else f"{got[:60]}..."
    return Error(
        f"the store holds {shown!r} under {key!r} where {expected} was expected, so another program"
        " writes there; start the run again, where others cannot reach its store"
    )


def number_from(key: str, text: str, below: int | None = None) -> int:
    """A whole number from 0 on, as one worker has told it to the others."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    if not is_number or (below is not None and int(text) >= below):
        limit = "" if below is None else f" below {below}"
        raise broken_value(key, text, f"a number{limit}")
    return int(text)


def numbers_from(key: str, text: str, separator: str, below: int | None = None) -> list[int]:
    """Several, at least one."""
    return [number_from(key, part, below) for part in text.split(separator)]
