"""What a second job gains: one comparison with `--jobs 1` and with `--jobs 2`, in turns.

    python benchmarks/jobs.py                             the comparison of the README
    python benchmarks/jobs.py --repeats 3 --json -- --epochs 4

Everything a user waits for is timed: the command from its start to its end, with its page and its
picture. Both must print the same JSON, but for wall times. The words after `--` go to `compare`.
What other programs take of the processors meanwhile stands beside each time: a ratio says something
where that is little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOBS = (1, 2)


def timed(jobs: int, words: list[str], folder: str) -> dict[str, Any]:
    """The seconds of one command, those of the processors in it, and what it printed."""
    command = [
        sys.executable, "-m", "gossamer_command", "compare", *words, "--jobs", str(jobs), "--json",
        "--runs", folder,
    ]  # fmt: skip
    before, began, busy_before = os.times(), time.perf_counter(), busy_seconds()
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    took, after, busy_after = time.perf_counter() - began, os.times(), busy_seconds()
    busy = after.children_user + after.children_system
    busy -= before.children_user + before.children_system
    others = max(0.0, busy_after - busy_before - busy)
    return {
        "seconds": took,
        "processor": busy,
        "others": others,
        "ranking": _lasting(json.loads(said.stdout)),
    }


def busy_seconds() -> float:
    """What all programs of this machine have taken of its processors."""
    words = Path("/proc/stat").read_text().split()
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, words[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _lasting(value: Any) -> Any:
    """What two equal comparisons share."""
    if isinstance(value, dict):
        items: Any = value.items()
        return {key: _lasting(one) for key, one in items if key != "wall_seconds"}
    return [_lasting(one) for one in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*", help="options of compare")
    given = parser.parse_args()
    found: dict[int, list[dict[str, Any]]] = {jobs: [] for jobs in JOBS}
    for turn in range(given.repeats):
        for jobs in JOBS if turn % 2 == 0 else reversed(JOBS):
            with tempfile.TemporaryDirectory() as folder:
                found[jobs].append(timed(jobs, given.words, folder))
            one = found[jobs][-1]
            print(
                f"--jobs {jobs}: {one['seconds']:.1f} s, {one['processor']:.1f} s of processors, "
                f"{one['others']:.1f} s of others",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    rankings = [one.pop("ranking") for runs in found.values() for one in runs]
    if any(one != rankings[0] for one in rankings):
        raise SystemExit("the rankings differ")
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(found[1], found[2], strict=True)]
    print(
        f"the same ranking; two jobs are {statistics.median(ratios):.2f} times as fast as one "
        f"({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
        file=sys.stderr,
    )
    if given.json:
        cores = len(os.sched_getaffinity(0))
        told = {"cores": cores, "words": given.words, "ratio": statistics.median(ratios)}
        print(json.dumps({**told, "of": ratios, **{f"jobs {k}": v for k, v in found.items()}}))


if __name__ == "__main__":
    main()
