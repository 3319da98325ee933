"""From a task or a network, a cluster and a data sheet to the case that is searched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from gossamer.config.cluster import Cluster, Compute
from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.pipeline.stages import PartCost, part_costs
from gossamer.plan.cost.workload import workload_of
from gossamer.plan.hardware.device import find_device
from gossamer.plan.hardware.sheet import SheetChoices, sheet
from gossamer.plan.parallel.layer import Block, Layer
from gossamer.plan.parallel.networks import LayerTable, make_network
from gossamer.plan.parallel.pace import ClusterPassTimes, DevicePassTimes, PassTimes
from gossamer.plan.parallel.plan import ParallelCase
from gossamer.tasks import Task

_IMAGE_BATCH, _TEXT_BATCH = 32, 8
_ELEMENT = 4


@dataclass(frozen=True)
class ParallelQuestion:
    """What is to be divided, and over what."""

    network: LayerTable
    case: ParallelCase
    batch: int
    """Samples of a step for each worker of the cluster."""


def network_of(task: Task) -> LayerTable:
    """The chain of a task's model, each part counted and measured once on two samples."""
    inputs = task.train.first(2).inputs
    if not isinstance(inputs, torch.Tensor):
        raise ConfigurationError(
            f"the model of {task.name} cannot be divided, because it takes its inputs by name and "
            "a chain takes one tensor"
        )
    with torch.random.fork_rng(devices=[]):
        model = task.make_model()
    parts = part_costs(model, inputs)
    before = [float(inputs[0].numel()), *(part.sends / _ELEMENT for part in parts)]
    blocks = tuple(_block(part, enters) for part, enters in zip(parts, before, strict=False))
    return LayerTable(task.name, task.spec or task.name, blocks)


def _block(part: PartCost, enters: float) -> Block:
    outputs = part.sends / _ELEMENT
    layer = Layer(
        part.name, "part", (part.work - outputs) / 2, part.parameters, enters, outputs,
        kept_split=part.holds / _ELEMENT, outside=max(1, round(outputs)),
    )  # fmt: skip
    return Block(part.name, (layer,), outputs, (outputs,) * part.reductions)


def question_of_task(
    task: Task, cluster: Cluster, batch: int | None, chosen: SheetChoices
) -> ParallelQuestion:
    """The steps are as the cluster or the data sheet says, as `gossamer simulate` takes them."""
    own = _checked(batch) or task.batch
    made = sheet(task, cluster, workload_of(task, batch=own), chosen)
    network = network_of(task)
    slots = len(make_optimiser(chosen.optimiser or task.optimiser).slots)
    pace = ClusterPassTimes(network.blocks, made.cluster.compute)
    return _question(network, made.cluster, pace, own, slots, chosen.precision)


def question_of_network(
    name: str, cluster: Cluster, batch: int | None, chosen: SheetChoices, compute_s: float = 0.0
) -> ParallelQuestion:
    """A layer table knows operations and no times: these are a data sheet's, or given for a
    gradient of a worker's batch."""
    network = make_network(name)
    own = _checked(batch) or (_TEXT_BATCH if network.sample == "text" else _IMAGE_BATCH)
    usual = "adamw" if network.sample == "text" else "sgd:momentum=0.9"
    slots = len(make_optimiser(chosen.optimiser or usual).slots)
    if chosen.trace is not None:
        raise ConfigurationError(
            f"--trace holds the step of another model than {name}; give --hardware or --compute"
        )
    if chosen.hardware is not None:
        device = find_device(chosen.hardware)
        pace: PassTimes = DevicePassTimes(network.blocks, device, chosen.precision)
        memory, workspace = chosen.memory or device.memory, device.workspace
    elif compute_s:
        pace = ClusterPassTimes(network.blocks, Compute(0.0, per_sample=compute_s / own))
        memory, workspace = chosen.memory or cluster.compute.memory, 0.0
    else:
        raise ConfigurationError(
            f"the table of {name} has operations and no times; give a data sheet with --hardware, "
            "such as h100, or the time of a gradient with --compute"
        )
    where = dataclasses.replace(
        cluster, compute=dataclasses.replace(cluster.compute, memory=memory)
    )
    made = _question(network, where, pace, own, slots, chosen.precision)
    return dataclasses.replace(made, case=dataclasses.replace(made.case, workspace=workspace))


def _checked(batch: int | None) -> int | None:
    if batch is not None and batch < 1:
        raise ConfigurationError(f"batch must be at least 1, got {batch}")
    return batch


def _question(
    network: LayerTable, cluster: Cluster, pace: PassTimes, batch: int, slots: int, precision: str
) -> ParallelQuestion:
    # A slow worker or a site of its own makes machines unequal, which no closed form here knows.
    if cluster.sites.names or any(fault.kind == "slow" for fault in cluster.faults):
        raise ConfigurationError(
            f"--parallel takes workers that are alike, and {cluster.name} has slow ones or sites; "
            "play a division with `gossamer simulate --method all_reduce:stages=2`"
        )
    size = 2 if precision == "bf16" else 4
    case = ParallelCase(
        network.blocks, cluster, pace, batch * cluster.workers, slots, number_bytes=size
    )
    return ParallelQuestion(network, case, batch)
