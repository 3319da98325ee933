"""Krizhevsky 2014: copies of the convolutions and shares of the fully connected layers, on up to
eight GPUs of one machine."""

from __future__ import annotations

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.plan.parallel.hybrids import one_weird_trick
from gossamer.plan.parallel.networks import make_network
from gossamer.plan.parallel.pace import ClusterPassTimes
from gossamer.plan.parallel.plan import Division, ParallelCase
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable

HOURS, EPOCHS, IMAGES = 98.05, 90, 1_281_167
"""One GPU, as published: what a sample takes follows from it."""
PER_SAMPLE_S = 3600 * HOURS / EPOCHS / IMAGES
BANDWIDTH, LATENCY = 6e9, 10e-6
"""PCI Express 2.0 with 16 lanes: 8 GB/s nominally, about 6 of them as it is commonly measured."""
BATCH, SMALL_BATCH = 128, 64
"""Samples of a GPU in the paper; and where four GPUs share 256, as those who use one kind did."""
_FIRST_CONNECTED = 5
_NOTED, _QUOTED = "stated in a note on the survey", "quoted from memory of the paper"
TRICK = {2: (1.95, _QUOTED), 4: (3.74, _QUOTED), 8: (6.25, _NOTED)}
ONE_KIND = (2.2, _NOTED)


def case_of(gpus: int, batch: int, sharing: int = 1) -> ParallelCase:
    """So many GPUs, a batch for each, and how many of them share the bandwidth of a card."""
    blocks = make_network("alexnet-2014").blocks
    cluster = Cluster(workers=gpus, network=Wires(bandwidth=BANDWIDTH / sharing, latency=LATENCY))
    pace = ClusterPassTimes(blocks, Compute(0.0, per_sample=PER_SAMPLE_S))
    return ParallelCase(blocks, cluster, pace, batch * gpus)


def speed_up(case: ParallelCase, step_s: float) -> float:
    """Over one GPU, by samples."""
    return case.batch * PER_SAMPLE_S / step_s


def _one_weird_trick(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []

    def add(row: str, gpus: int, told: tuple[float, str] | None, ours: float) -> None:
        published, evidence = told if told is not None else (None, "no figure at hand")
        cells.append(PublishedCell(row, f"{gpus} GPUs", published, ours, evidence))
        progress(f"{row}, {gpus} GPUs: {ours:.2f}")

    for gpus in (2, 4, 8):
        case = case_of(gpus, BATCH)
        trick = one_weird_trick(case, _FIRST_CONNECTED)
        add("both kinds, 128 a GPU", gpus, TRICK[gpus], speed_up(case, trick.step_s))
    crowded = case_of(8, BATCH, sharing=4)
    trick = one_weird_trick(crowded, _FIRST_CONNECTED)
    add("both kinds, four on a bus", 8, TRICK[8], speed_up(crowded, trick.step_s))
    for gpus in (2, 4, 8):
        case = case_of(gpus, SMALL_BATCH)
        told = ONE_KIND if gpus == 4 else None
        alone = case.cost(Division(gpus))
        sent = sum(block.parameters for block in case.blocks) * case.number_bytes
        serial_s = alone.pipeline_s + case.links.all_reduce_s(gpus, 1, sent)
        shares = case.cost(Division(tensor=gpus)).step_s
        add("copies alone, 64 a GPU", gpus, told, speed_up(case, alone.step_s))
        add("copies alone, sums not hidden", gpus, told, speed_up(case, serial_s))
        add("shares alone, 64 a GPU", gpus, told, speed_up(case, shares))
    return cells


TABLE = PublishedTable(
    name="one-weird-trick",
    title="One weird trick: speed over one GPU, with one kind of parallelism and with both",
    source="Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks",
    unit="x",
    settings=(
        f"Closed forms. A sample takes {1e3 * PER_SAMPLE_S:.3g} ms, which is the published "
        f"{HOURS:g} hours of one GPU for {EPOCHS} epochs; cards of {BANDWIDTH / 1e9:g} GB/s (what "
        "PCI Express 2.0 gives of its 8) and 10 us, one for each GPU. Nothing was fitted. The sum "
        "of gradients overlaps with the backward pass, or does not where that is said; those who "
        "reached 2.2 had other GPUs. The row with four GPUs on a bus was added after the first "
        "look: eight GPUs hang on two processors."
    ),
    cells=13,
    compute=_one_weird_trick,
)
