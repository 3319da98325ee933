"""How long the others pause when a worker of an elastic run dies, comes back, or is stopped.

    python benchmarks/elastic_pauses.py --write docs/benchmarks/elastic-pauses.json

Three workers whose steps take 3 ms. Each in turn is killed in the middle of its life, and the
others go on until it is back; then each in turn is stopped for a while. The figure is the longest
step of any other worker, exchange included, in the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LOOP = Path(__file__).parents[1] / "tests" / "programs" / "elastic_loop.py"
METHODS = ("ad_psgd", "pull_gossip", "push_gossip", "ssp:bound=4", "downpour")
GOSSIP = METHODS[:3]


def longest(transport: str, method: str, victim: int, *faults: str) -> float:
    """The longest step of those who are not the victim, in seconds."""
    program = [sys.executable, "-m", "gossamer", "run", "--transport", transport, *faults]
    loop = [str(LOOP), method, str(victim)] if not faults[2:] else [str(LOOP), method, "nobody"]
    ran = subprocess.run(
        [*program, "-n", "3", *loop, *(["timed"] if faults[2:] else [])], text=True,
        capture_output=True, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line.partition("] ")[2] for line in ran.stdout.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return max(one["longest"] for one in told if one["rank"] != victim)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", type=Path)
    options.add_argument("--stop-seconds", type=float, default=5.0, help="0: nobody is stopped")
    options.add_argument("--methods", nargs="*", default=METHODS)
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    for transport in ("shm", "torch"):
        for method in given.methods:
            # The process of worker 0 has the server.
            victims = range(3) if method in GOSSIP else range(1, 3)
            killed = [longest(transport, method, victim, "--elastic", "1:3") for victim in victims]
            row: dict[str, Any] = {"transport": transport, "method": method}
            row |= {"victims": len(killed), "killed_and_back_s": max(killed)}
            if method in GOSSIP and given.stop_seconds:
                pause = f"@25s+{given.stop_seconds}s"
                stopped = [
                    longest(transport, method, victim, "--elastic", "1:3", "--pause",
                            f"{victim}{pause}")
                    for victim in victims
                ]  # fmt: skip
                row |= {"stopped_s": max(stopped), "stopped_for_s": given.stop_seconds}
            rows.append(row)
            print(row, flush=True)
    if given.write:
        given.write.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


main()
