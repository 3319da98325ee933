"""Rudra's trade-off (Gupta, Zhang & Milthorpe 2016): batch, learners and staleness against time.

The time of a gradient follows the batch here, which is what the trade-off is about: halving the
batch halves the error of too large a batch, and doubles the messages.
"""

from __future__ import annotations

import dataclasses

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
_DIGITS_EPOCHS = 6.0
_DIGITS_RATE, _REFERENCE = 0.1, 16


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


def digits_error(task: Task, learners: int, batch: int, seed: int) -> float:
    """The error in percent after training with 1-softsync, at the paper's rates: alpha0 times the
    root of how much larger than the reference the samples of an update are."""
    cluster = Cluster(workers=learners, compute=LEARNER, network=Wires(bandwidth=3.0e9))
    rate = _DIGITS_RATE * min(1.0, (batch / _REFERENCE) ** 0.5)
    settings = make_settings(
        task, "softsync:n=1" if learners > 1 else "sync_server", cluster, seed=seed, batch=batch,
        epochs=_DIGITS_EPOCHS, learning_rate=rate, evaluations=1,
    )  # fmt: skip
    return 100 * (1 - float(Simulation(settings).run().summary["accuracy"]))


def _rudra(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for name, method in PROTOCOLS.items():
        for batch in BATCHES:
            ours = whole_seconds(method, batch, seed)
            published = PUBLISHED_S.get((method, batch))
            evidence = _QUOTED if published is not None else "no figure at hand"
            cells.append(
                PublishedCell(f"{name}, seconds", f"mu={batch}", published, ours, evidence)
            )
            progress(f"{name}, batch {batch}: {ours:.0f} s")
    task = dataclasses.replace(make_task("digits-mlp"), optimiser="sgd")
    for learners in DIGITS_LEARNERS:
        for batch in DIGITS_BATCHES:
            error = digits_error(task, learners, batch, seed)
            row = f"digits, lambda={learners}, error %"
            cells.append(PublishedCell(row, f"mu={batch}", None, error, "no figure at hand"))
            progress(f"digits, {learners} learners, batch {batch}: {error:.2f} % wrong")
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
        "error is that of digits-mlp, not of CIFAR-10: 1-softsync, plain SGD at rate "
        f"{_DIGITS_RATE} times the root of mu / {_REFERENCE} (at most {_DIGITS_RATE}), "
        f"{_DIGITS_EPOCHS:g} epochs, one seed. As in the paper it grows along every "
        "row and column; equal products give like errors for few learners only."
    ),
    cells=len(PROTOCOLS) * len(BATCHES) + len(DIGITS_LEARNERS) * len(DIGITS_BATCHES),
    compute=_rudra,
)
