"""Tables of Lian et al. 2018, AD-PSGD: one slow worker, and speed-up over workers.

Both are questions about time, so no gradients are computed: the network is charged for ResNet-20
(about 1.09 MB). One cluster description serves every cell; nothing is fitted per cell.
"""

from __future__ import annotations

from gossamer.config.cluster import load_cluster
from gossamer.config.faults import Fault
from gossamer.config.settings import make_settings
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable
from gossamer.tasks import make_task

EPOCH = 50_000
BATCH = 128
RESNET20_BYTES = 1_090_000
CLUSTER = "ad-psgd-paper"
METHODS = {
    "AD-PSGD": "ad_psgd",
    "AllReduce": "all_reduce:overlap=false",
    "D-PSGD": "d_psgd:overlap=false",
}
_MEMORY = "quoted from memory of the paper; its 12 cells agree with one 18.03 s single-GPU epoch"
_PUBLISHED = {
    ("none", "AD-PSGD"): 1.22, ("none", "AllReduce"): 1.47, ("none", "D-PSGD"): 1.45,
    ("2x", "AD-PSGD"): 1.28, ("2x", "AllReduce"): 2.60, ("2x", "D-PSGD"): 2.36,
    ("10x", "AD-PSGD"): 1.33, ("10x", "AllReduce"): 11.51, ("10x", "D-PSGD"): 11.24,
    ("100x", "AD-PSGD"): 1.33, ("100x", "AllReduce"): 100.4, ("100x", "D-PSGD"): 100.4,
}  # fmt: skip
_SPEED_UP_OF_16 = {"AD-PSGD": 14.78, "AllReduce": 12.27, "D-PSGD": 12.44}


def seconds_per_epoch(
    method: str, workers: int, seed: int, faults: tuple[Fault, ...] = (), epochs: int = 4
) -> float:
    """Virtual seconds for one pass over 50,000 images by all workers together."""
    task = make_task("quadratic:dimension=4,samples=1024")
    samples = epochs * EPOCH
    settings = make_settings(
        task,
        method,
        load_cluster(CLUSTER).changed(workers=workers, faults=faults),
        seed=seed,
        epochs=samples / len(task.train),
        batch=BATCH,
        engine="none",
        model_bytes=RESNET20_BYTES,
    )
    result = Simulation(settings).run()
    return result.summary["virtual_seconds"] * EPOCH / result.summary["samples"]


def _slow_worker(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for label, factor in (("none", 1), ("2x", 2), ("10x", 10), ("100x", 100)):
        faults = (Fault("slow", worker=0, amount=factor),) if factor > 1 else ()
        for column, method in METHODS.items():
            ours = seconds_per_epoch(method, 16, seed, faults)
            cells.append(PublishedCell(label, column, _PUBLISHED[label, column], ours, _MEMORY))
            progress(f"{column}, slowed {label}: {ours:.3g} s")
    return cells


def _speed_up(seed: int, progress: Progress) -> list[PublishedCell]:
    alone = seconds_per_epoch("all_reduce:overlap=false", 1, seed, epochs=1)
    slow_link = (Fault("slow-link", worker=0, amount=10),)
    cells: list[PublishedCell] = []
    for workers in (1, 2, 4, 8, 16, 32, 64, 128):
        for kind, faults in (("equal", ()), ("slow link", slow_link)):
            for column, method in METHODS.items():
                ours = alone / seconds_per_epoch(method, workers, seed, faults)
                published = None
                if workers == 16 and kind == "equal":
                    published = _SPEED_UP_OF_16[column]
                label = f"{column}, {kind}"
                evidence = _MEMORY if published else "no figure at hand"
                cells.append(PublishedCell(f"{workers} workers", label, published, ours, evidence))
                progress(f"{workers} workers, {label}: {ours:.3g}x")
    return cells


SLOW_WORKER = PublishedTable(
    name="ad-psgd-slow-worker",
    title="One of 16 workers slowed: seconds per epoch, CIFAR-10 ResNet-20",
    source="Lian, Zhang, Zhang & Liu 2018, Asynchronous Decentralized Parallel SGD",
    unit="s",
    settings=(
        f"cluster {CLUSTER}: computing, un-overlapped cost and network are one description for all "
        "cells; batch 128 per worker; all-reduce and D-PSGD in their serial form, as there; worker "
        "0 is the slow one; mean of four epochs. The paper does not give the parts of a step: "
        "computing 1.03 s, copying 0.15 s an epoch and 1.6 Gbit/s are our reading of its first row."
    ),
    cells=12,
    compute=_slow_worker,
)

SPEED_UP = PublishedTable(
    name="ad-psgd-speedup",
    title="Speed-up over one worker, equal workers and with one ten times slower link",
    source="Lian, Zhang, Zhang & Liu 2018, Asynchronous Decentralized Parallel SGD",
    unit="x",
    settings=(
        f"cluster {CLUSTER} with 1 to 128 workers; the slow link is the network card of worker 0. "
        "Published cells: 16 equal workers only; the paper's slow-link figures are not at hand."
    ),
    cells=48,
    compute=_speed_up,
)
