"""The closed forms compared with the simulator on the same method, cluster and model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.methods import MethodSpec, parse_method
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.simulated_step import round_steps, simulated_step
from gossamer.plan.cost.step_time import Prediction, predict
from gossamer.plan.cost.workload import Workload, workload_of
from gossamer.tasks import Task, make_task

WORKERS = (2, 4, 8, 16, 32)
FAST, SLOW = 12.5e9, 12.5e6
"""Bytes per second: 100 Gbit/s, where computing dominates, and 100 Mbit/s, where it does not."""
MODEL_BYTES = 1_000_000
COMPUTE_S, LATENCY_S = 0.010, 100e-6
TOLERANCE = 0.05
STEPS = 48
DRAWN_STEPS = 4800
"""Steps of all workers together for methods with random partners, to average out chance."""
_DRAWS = ("pull_gossip", "ad_psgd")


@dataclass(frozen=True)
class Agreement:
    """The predicted and the simulated step of one method on one cluster."""

    prediction: Prediction
    bandwidth: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.prediction.step_seconds / self.simulated_s - 1

    @property
    def is_close(self) -> bool:
        return abs(self.error) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.prediction.method, "workers": self.prediction.workers,
            "bandwidth": self.bandwidth, "predicted_seconds": self.prediction.step_seconds,
            "simulated_seconds": self.simulated_s, "error": self.error,
        }  # fmt: skip


def equal_cluster(
    workers: int, bandwidth: float, *, jitter: float = 0.0, collective: str = "ring"
) -> Cluster:
    """Equal workers, one on each machine; without jitter every gradient takes the same time."""
    distribution = "normal" if jitter else "constant"
    return Cluster(
        "check", workers=workers,
        compute=Compute(seconds=COMPUTE_S, distribution=distribution, jitter=jitter),
        network=Wires(bandwidth=bandwidth, latency=LATENCY_S, collective=collective),
    )  # fmt: skip


def compare_step(
    method: str | MethodSpec,
    cluster: Cluster,
    task: Task,
    *,
    model_bytes: float = MODEL_BYTES,
    steps: int | None = None,
    workload: Workload | None = None,
) -> Agreement:
    """Predict a step and simulate it with the same options."""
    spec = parse_method(method)
    work = workload or workload_of(task, model_bytes=model_bytes)
    prediction = predict(spec, cluster, work)
    drawn = min(DRAWN_STEPS // cluster.workers, 10 * STEPS) if spec.name in _DRAWS else 0
    count = steps or max(STEPS, drawn)
    own = round_steps(prediction.options, cluster.workers)
    fixed = dataclasses.replace(spec, options=prediction.options)
    simulated = simulated_step(
        fixed, cluster.at_batch(work.batch), task, model_bytes=model_bytes,
        steps=own * math.ceil(count / own), more=own,
    )  # fmt: skip
    return Agreement(prediction, cluster.network.bandwidth, simulated.total_s)


def agreement_table(
    methods: Iterable[str] = tuple(FORMS),
    *,
    workers: Sequence[int] = WORKERS,
    bandwidths: Sequence[float] = (FAST, SLOW),
    model_bytes: float = MODEL_BYTES,
    jitter: float = 0.0,
    steps: int | None = None,
) -> Iterator[Agreement | NoClosedForm]:
    """Compare every method with every number of workers and every bandwidth."""
    task = make_task("digits-mlp")
    workload = workload_of(task, model_bytes=model_bytes, batch=1)
    for method in methods:
        for bandwidth in bandwidths:
            for count in workers:
                cluster = equal_cluster(count, bandwidth, jitter=jitter)
                try:
                    yield compare_step(
                        method, cluster, task,
                        model_bytes=model_bytes, steps=steps, workload=workload,
                    )  # fmt: skip
                except NoClosedForm as refusal:
                    yield refusal
