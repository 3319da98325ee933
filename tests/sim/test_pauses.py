"""A worker that is paused computes nothing, and only those who wait for it are late."""

from __future__ import annotations

import pytest

from gossamer.config.faults import Fault
from support import bowl, build, cluster_of


def seconds_of(method: str, steps: int, workers: int, *faults: Fault) -> float:
    """Of a run without gradients."""
    cluster = cluster_of(workers, distribution="constant", latency=1e-6, faults=faults)
    return build(bowl(), method, cluster, steps=steps, engine="none").run().virtual_seconds


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(("at", "lasts"), [(0.001, 0.002), (0.005, 0.1), (0.013, 0.004)])
def test_who_is_paused_computes_nothing_meanwhile(at: float, lasts: float, workers: int) -> None:
    """What was left of a gradient, and of its pieces, is still to be done afterwards."""
    free = seconds_of("all_reduce", 3, workers)
    pause = Fault("pause", at=at, lasts=lasts, worker=0)
    assert seconds_of("all_reduce", 3, workers, pause) - free == pytest.approx(lasts)
    assert workers > 1 or free == pytest.approx(0.03)


def test_a_pause_delays_everyone_who_waits_by_its_length() -> None:
    """And nobody else."""
    pause = Fault("pause", at=0.2, lasts=0.5, worker=1)
    late = seconds_of("all_reduce", 50, 4, pause) - seconds_of("all_reduce", 50, 4)
    assert late == pytest.approx(0.5, abs=0.01)
    alone = seconds_of("ensemble", 50, 4)
    assert seconds_of("ensemble", 50, 4, pause) < alone + 0.2
