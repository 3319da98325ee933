"""How long it takes to play a schedule, and to search the divisions of a model.

    python benchmarks/pipelines.py            64 stages and 32 micro-batches; four networks
    python benchmarks/pipelines.py --json

`table` is the time until PyTorch has made the schedule, `played` that of the play alone. The
schedules in a V do not exist for so few micro-batches, and get twice as many as stages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gossamer.config.cluster import load_cluster
from gossamer.errors import ConfigurationError
from gossamer.pipeline.schedule import SYNCHRONOUS, make_schedule_of
from gossamer.plan.hardware.sheet import SheetChoices
from gossamer.plan.parallel.question import question_of_network
from gossamer.plan.parallel.search import search
from gossamer.sim.pipelines.makespan import makespan

STAGES, MICROBATCHES = 64, 32
NETWORKS = ("vgg-16", "resnet-50", "densenet-121", "gpt-2")


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plays() -> dict[str, dict[str, Any]]:
    """Every schedule that exists for these numbers."""
    found: dict[str, dict[str, Any]] = {}
    for name in SYNCHRONOUS:
        many = MICROBATCHES
        began = time.perf_counter()
        try:
            schedule = make_schedule_of(name, STAGES, many)
        except ConfigurationError:
            many = 2 * STAGES  # schedules in a V need as many
            began = time.perf_counter()
            schedule = make_schedule_of(name, STAGES, many)
        made = time.perf_counter() - began
        found[name] = {
            "microbatches": many, "table": made,
            "played": seconds(partial(makespan, schedule)),
        }  # fmt: skip
    return found


def searches() -> dict[str, dict[str, Any]]:
    """The divisions of published networks over 16 workers."""
    found: dict[str, dict[str, Any]] = {}
    cluster = load_cluster("ethernet-10g-16")
    for name in NETWORKS:
        asked = question_of_network(name, cluster, None, SheetChoices(hardware="a100"))
        began = time.perf_counter()
        priced = search(asked.case).priced
        found[name] = {"divisions": priced, "seconds": time.perf_counter() - began}
    return found


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--json", action="store_true")
    asked = reader.parse_args()
    told = {"stages": STAGES, "plays": plays(), "searches": searches()}
    if asked.json:
        print(json.dumps(told))
        return 0
    for name, one in told["plays"].items():
        print(
            f"{name:12} {STAGES} stages x {one['microbatches']:3} micro-batches: table "
            f"{one['table']:.2f} s, played in {one['played']:.2f} s"
        )
    for name, one in told["searches"].items():
        print(f"{name:12} {one['divisions']} divisions searched in {one['seconds']:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
