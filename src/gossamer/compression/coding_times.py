"""How long encoding and decoding take: measured here, or as measured where the table was made.

Times are nanoseconds for one number, of large vectors. What is the same for every call is left out;
it matters to models of a few thousand parameters only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gossamer.compression.compressor import Compressor, Stream
from gossamer.compression.registry import COMPRESSORS, parse_compressor
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.replica import Layout

CodingTimes = Mapping[str, tuple[float, float]]
"""Nanoseconds that one number takes to be encoded and to be decoded, by what is timed."""

TIMED = (*COMPRESSORS, "topk-global", "topk-tensor", "dgc-global", "dgc-tensor")
"""One entry for each compressor, with its usual options, and those scopes that differ much."""


def timed_as(compressor: Compressor) -> str:
    """The entry that says how long this compressor takes."""
    scope = getattr(compressor, "scope", "chunk")
    return compressor.name if scope == "chunk" else f"{compressor.name}-{scope}"


def usual_of(entry: str) -> Compressor:
    """The compressor that is measured for an entry."""
    name, _, scope = entry.partition("-")
    options = [f"scope={scope}" if scope else "", "warm_up=0" if name == "dgc" else ""]
    text = ",".join(option for option in options if option)
    return parse_compressor(f"{name}:{text}" if text else name)


def check_times(times: Mapping[str, object]) -> dict[str, tuple[float, float]]:
    """The table [compression] of a cluster file: `topk = [encode, decode]`."""
    found: dict[str, tuple[float, float]] = {}
    for entry, value in times.items():
        if entry not in TIMED:
            raise unknown_name("key of [compression]", entry, TIMED)
        pair = list(value) if isinstance(value, list | tuple) else []
        if len(pair) != 2 or not all(_is_time(one) for one in pair):
            raise ConfigurationError(
                f"[compression] {entry} must be two numbers, the nanoseconds that encoding and "
                f"decoding take for each number of a vector, got {value!r}"
            )
        found[entry] = (float(pair[0]), float(pair[1]))
    return found


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def seconds(
    compressor: Compressor, count: int, known: CodingTimes, *, decodes: bool = False
) -> float:
    """The time to encode (or decode) so many numbers, on a cluster of which this is known."""
    entry = timed_as(compressor)
    return count * 1e-9 * known.get(entry, MEASURED[entry])[decodes]


def layout_like(count: int) -> Layout:
    """A model of about so many parameters: matrices of a transformer, and biases."""
    side = max(8, int((count / 13) ** 0.5))
    shapes = [(3 * side, side), (side, side), (4 * side, side), (side, 4 * side), (4 * side,)]
    return Layout.of((str(at), torch.empty(shape)) for at, shape in enumerate(shapes))


def measure(
    entry: str, *, count: int = 1 << 20, repeats: int = 5, device: str = "cpu"
) -> tuple[float, float]:
    """Nanoseconds for one number to encode and to decode, the fastest of so many calls: whatever
    else a machine does only adds to them."""
    layout = layout_like(count)
    compressor, stream = usual_of(entry), Stream(layout, steps=1)
    vector = torch.randn(layout.total, device=device)
    data = compressor.encode(vector, stream)
    compressor.decode(data, stream)
    encode = fastest_seconds(lambda: compressor.encode(vector, stream), repeats, device)
    decode = fastest_seconds(lambda: compressor.decode(data, stream), repeats, device)
    return 1e9 * encode / layout.total, 1e9 * decode / layout.total


def fastest_seconds(work: Callable[[], Tensor], repeats: int, device: str) -> float:
    """The fastest of so many calls, each with all that it started on a GPU."""
    took: list[float] = []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


def measure_all(*, count: int = 1 << 20, repeats: int = 5) -> dict[str, tuple[float, float]]:
    """The table [compression] of this machine, with as many threads as torch has here."""
    return {entry: measure(entry, count=count, repeats=repeats) for entry in TIMED}


MEASURED: CodingTimes = {
    "fp16": (0.11, 0.05),
    "bf16": (0.07, 0.05),
    "int8": (0.55, 0.22),
    "int4": (1.19, 0.84),
    "int2": (12.92, 1.16),
    "sign": (0.90, 0.95),
    "onebit": (26.02, 4.12),
    "qsgd": (14.44, 0.98),
    "terngrad": (23.10, 2.84),
    "natural": (10.94, 8.52),
    "randk": (18.29, 13.58),
    "topk": (7.94, 0.21),
    "threshold": (1.90, 0.11),
    "dgc": (8.98, 0.13),
    "powersgd": (1.91, 0.19),
    "topk-global": (23.04, 0.27),
    "topk-tensor": (19.76, 0.39),
    "dgc-global": (24.88, 0.23),
    "dgc-tensor": (20.32, 0.38),
}
"""What is used where a cluster says nothing: measured by `measure_all`, with one thread on an AMD
EPYC."""
