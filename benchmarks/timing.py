"""Timing that a noisy machine spoils least: the best of several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def best_seconds(work: Callable[[], object], *, rounds: int = 5, repeats: int = 5) -> float:
    """Seconds per call in the quietest round."""
    work()
    times: list[float] = []
    for _ in range(rounds):
        synchronise()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronise()
        times.append((time.perf_counter() - began) / repeats)
    return min(times)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
