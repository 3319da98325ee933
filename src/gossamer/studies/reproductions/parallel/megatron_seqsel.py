"""Korthikanti et al. 2022: time and memory of transformers up to 10^12 parameters, when all
activations are computed again and when sequences are split and only attention is."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.config.cluster import Cluster, Wires
from gossamer.plan.hardware.device import DEVICES
from gossamer.plan.parallel.pace import DevicePassTimes
from gossamer.plan.parallel.plan import Division, ParallelCase
from gossamer.plan.parallel.transformer import TransformerSizes, transformer_blocks
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable

_GIB = 2.0**30
_READ = "read in the validation files of a program that carries the paper's measurements"
_POSITIONS, _WORDS, _TENSOR = 2048, 51_200, 8
_PARAMETER_BYTES = 18
"""2 of the parameter, 4 of its gradient, 4 of a copy and 8 of Adam, as in the paper's program."""


@dataclass(frozen=True)
class MegatronRun:
    """One model of the paper, and what was measured."""

    width: int
    heads: int
    layers: int
    stages: int
    chunks: int
    batch: int
    microbatch: int
    full_s: float
    selective_s: float
    none_gib: float
    selective_gib: float
    state_gib: float


RUNS = {
    "22B": MegatronRun(6144, 64, 48, 1, 1, 4, 4, 1.42, 1.10, 59.25, 9.56, 45.56),
    "175B": MegatronRun(12288, 96, 96, 8, 3, 64, 1, 18.13, 13.75, 66.84, 12.35, 45.56),
    "530B": MegatronRun(20480, 128, 105, 35, 3, 280, 1, 49.05, 37.83, 114.0, 23.08, 31.64),
    "1T": MegatronRun(25600, 160, 128, 64, 1, 512, 1, 94.42, 71.49, 131.3, 26.56, 32.96),
}
WIRES = Wires(bandwidth=25e9, latency=5e-6, memory_bandwidth=300e9)
"""One InfiniBand card for each GPU, NVLink inside a machine, both nominal."""


def case_of(run: MegatronRun) -> ParallelCase:
    """The model on A100s, eight to a machine."""
    blocks = transformer_blocks(
        TransformerSizes(run.width, run.layers, run.heads, _POSITIONS, _WORDS)
    )
    cluster = Cluster(workers=run.stages * _TENSOR, workers_per_machine=_TENSOR, network=WIRES)
    pace = DevicePassTimes(blocks, DEVICES["a100"], "bf16")
    return ParallelCase(blocks, cluster, pace, run.batch, slots=2, number_bytes=2)


def step_s(run: MegatronRun, case: ParallelCase, *, is_selective: bool) -> float:
    """The time of one batch."""
    name = "interleaved" if run.chunks > 1 else "1f1b"
    return case.cost(Division(
        1, run.stages, _TENSOR, name, run.batch // run.microbatch, run.chunks,
        recompute="attention" if is_selective else "full", is_sequence_split=is_selective,
    )).step_s  # fmt: skip


def activation_gib(run: MegatronRun, case: ParallelCase, *, is_selective: bool) -> float:
    """Of the layers on the first stage, which holds most."""
    layer = case.blocks[1]
    kept = layer.kept(is_selective=True) / _TENSOR if is_selective else layer.kept(_TENSOR)
    interleaved = 1 + (run.stages - 1) / (run.stages * run.chunks) if run.chunks > 1 else 1.0
    return kept * 2 * run.microbatch * run.layers * interleaved / _GIB


def state_gib(run: MegatronRun, case: ParallelCase) -> float:
    """Parameters, gradients and optimiser of the layers on one GPU."""
    return _PARAMETER_BYTES * run.layers * case.blocks[1].held(_TENSOR) / run.stages / _GIB


def _megatron(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for name, run in RUNS.items():
        case = case_of(run)
        full, part = (step_s(run, case, is_selective=one) for one in (False, True))
        none, kept = (activation_gib(run, case, is_selective=one) for one in (False, True))
        for column, published, ours in (
            ("seconds, all again", run.full_s, full),
            ("seconds, sequences and attention", run.selective_s, part),
            ("of the first", run.selective_s / run.full_s, part / full),
            ("activations, none again (GiB)", run.none_gib, none),
            ("activations, sequences and attention (GiB)", run.selective_gib, kept),
            ("states (GiB)", run.state_gib, state_gib(run, case)),
        ):
            cells.append(PublishedCell(name, column, published, ours, _READ))
            progress(f"{name}: {column} {ours:.4g}")
    return cells


TABLE = PublishedTable(
    name="megatron-seqsel",
    title="Transformers on A100s: seconds of a batch and GiB of a GPU",
    source="Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformers",
    unit="",
    settings=(
        "8 shares of each layer; 1, 8, 35 and 64 stages with 1, 3, 3 and 1 chunks; batches of 4, "
        "64, 280 and 512 in micro-batches of 4, 1, 1 and 1. The device is the A100 of `gossamer "
        "cost --hardware a100` in bf16, whose curves were fitted on an H200 to single operators "
        "and to no model; NVLink 300 GB/s and 25 GB/s for each GPU, nominal. Nothing was fitted "
        "here. Memory is of layers alone, as published, with 18 bytes a parameter."
    ),
    cells=6 * len(RUNS),
    compute=_megatron,
)
