"""What Lian et al. 2018 report of a shared HPC network: AD-PSGD 4 to 8 times faster per epoch.

A question about time, so no gradients are computed. The paper does not say what the other jobs on
the network did. So the disturbance is varied from nothing to strong, of the network and of nodes,
and the table shows which of them would explain the published factor.
"""

from __future__ import annotations

import dataclasses

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.network import Background, Phases
from gossamer.config.settings import make_settings
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.shapes import AGREES, DIFFERS, PartOfRun, judged
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable
from gossamer.tasks import make_task

CLUSTER = "shared-hpc-128"
RESNET50_BYTES = 102_000_000
METHODS = {
    "AD-PSGD": "ad_psgd",
    "AllReduce": "all_reduce:overlap=false",
    "D-PSGD": "d_psgd:overlap=false",
}
_BATCH = 32
_STEPS = 40
_WORKERS = (32, 128)
_QUIET, _PRESET = "quiet", "others take 80 %, nodes 2x slower"
_PUBLISHED = (4.0, 8.0)
_EVIDENCE = "stated in words: up to 128 GPUs, 4 to 8 times faster per epoch"


def disturbed(cluster: Cluster) -> dict[str, Cluster]:
    """The cluster without and with others on its links and on its nodes, by what they do."""
    background, phases = cluster.background, cluster.phases
    quiet = dataclasses.replace(cluster, background=Background(), phases=Phases())
    found = {_QUIET: quiet}
    for load in (0.5, 0.8, 0.9, 0.95):
        others = dataclasses.replace(background, load=load)
        label = f"others take {100 * load:.0f} % of a node's link"
        found[label] = dataclasses.replace(quiet, background=others)
    for factor in (2.0, 5.0, 10.0):
        slow = dataclasses.replace(phases, factor=factor)
        found[f"nodes {factor:g}x slower"] = dataclasses.replace(quiet, phases=slow)
    return found | {_PRESET: cluster}


def seconds_per_step(method: str, cluster: Cluster, seed: int, steps: int = _STEPS) -> float:
    """Virtual seconds in which the workers together make as many steps as they are."""
    task = make_task("quadratic:dimension=4,samples=1024")
    settings = make_settings(
        task, method, cluster, seed=seed, batch=_BATCH, engine="none", model_bytes=RESNET50_BYTES,
        epochs=steps * cluster.workers * _BATCH / len(task.train),
    )  # fmt: skip
    summary = Simulation(settings).run().summary
    return summary["virtual_seconds"] * cluster.workers / summary["steps"]


def _cells(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for workers in _WORKERS:
        for label, cluster in disturbed(load_cluster(CLUSTER).changed(workers=workers)).items():
            took: dict[str, float] = {}
            for column, method in METHODS.items():
                took[column] = seconds_per_step(method, cluster, seed)
                progress(f"{workers} workers, {label}, {column}: {took[column]:.3g} s a step")
            cells += [
                PublishedCell(
                    f"{workers} workers, {label}", f"{column} / AD-PSGD", None,
                    seconds / took["AD-PSGD"], _EVIDENCE,
                )
                for column, seconds in took.items()
                if column != "AD-PSGD"
            ]  # fmt: skip
    return cells


def _verdict(cells: list[PublishedCell]) -> str:
    """Where the published factor is reached, and where not."""
    low, high = _PUBLISHED
    many = {cell: f"{cell.column} {cell.ours:.3g}" for cell in cells if _is_large(cell)}
    parts = [
        PartOfRun(AGREES if low <= cell.ours <= high else DIFFERS, shown)
        for cell, shown in many.items()
        if cell.row.endswith(_PRESET)
    ]
    quiet = [shown for cell, shown in many.items() if cell.row.endswith(_QUIET)]
    reached = [
        f"{cell.row.partition(', ')[2]} ({shown})"
        for cell, shown in many.items()
        if cell.ours >= low
    ]
    return "\n".join(
        (
            judged(f"128 workers, cluster {CLUSTER}: {low:g} to {high:g} times faster", parts),
            f"128 workers, quiet: {', '.join(quiet)}",
            f"128 workers, {low:g} or more with: {', '.join(reached) or 'nothing that is shown'}",
            f"published: {_EVIDENCE}; what else ran on that network is not said",
        )
    )


def _is_large(cell: PublishedCell) -> bool:
    return cell.row.startswith(f"{_WORKERS[-1]} ")


SHARED_NETWORK = PublishedTable(
    name="ad-psgd-shared-network",
    title="How many times as long an epoch takes as with AD-PSGD, on a network that others use",
    source="Lian, Zhang, Zhang & Liu 2018, Asynchronous Decentralized Parallel SGD",
    unit="x",
    settings=(
        f"cluster {CLUSTER}, with fewer workers fewer nodes; ResNet-50 of 102 MB, a step of 160 "
        f"ms; all-reduce and D-PSGD in their serial form, as there; {_STEPS} steps a worker. "
        "Others take a share of a node's link a third of the time, for 2 s on average, each link "
        "by itself; nodes are slow for 10 s every 60 s on average. What the other jobs were is not "
        "published, so their strength is varied, and nothing is fitted."
    ),
    cells=len(_WORKERS) * 9 * 3,
    compute=_cells,
    verdict=_verdict,
)
