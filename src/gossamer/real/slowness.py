"""How much slower than it could this worker is asked to be."""

from __future__ import annotations

import json
import os


def own_slow_factor(rank: int) -> float:
    """1 for a worker that nobody slows down on purpose."""
    faults = json.loads(os.environ.get("GOSSAMER_FAULTS") or "{}")
    return max(1.0, float(faults.get("slow", {}).get(str(rank), 1.0)))
