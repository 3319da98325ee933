"""Rudra's trade-off (Gupta, Zhang & Milthorpe 2016): batch, learners and staleness against time.

The time of a gradient follows the batch here, which is what the trade-off is about: halving the
batch halves the error of too large a batch, and doubles the messages.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.settings import make_settings
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable
from gossamer.tasks import Task, make_task

LEARNERS = 30
EPOCHS, IMAGES = 140, 50_000
BATCHES = (4, 8, 16, 32, 64, 128)
_QUOTED = "quoted from memory of the paper (CIFAR-10, 30 learners)"
PUBLISHED_S = {
    ("sync_server", 4): 2235.0, ("sync_server", 8): 1995.0,
    ("softsync:n=1", 4): 1573.0, (f"softsync:n={LEARNERS}", 4): 2073.0,
}  # fmt: skip
"""Seconds for all epochs, by protocol and batch."""
PROTOCOLS = {
    "hardsync": "sync_server", "1-softsync": "softsync:n=1",
    f"{LEARNERS}-softsync": f"softsync:n={LEARNERS}",
}  # fmt: skip

LEARNER = Compute(seconds=0.003, per_sample=0.0055, jitter=0.2)
"""Fitted to the three published times of hardsync and 1-softsync; the fourth is left to agree or
not."""
_STEPS = 60
"""The gradients of each learner whose time is simulated."""
_MODEL_BYTES = 360_000
"""About 90,000 parameters, as the paper's network for CIFAR-10 has."""

DIGITS_LEARNERS, DIGITS_BATCHES = (1, 4, 16), (4, 16, 64)
STALE = ("sync_server", "softsync:n=1", "softsync:n=4", "softsync:n=16")
"""Protocols for the largest number of learners and the smallest batch, from fresh to stale."""
_DIGITS_EPOCHS = 6.0
_DIGITS_RATE = 0.1
_SEEDS = 5


def whole_seconds(method: str, batch: int, seed: int) -> float:
    """The time of all epochs: simulated for some steps of each learner, without gradients."""
    task = make_task("quadratic:dimension=1,samples=1024")
    cluster = Cluster(
        name="rudra", workers=LEARNERS, compute=LEARNER.at(batch),
        network=Wires(bandwidth=3.0e9, latency=20e-6),
    )  # fmt: skip
    settings = make_settings(
        task, method, cluster, seed=seed, batch=1, epochs=LEARNERS * _STEPS / len(task.train),
        engine="none", model_bytes=_MODEL_BYTES,
    )  # fmt: skip
    step_s = float(Simulation(settings).run().summary["virtual_seconds"]) / _STEPS
    return step_s * EPOCHS * IMAGES / (LEARNERS * batch)


def digits_runs(
    task: Task, method: str, learners: int, batch: int, seed: int
) -> list[Mapping[str, Any]]:
    """Summaries for several seeds at the paper's rate for softsync, alpha0 / n: the method divides
    by n itself, unless it is told not to."""
    cluster = Cluster(workers=learners, compute=LEARNER, network=Wires(bandwidth=3.0e9))
    choices: dict[str, Any] = {
        "batch": batch, "epochs": _DIGITS_EPOCHS, "learning_rate": _DIGITS_RATE,
        "evaluations": 1,
    }  # fmt: skip
    return [
        Simulation(make_settings(task, method, cluster, seed=one, **choices)).run().summary
        for one in range(seed, seed + _SEEDS)
    ]


def _error(runs: list[Mapping[str, Any]]) -> float:
    """The mean error in percent."""
    return 100 * (1 - statistics.mean(float(run["accuracy"]) for run in runs))


def _rudra(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []

    def add(row: str, column: str, ours: float, published: float | None = None) -> None:
        evidence = _QUOTED if published is not None else "no figure at hand"
        cells.append(PublishedCell(row, column, published, ours, evidence))
        progress(f"{row}, {column}: {ours:.4g}")

    for name, method in PROTOCOLS.items():
        for batch in BATCHES:
            published = PUBLISHED_S.get((method, batch))
            add(f"{name}, seconds", f"mu={batch}", whole_seconds(method, batch, seed), published)
    task = dataclasses.replace(make_task("digits-mlp"), optimiser="sgd")
    for learners in DIGITS_LEARNERS:
        method = "softsync:n=1" if learners > 1 else "sync_server"
        for batch in DIGITS_BATCHES:
            runs = digits_runs(task, method, learners, batch, seed)
            add(f"digits, lambda={learners}, error %", f"mu={batch}", _error(runs))
    learners, batch = DIGITS_LEARNERS[-1], DIGITS_BATCHES[0]
    for method in STALE:
        runs = digits_runs(task, method, learners, batch, seed)
        row = f"digits, lambda={learners}, mu={batch}, {method}"
        add(row, "staleness", statistics.mean(float(run["mean_staleness"]) for run in runs))
        add(row, "error %", _error(runs))
        if method.startswith("softsync"):
            whole = digits_runs(task, f"{method},divide=false", learners, batch, seed)
            add(row, "error %, undivided rate", _error(whole))
    return cells


TABLE = PublishedTable(
    name="rudra",
    title="Batch, learners and staleness: the time of 140 epochs, and the error on digits",
    source="Gupta, Zhang & Milthorpe 2016, Model Accuracy and Runtime Tradeoff (Rudra)",
    unit="",
    settings=(
        f"{LEARNERS} learners with one server (3 GB/s, 20 us, a model of {_MODEL_BYTES / 1e3:g} "
        f"kB); a gradient takes {1e3 * LEARNER.seconds:g} ms and {1e3 * LEARNER.per_sample:g} ms "
        f"a sample, with a standard deviation of {100 * LEARNER.jitter:g} %: three figures fitted "
        "to three published times, so that only the fourth, 30-softsync, can disagree; and it "
        "does: our server adds a gradient at no cost, and 30-softsync adds each on its own. The "
        "error is that of digits-mlp, not of CIFAR-10: plain SGD at the rate "
        f"{_DIGITS_RATE} / n, {_DIGITS_EPOCHS:g} epochs, means of {_SEEDS} seeds; 1-softsync "
        "over learners and batch, then several protocols with the most learners and the smallest "
        "batch, also without the division by n."
    ),
    cells=len(PROTOCOLS) * len(BATCHES)
    + len(DIGITS_LEARNERS) * len(DIGITS_BATCHES)
    + 3 * len(STALE)
    - 1,
    compute=_rudra,
)
