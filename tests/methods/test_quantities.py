"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from gossamer.quantities import counted


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (1, ("worker",), "1 worker"),
        (1.0, ("epoch",), "1 epoch"),
        (0, ("seed",), "0 seeds"),
        (0.5, ("epoch",), "0.5 epochs"),
        (2, ("process", "processes"), "2 processes"),
        (1, ("process", "processes"), "1 process"),
        (20_000_000, ("update",), "20000000 updates"),
    ],
)
def test_only_one_is_singular(count: float, words: tuple[str, ...], said: str) -> None:
    """One of a thing has no s; whole numbers keep all their digits."""
    assert counted(count, *words) == said
