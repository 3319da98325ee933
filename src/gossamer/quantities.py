"""Times, bandwidths, sizes and counts as users write them: 50us, 5m, 10Gbit, 1.25GB, 1 epoch."""

from __future__ import annotations

import re

from gossamer.errors import ConfigurationError

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"bit": 0.125, "B": 1.0}
_PREFIX = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)"
_LONGEST_S = 1e12


def seconds(text: str | float, where: str) -> float:
    """A duration: a plain number is seconds."""
    match = re.fullmatch(_NUMBER + r"\s*(ns|us|ms|s|m|h)?", _written(text))
    value = float(match[1]) * _SECONDS[match[2] or "s"] if match else -1.0
    # No run lasts longer, and a clock cannot hold infinity.
    if not 0 <= value <= _LONGEST_S:
        raise ConfigurationError(
            f"{where} must be a time such as 50us, 10ms, 90s, 5m or 1h, got {text!r}"
        )
    return value


def bytes_per_second(text: str | float, where: str) -> float:
    """A bandwidth: bits with `bit`, bytes with `B`; a plain number is bytes per second."""
    written = _written(text) if isinstance(text, str) else f"{_written(text)}B"
    match = re.fullmatch(_NUMBER + r"\s*([KkMGT]?)(bit|B)(?:/s|ps)?", written)
    value = float(match[1]) * _PREFIX[match[2]] * _BYTES[match[3]] if match else 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(
            f"{where} must be a bandwidth such as 10Gbit, 100Mbit or 1.25GB, got {text!r}"
        )
    return value


def size_in_bytes(text: str | float, where: str) -> int:
    """A size: a plain number is bytes."""
    match = re.fullmatch(_NUMBER + r"\s*([KkMGT]?)B?", _written(text))
    value = float(match[1]) * _PREFIX[match[2]] if match else 0.0
    if not 1 <= value < float("inf"):
        raise ConfigurationError(
            f"{where} must be a size of at least one byte such as 100e6, 10MB or 1.5GB, "
            f"got {text!r}"
        )
    return round(value)


def number(text: str) -> float | None:
    """A plain number without a sign; None if the text is not a number."""
    return float(text) if re.fullmatch(_NUMBER, text.strip()) else None


def counted(count: float, noun: str, several: str = "") -> str:
    """A number with its noun: 1 epoch, 0.5 epochs, 16 workers, 2 processes."""
    shown = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{shown} {noun if count == 1 else several or noun + 's'}"


def _written(value: object) -> str:
    """The value as text for the patterns, which refuse true, nan and lists."""
    return value.strip() if isinstance(value, str) else repr(value)


def show_bytes(value: float) -> str:
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}B"
    return f"{value:.0f} B"


def show_bandwidth(bytes_per_second: float) -> str:
    """In bits, as networks are sold."""
    bits = 8 * bytes_per_second
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"


def show_seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # A number just below a unit counts as that unit: 1e-4 may be 9.999999999999999e-05.
        if value >= 0.9995 * size:
            return f"{value / size:.4g} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def show_percent(value: float) -> str:
    return f"{100 * value:.3g} %"
