"""What batches in proportion to speed promise of time, by the command that documents it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "balance.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_target_comes_twice_as_soon_in_every_world() -> None:
    """One of four workers is four times slower, and four fifths of a step follow the batch. Steps
    sleep, so that other programs disturb the ratio little; both times are from the same minutes."""
    said = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json"], check=True, stdout=subprocess.PIPE
    )
    found = json.loads(said.stdout)
    assert len(found) == 3
    for world, times in found.items():
        equal, own = times.values()
        assert equal is not None, world
        assert own is not None, world
        assert equal > 2 * own, world
