"""Where the answer turns: bandwidth, number of workers, batch; closed forms beside simulation.

    python benchmarks/turning_points.py --write docs/benchmarks/turning-points.json   # half an hour
    python benchmarks/turning_points.py --only batch --write docs/benchmarks/turning-points.json
    python benchmarks/turning_points.py --read docs/benchmarks/turning-points.json    # its table

With `--only` the other rows of the file stay as they are.

For each question two methods of which one is right at one end and the other at the other end:

- where their samples per second cross, by the closed forms of `gossamer cost` and in simulations
  in time only;
- where their times to the target cross, in simulations with gradients at the best rate of a grid,
  and by the closed forms, times the epochs that each method needs on a network that costs nothing;
- which of the two `gossamer advise` names at both ends, with seeds and searches of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gossamer
from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.settings import make_settings
from gossamer.plan.advise.collecting import collecting_seconds
from gossamer.plan.cost.agreement import compare_step
from gossamer.plan.cost.crossing import crossings, show_value
from gossamer.plan.cost.step_time import predict
from gossamer.plan.cost.workload import workload_of
from gossamer.runs.arrival import evaluations, moment

TASK, TARGET = "digits-mlp", 0.94
EPOCHS, BATCH = 12.0, 16
RATES, SEEDS = (0.1, 0.3), (1, 2, 3)
BUDGET = "2m"
FREE = Wires(bandwidth=1e15, latency=0.0)
Times = Callable[[str, float], float]


@dataclass(frozen=True)
class Question:
    """Two methods, and one thing of the cluster or of the training that decides between them."""

    axis: str
    asked: str
    methods: tuple[str, str]
    """The right one at the lowest value, and the one at the highest."""
    values: tuple[float, ...]
    cluster: Cluster
    model_bytes: float

    def at(self, value: float, wires: Wires | None = None) -> tuple[Cluster, int]:
        """The cluster and the batch at one value of the axis."""
        network = self.cluster.network if wires is None else wires
        if self.axis == "bandwidth" and wires is None:
            network = dataclasses.replace(network, bandwidth=value)
        workers = round(value) if self.axis == "workers" else self.cluster.workers
        where = dataclasses.replace(self.cluster, workers=workers, network=network)
        return where, round(value) if self.axis == "batch" else BATCH


def cluster_of(workers: int = 8, **wires: Any) -> Cluster:
    """A gradient of 16 samples takes 10 ms, of which four are fixed."""
    compute = Compute(seconds=0.004, per_sample=0.000375)
    return Cluster("custom", workers=workers, compute=compute, network=Wires(**wires))


QUESTIONS = (
    Question(
        "bandwidth", "average after 8 steps, or with the neighbours in every step?",
        ("local_sgd:period=8", "d_psgd"),
        tuple(1.25e9 * 2.0 ** (half / 2) for half in (-4, -2, -1, 0, 1, 2, 4)), cluster_of(), 10e6,
    ),
    Question(
        "workers", "one server, or an all-reduce by a tree?",
        ("sync_server", "all_reduce"), (4, 8, 12, 16, 24),
        cluster_of(collective="tree", latency=0.4e-3), 300e3,
    ),
    Question(
        "batch", "average after 8 steps, or in pairs at every step?",
        ("local_sgd:period=8", "ad_psgd"), (8, 16, 24, 32, 48, 64), cluster_of(), 10e6,
    ),
)  # fmt: skip


def turn(question: Question, times: Times) -> float | None:
    """The value at which the second method becomes faster for good, between two values on a
    straight line of logarithms; None where it does not."""
    first, second = question.methods
    leads = [math.log(times(first, at) / times(second, at)) for at in question.values]
    places = zip(question.values, leads, strict=True)
    for (low, before), (high, after) in reversed(list(pairwise(places))):
        if before <= 0 < after:
            return low * (high / low) ** (before / (before - after))
    return None


def step_turns(question: Question) -> tuple[float | None, float | None]:
    """Where the seconds of a sample cross: by the closed forms, and simulated."""
    task = gossamer.make_task(TASK)
    workload = workload_of(task, model_bytes=question.model_bytes, batch=BATCH)
    found = crossings(question.axis, question.methods, question.values, question.cluster, workload)
    formed = [one.value for one in found if one.faster == question.methods[1]]

    def simulated(method: str, value: float) -> float:
        where, batch = question.at(value)
        what = dataclasses.replace(workload, batch=batch)
        return compare_step(
            method, where, task, model_bytes=question.model_bytes, workload=what
        ).simulated_s

    return (formed[-1] if formed else None), turn(question, simulated)


def target_turns(question: Question) -> tuple[float | None, float | None]:
    """Where the times to the target cross: by the closed forms, and simulated."""
    task = gossamer.make_task(TASK)
    workload = workload_of(task, model_bytes=question.model_bytes, batch=BATCH)

    @cache
    def needed(method: str, value: float, wires: Wires | None = None) -> tuple[float, float]:
        """Epochs and seconds at the better rate: the median over the seeds."""
        where, batch = question.at(value, wires)
        choices: dict[str, Any] = {
            "epochs": EPOCHS, "batch": batch, "model_bytes": round(question.model_bytes),
            "evaluations": evaluations(EPOCHS),
        }  # fmt: skip
        settings = make_settings(task, method, where, **choices)
        collecting = collecting_seconds(settings, round(question.model_bytes))
        found: list[tuple[float, float]] = []
        for rate in RATES:
            runs = [
                gossamer.simulate(task, method, where, learning_rate=rate, seed=seed, **choices)
                for seed in SEEDS
            ]
            never = (math.inf, math.inf)
            ends = [moment(run.history, TARGET, "accuracy") or never for run in runs]
            epochs, seconds = (statistics.median(one) for one in zip(*ends, strict=True))
            found.append((epochs, seconds + collecting))
        return min(found, key=lambda one: one[1])

    def formed(method: str, value: float) -> float:
        where, batch = question.at(value)
        # On a network that costs nothing every bandwidth is the same.
        same = question.values[0] if question.axis == "bandwidth" else value
        what = dataclasses.replace(workload, batch=batch)
        epoch_s = predict(method, where, what).epoch_seconds
        settings = make_settings(task, method, where, epochs=EPOCHS, batch=batch)
        collecting = collecting_seconds(settings, round(question.model_bytes))
        return needed(method, same, FREE)[0] * epoch_s + collecting

    def simulated(method: str, value: float) -> float:
        return needed(method, value)[1]

    return turn(question, formed), turn(question, simulated)


def advice(question: Question, value: float) -> dict[str, Any]:
    """What the adviser says with these two methods only."""
    where, batch = question.at(value)
    found = gossamer.advise(
        TASK, where, target=TARGET, methods=question.methods, only=True, budget=BUDGET,
        epochs=EPOCHS, batch=batch, model_bytes=round(question.model_bytes), learning_rates=RATES,
        progress=False,
    )  # fmt: skip
    return {"method": found.method, "verdict": found.verdict}


def answered(question: Question) -> dict[str, Any]:
    steps, targets = step_turns(question), target_turns(question)
    ends = (question.values[0], question.values[-1])
    return {
        "axis": question.axis, "asked": question.asked, "methods": question.methods,
        "steps": {"closed_forms": steps[0], "simulated": steps[1]},
        "target": {"closed_forms": targets[0], "simulated": targets[1]},
        "advice": [{"at": at, **advice(question, at)} for at in ends],
    }  # fmt: skip


def _least(axis: str, value: float) -> float:
    """The first number of workers, or of samples, from which on the second method is ahead."""
    return value if axis == "bandwidth" else math.ceil(value)


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| question | samples per second cross: closed forms | simulated "
        f"| times to {100 * TARGET:g} % cross: closed forms | simulated | advised |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        cells = [
            "nowhere" if at is None else show_value(one["axis"], _least(one["axis"], at))
            for kind in ("steps", "target") for at in one[kind].values()
        ]  # fmt: skip
        said = ", ".join(
            f"`{told['method']}` with {show_value(one['axis'], told['at'])}"
            for told in one["advice"]
        )
        names = " or ".join(f"`{name}`" for name in one["methods"])
        lines.append("| " + " | ".join([f"{one['asked']} {names}", *cells, said]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--only", choices=[question.axis for question in QUESTIONS])
    asked: Any = parser.parse_args()
    if asked.read:
        print(table(json.loads(asked.read.read_text())))
        return
    found: dict[str, dict[str, Any]] = {}
    if asked.only and asked.write and asked.write.exists():
        found = {one["axis"]: one for one in json.loads(asked.write.read_text())}
    for question in QUESTIONS:
        if asked.only in (None, question.axis):
            found[question.axis] = answered(question)
            if asked.write:
                asked.write.write_text(json.dumps(list(found.values()), indent=1) + "\n")
    print(table(list(found.values())))


if __name__ == "__main__":
    main()
