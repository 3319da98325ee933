"""Runs groups of processes over shared memory, one scenario list after another; prints JSON.

A program of its own, so that torch is imported once and every process is a fork of it:

    python tests/programs/shm_groups.py '[[3, ["scenario_a", "scenario_b"]]]' cpu

With "gpu" main memory stands in for that of a
GPU which all processes share. The answer is one object per group: how each
process ended, and what it wrote.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from gossamer.real.transports.conformance.group import run_group
from gossamer.real.transports.shm import (
    ShmTransport,
    transport,
)
from main_memory import MainMemory
from programs import GROUP_LIMIT_S


def run(size: int, names: list[str], folder: Path) -> dict[str, object]:
    ends, written = run_group(ShmTransport.from_environment, size, names, GROUP_LIMIT_S)
    return {"ends": ends, "written": written}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[2] == "gpu":
            transport._gpu_for = lambda device: MainMemory(Path(place))
        answers = [run(size, names, Path(place)) for size, names in json.loads(sys.argv[1])]
    print(json.dumps(answers))
