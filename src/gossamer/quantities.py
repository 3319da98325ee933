"""Times and bandwidths as people write them: 50us, 2.5s, 10Gbit, 1.25GB."""

from __future__ import annotations

import re

from gossamer.errors import ConfigurationError

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"bit": 0.125, "B": 1.0}
_PREFIX = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)"


def seconds(text: str | float, where: str) -> float:
    """A duration: a plain number is seconds."""
    if not isinstance(text, str):
        value = float(text)
    else:
        match = re.fullmatch(_NUMBER + r"\s*(ns|us|ms|s|m|h)?", text.strip())
        if match is None:
            raise ConfigurationError(
                f"{where} must be a time such as 50us, 10ms or 2.5s, got {text!r}"
            )
        value = float(match[1]) * _SECONDS[match[2] or "s"]
    if value < 0:
        raise ConfigurationError(f"{where} must not be negative, got {text!r}")
    return value


def bytes_per_second(text: str | float, where: str) -> float:
    """A bandwidth: bits with `bit`, bytes with `B`; a plain number is bytes per second."""
    if not isinstance(text, str):
        value = float(text)
    else:
        match = re.fullmatch(_NUMBER + r"\s*([KkMGT]?)(bit|B)(?:/s|ps)?", text.strip())
        if match is None:
            raise ConfigurationError(
                f"{where} must be a bandwidth such as 10Gbit, 100Mbit or 1.25GB, got {text!r}"
            )
        value = float(match[1]) * _PREFIX[match[2]] * _BYTES[match[3]]
    if value <= 0:
        raise ConfigurationError(f"{where} must be above zero, got {text!r}")
    return value


def show_seconds(value: float) -> str:
    """A duration with three figures in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value / 1e-9:.3g}ns"
