"""A cluster whose steps are taken from a data sheet or from a trace, and what fits into it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.plan.cost.workload import Workload
from gossamer.plan.hardware.chrome_trace import TracedStep, read_trace
from gossamer.plan.hardware.device import find_device
from gossamer.plan.hardware.estimate import Estimate, estimate, sheet_text
from gossamer.plan.hardware.operators import PRECISIONS
from gossamer.plan.hardware.room import Room
from gossamer.quantities import show_bytes
from gossamer.tasks import Task
from gossamer.tasks.flat_model import ModelSize


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
            unknown = (
                "" if self.room.activation_bytes else "activations, of which a size tells none, "
            )
            told.append(
                f"memory of a worker: {show_bytes(need.total)} of "
                f"{show_bytes(self.cluster.compute.memory)} with all_reduce ({need}); {unknown}"
                "what drivers and libraries take of it is not counted"
            )
        return told

    def layer_rows(self) -> list[dict[str, Any]]:
        """What each layer takes; empty where nothing was estimated or traced."""
        return [] if self.made_from is None else self.made_from.layer_rows()

    def text(self, workload: str) -> str:
        """The TOML file of the cluster."""
        if self.made_from is None:
            raise ConfigurationError(
                "--out writes what --hardware or --trace has found; give one of them"
            )
        return sheet_text(self.cluster, self.made_from, workload)


def sheet(
    task: Task | None, cluster: Cluster, workload: Workload, chosen: SheetChoices
) -> Sheet:  # fmt: skip
    """The steps of the task on the device of its data sheet, or as they were traced."""
    batch = workload.batch
    if chosen.precision not in PRECISIONS:
        raise unknown_name("precision", chosen.precision, PRECISIONS)
    device = None if chosen.hardware is None else find_device(chosen.hardware)
    made_from: Estimate | TracedStep | None = None
    compute = cluster.compute
    if chosen.trace is not None:
        if device is not None:
            raise ConfigurationError(
                "--trace and --hardware both say how long a step takes; give one of them, and the "
                "memory of a traced device with --memory"
            )
        made_from = read_trace(chosen.trace)
        compute = made_from.compute(compute)
    elif device is not None:
        if task is None:
            raise ConfigurationError(
                "--hardware estimates the steps of a task; give one with --task, or the time of a "
                "gradient with --compute"
            )
        made_from = estimate(
            task, device, batch=batch, precision=chosen.precision, optimiser=chosen.optimiser
        )
        compute = made_from.compute(compute)
    if chosen.memory:
        compute = dataclasses.replace(compute, memory=chosen.memory)
    where = dataclasses.replace(cluster, compute=compute)
    if made_from is not None:
        source = device.title if device is not None else str(chosen.trace)
        where = dataclasses.replace(where, name="sheet", title=source)
    room = None
    if compute.memory:
        if task is None:
            size = ModelSize(round(workload.model_bytes), workload.optimiser_slots)
            room = Room(where, size, 0.0)
        elif isinstance(made_from, Estimate):
            room = Room(where, made_from.work.size, made_from.work.activation_bytes)
        else:
            room = Room.of(
                task, where, batch, optimiser=chosen.optimiser, precision=chosen.precision
            )
    return Sheet(where, made_from, room)
