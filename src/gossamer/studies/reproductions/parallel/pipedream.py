"""PipeDream's plans (Narayanan et al. 2019): which stages and copies its planner takes."""

from __future__ import annotations

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.plan.hardware.device import DEVICES
from gossamer.plan.parallel.networks import make_network
from gossamer.plan.parallel.pace import ClusterPassTimes, DevicePassTimes, PassTimes
from gossamer.plan.parallel.plan import Division, ParallelCase
from gossamer.plan.parallel.replicated_stages import plan_stages
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable

CLUSTERS = {
    "4 x 4 V100, 10 Gbit": Cluster(
        workers=16, workers_per_machine=4,
        network=Wires(bandwidth=10e9 / 8, latency=50e-6, memory_bandwidth=10e9),
    ),
    "2 x 8 V100, 25 Gbit": Cluster(
        workers=16, workers_per_machine=8,
        network=Wires(bandwidth=25e9 / 8, latency=50e-6, memory_bandwidth=30e9),
    ),
}  # fmt: skip
"""PCI Express inside a machine of the first, NVLink inside one of the second."""
BATCHES = {"vgg-16": 64, "resnet-50": 128, "alexnet": 256}
PROFILED_S = {"vgg-16": 0.676}
"""Of the batch of 128 in the authors' profile of their GPU, forward and backward."""
PUBLISHED = {
    ("vgg-16", "4 x 4 V100, 10 Gbit"): ("15-1", 5.28), ("vgg-16", "2 x 8 V100, 25 Gbit"):
    ("15-1", 2.98), ("resnet-50", "4 x 4 V100, 10 Gbit"): ("16", 1.0),
    ("resnet-50", "2 x 8 V100, 25 Gbit"): ("16", 1.0), ("alexnet", "4 x 4 V100, 10 Gbit"):
    ("15-1", 4.92), ("alexnet", "2 x 8 V100, 25 Gbit"): ("15-1", 2.04),
}  # fmt: skip
_QUOTED = "quoted from memory of the paper's table 1"


def case_of(network: str, cluster: Cluster) -> ParallelCase:
    """The network on V100s: by its operators, or where the authors published a profile, by it."""
    blocks, batch = make_network(network).blocks, BATCHES[network]
    device: PassTimes = DevicePassTimes(blocks, DEVICES["v100"], "fp32")
    if network in PROFILED_S:
        device = ClusterPassTimes(blocks, Compute(0.0, per_sample=PROFILED_S[network] / 128))
    return ParallelCase(blocks, cluster, device, batch * cluster.workers)


def gain(case: ParallelCase) -> tuple[str, float, float]:
    """The plan as the paper writes it, and how many times as fast as copies alone it is: with
    copies that overlap their sums with the backward pass, and with copies that do not."""
    plan, copies = plan_stages(case), case.cost(Division(case.cluster.workers))
    blocks = sum(block.parameters for block in case.blocks) * case.number_bytes
    serial_s = copies.pipeline_s + case.links.all_reduce_s(case.cluster.workers, 1, blocks)
    return str(plan), copies.step_s / plan.step_s, serial_s / plan.step_s


def _pipedream(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for (network, where), (stages, faster) in PUBLISHED.items():
        case = case_of(network, CLUSTERS[where])
        plan, overlapped, serial = gain(case)
        row = f"{network}, {where}: {stages}; ours {plan}"
        for column, published, ours in (
            ("stages", float(stages.count("-") + 1), float(plan.count("-") + 1)),
            ("copies of the first stage", float(stages.split("-")[0]), float(plan.split("-")[0])),
            ("gain over copies", faster, overlapped),
            ("gain, sums not hidden", faster, serial),
        ):
            cells.append(PublishedCell(row, column, published, ours, _QUOTED))
            progress(f"{row}: {column} {ours:.3g}")
    return cells


def verdict(cells: list[PublishedCell]) -> str:
    """Whether the order is that of the paper; the gains stand in the table."""
    rows = dict.fromkeys(cell.row for cell in cells)
    plans = [row.split(": ")[1].replace("ours ", "").split("; ") for row in rows]
    same = sum(told == ours for told, ours in plans)
    return (
        f"{same} of {len(plans)} plans are those of the paper, stage for stage\n"
        f"published figures: {_QUOTED}"
    )


TABLE = PublishedTable(
    name="pipedream",
    title="PipeDream's plans: stages, copies of the first, gain over data parallelism",
    source="Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training",
    unit="",
    settings=(
        "Its planner with the ring of the cluster. VGG-16 takes the time of the authors' own "
        "profile (0.676 s for 128 samples on their GPU), dealt to the layers by their operations; "
        "the others are estimated from the V100's data sheet with curves of another GPU "
        "(docs/cost.md). Links as the paper names them, inside a machine 10 GB/s (PCI Express) and "
        "30 GB/s (NVLink): assumed. Nothing was fitted. Samples of a GPU: 64, 128 and 256."
    ),
    cells=4 * len(PUBLISHED),
    compute=_pipedream,
    verdict=verdict,
)
