"""Quantities as people write them, the other way round from `gossamer.quantities`."""

from __future__ import annotations


def show_bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def show_bandwidth(bytes_per_second: float) -> str:
    """In bits, as networks are sold."""
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def show_seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # Just below a unit counts as one: 1e-4 is kept as 9.999999999999999e-05.
        if value >= 0.9995 * size:
            return f"{value / size:.4g} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def show_percent(value: float) -> str:
    return f"{100 * value:.3g} %"
