"""Encoders beside memcpy: how fast each compressor encodes and decodes a gradient of 45 MB.

    .venv/bin/python benchmarks/compression.py                      about two minutes
    ... --write docs/benchmarks/compression.json                    keeps the figures, with a table
    ... --device cuda                                               on a GPU, beside a copy there

A ratio is the time to copy the same input over that to encode it (or to decode to it): 1 means as
fast as memcpy. The copy, all encoders and `torch.topk` run in turns, and the fastest call of each
counts, because whatever else a machine does only adds to it.
"Compiled" is `torch.compile` of the arithmetic of the encoder, scales and rounding in one pass,
where a C++ compiler is found.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import tell
from torch import Tensor

from gossamer.compression import Stream
from gossamer.compression.casts import quantised
from gossamer.compression.coding_times import TIMED, layout_like, usual_of

COUNT = 45_000_000 // 4 * 13 // 12
"""With which `layout_like` makes 45 MB."""
GOALS = {("bf16", "eager"): 0.7, ("int8", "compiled"): 0.5}
TOP_K_GOAL = 2.0
_SHORT_S = 0.05
SHARE = 0.01
Work = Callable[[], Any]


def seconds(work: Work, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def works(device: str) -> dict[tuple[str, str], Work]:
    """What is timed: (what, how)."""
    layout = layout_like(COUNT)
    torch.manual_seed(0)
    vector = torch.randn(layout.total, device=device)
    target = torch.empty_like(vector)
    found: dict[tuple[str, str], Work] = {("memcpy", "eager"): lambda: target.copy_(vector)}
    for entry in TIMED:
        compressor = usual_of(entry)
        stream = Stream(layout, steps=1)
        data = compressor.encode(vector, stream)
        found[entry, "eager"] = lambda c=compressor, s=stream: c.encode(vector, s)
        found[entry, "decoding"] = lambda c=compressor, s=stream, d=data: c.decode(d, s)
    rows = vector[: vector.numel() // 128 * 128].view(-1, 128)
    for name, function in {
        "bf16": lambda: vector.to(torch.bfloat16),
        "int8": lambda: _whole(rows),
    }.items():
        compiled = _compiled(function)
        if compiled is not None:
            found[name, "compiled"] = compiled
    kept = int(SHARE * layout.total)
    found["torch.topk", "eager"] = lambda: vector.abs().topk(kept, sorted=False)
    return found


def _whole(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest, codes = quantised(rows, 127)
    return largest, codes.to(torch.int8)


def _compiled(function: Work) -> Work | None:
    """The same work compiled, if it can be here; it must have the same result."""
    expected = function()
    compiled = torch.compile(function, dynamic=False)
    try:
        found = compiled()
    except Exception as error:  # whatever a missing compiler raises
        print(f"not compiled: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    torch.testing.assert_close(found, expected, rtol=0, atol=1)  # of a tie, either side
    return compiled


def measure(device: str, rounds: int) -> dict[str, Any]:
    every = works(device)
    fastest = {key: seconds(work, device) for key, work in every.items()}
    for number in range(rounds):
        for key, work in every.items():
            # Short works more often, so that each finds a quiet moment of the machine.
            for _ in range(max(1, round(_SHORT_S / fastest[key]))):
                fastest[key] = min(fastest[key], seconds(work, device))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    copy = fastest.pop(("memcpy", "eager"))
    rows: dict[str, dict[str, float]] = {}
    for (what, how), own in fastest.items():
        rows.setdefault(what, {})[how] = copy / own
    size = 4 * layout_like(COUNT).total
    return {
        "machine": _machine(device), "bytes": size, "rounds": rounds, "device": device,
        "memcpy_gigabytes_per_second": 1e-9 * size / copy, "ratios": rows,
    }  # fmt: skip


def _machine(device: str) -> str:
    kind = torch.cuda.get_device_name() if device != "cpu" else platform.machine()
    model = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), "",
    ) if device == "cpu" else ""  # fmt: skip
    threads = torch.get_num_threads()
    word = "thread" if threads == 1 else "threads"
    return f"{model or kind}, {os.cpu_count()} cores, torch {torch.__version__}, {threads} {word}"


def verdicts(found: dict[str, Any]) -> list[str]:
    """Each goal beside what was measured."""
    ratios, lines = found["ratios"], list[str]()
    for (name, how), goal in GOALS.items():
        measured = ratios[name].get(how)
        eager = f" (without a compiler {ratios[name]['eager']:.2f})" if how == "compiled" else ""
        said = "not measured" if measured is None else f"{measured:.2f}{eager}"
        word = "" if measured is None else (", reached" if measured >= goal else ", missed")
        lines.append(f"- `{name}` {how}: at least {goal:g} of memcpy's speed: {said}{word}.")
    times = ratios["topk"]["eager"] / ratios["torch.topk"]["eager"]
    word = "reached" if times >= TOP_K_GOAL else "missed"
    lines.append(
        f"- Exact top-k by chunks, packed places and values included: at least {TOP_K_GOAL:g} "
        f"times as fast as global `torch.topk` alone: {times:.2f} times, {word}."
    )
    return lines


def as_markdown(found: dict[str, Any]) -> str:
    def cell(row: dict[str, float], how: str) -> str:
        value = row.get(how)
        return "" if value is None else f"{value:.3g}"

    rows = [
        f"| `{what}` | {cell(row, 'eager')} | {cell(row, 'compiled')} | {cell(row, 'decoding')} |"
        for what, row in found["ratios"].items()
    ]
    return "\n".join([
        f"A gradient of {found['bytes'] / 1e6:.0f} MB, normally distributed, of a transformer's "
        "tensors. A figure is the time of a copy of it over the time of encoding it (or of "
        f"decoding to it), the fastest of {found['rounds']} rounds: 1 is as fast as memcpy, which "
        f"moves {found['memcpy_gigabytes_per_second']:.1f} GB/s here.",
        "", "| | encoding | compiled | decoding |", "|---|---|---|---|", *rows, "",
        *verdicts(found), "", f"Machine: {found['machine']}.", "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, f"there is no {arguments.device} device here; leave out --device\n")
    torch.set_num_threads(arguments.threads)
    tell(measure(arguments.device, arguments.rounds), as_markdown, arguments)


if __name__ == "__main__":
    main()
