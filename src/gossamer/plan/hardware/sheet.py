"""A cluster whose steps are taken from a data sheet or from a trace, and what fits into it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.plan.hardware.chrome_trace import TracedStep, read_trace
from gossamer.plan.hardware.device import find_device
from gossamer.plan.hardware.estimate import Estimate, estimate, sheet_text
from gossamer.plan.hardware.operators import PRECISIONS
from gossamer.plan.hardware.room import Room
from gossamer.quantities import show_bytes
from gossamer.tasks import Task


@dataclass(frozen=True)
class SheetChoices:
    """What a user says of machines that were not measured."""

    hardware: str | None = None
    trace: Path | None = None
    precision: str = "fp32"
    optimiser: str | None = None
    memory: float = 0.0


@dataclass(frozen=True)
class Sheet:
    """The cluster with its steps, what they were taken from, and the room of a worker."""

    cluster: Cluster
    made_from: Estimate | TracedStep | None
    room: Room | None

    def sentences(self) -> list[str]:
        told = [] if self.made_from is None else self.made_from.sentences()
        if self.room is not None and self.cluster.compute.memory:
            need = self.room.need("all_reduce")
            told.append(
                f"memory of a worker: {show_bytes(need.total)} of "
                f"{show_bytes(self.cluster.compute.memory)} with all_reduce ({need}); what drivers "
                "and libraries take of it is not counted"
            )
        return told

    def text(self, workload: str) -> str:
        """The TOML file of the cluster."""
        if self.made_from is None:
            raise ConfigurationError(
                "--out writes what --hardware or --trace has found; give one of them"
            )
        return sheet_text(self.cluster, self.made_from, workload)


def sheet(task: Task | None, cluster: Cluster, batch: int, chosen: SheetChoices) -> Sheet:
    """The steps of the task on the device of its data sheet, or as they were traced."""
    if chosen.precision not in PRECISIONS:
        raise unknown_name("precision", chosen.precision, PRECISIONS)
    device = None if chosen.hardware is None else find_device(chosen.hardware)
    made_from: Estimate | TracedStep | None = None
    compute = cluster.compute
    if chosen.trace is not None:
        made_from = read_trace(chosen.trace)
        compute = made_from.compute(0.0 if device is None else device.memory)
    elif device is not None:
        if task is None:
            raise ConfigurationError(
                "--hardware estimates the steps of a task; give one with --task, or the time of a "
                "gradient with --compute"
            )
        made_from = estimate(
            task, device, batch=batch, precision=chosen.precision, optimiser=chosen.optimiser
        )
        compute = made_from.compute
    if chosen.memory:
        compute = dataclasses.replace(compute, memory=chosen.memory)
    where = dataclasses.replace(cluster, compute=compute)
    if made_from is not None:
        source = device.title if device is not None else str(chosen.trace)
        where = dataclasses.replace(where, name="sheet", title=source, faults=())
    room = None
    if compute.memory and task is not None:
        if isinstance(made_from, Estimate):
            room = Room(where, made_from.work.size, made_from.work.activation_bytes)
        else:
            room = Room.of(
                task, where, batch, optimiser=chosen.optimiser, precision=chosen.precision
            )
    return Sheet(where, made_from, room)
