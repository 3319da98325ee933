"""A checkpoint of n workers made one of m workers.

All m begin with the model that the n hold together: the mean of their parameters, weighted as the
method weights them. What all of them remembered alike goes on (an outer velocity, the model of the
last meeting); what was one worker's own begins anew. Servers move to their new processes with all
that they hold. Samples that were done stay done, and the rest of a lease that nobody holds any more
is given out again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.compression.compressed_worker import without_residuals
from gossamer.errors import ConfigurationError
from gossamer.observe.metrics import Metrics
from gossamer.real.train import checkpoint_files
from gossamer.real.train.batches import LEASE
from gossamer.real.train.checkpoint_files import Checkpoint, Facts
from gossamer.real.train.request import TrainRequest

_WORKER = "worker"
Tensors = dict[str, Tensor]


def resized(found: Checkpoint, request: TrainRequest) -> Checkpoint:
    """Write the checkpoint for the workers of the request, in the place of this one."""
    settings = request.settings
    _check(found, request)
    size, workers = found.size, settings.cluster.workers
    ranks = sorted(found.facts)
    tensors = {rank: found.tensors_of(rank) for rank in ranks}
    model = _model_of(tensors, found.facts)
    agreed = _agreed_on(list(tensors.values()))
    paces = _paces([found.facts[rank]["pace"] for rank in ranks], workers, settings.batch or 1)
    servers = _servers(tensors, found.facts, size)
    is_leased = "taken" in paces[0]
    folder = found.path.parent / str(
        -(-found.step * size // workers) + 1 if is_leased else found.step + 1
    )
    if folder.exists():
        checkpoint_files.remove(folder)
    for rank in range(workers):
        source = ranks[rank % len(ranks)]
        own, facts = tensors[source], dict(found.facts[source])
        mine: Tensors = {
            "buffers": own["buffers"],
            f"{_WORKER}/value": model,
            f"{_WORKER}/optimiser": own[f"{_WORKER}/optimiser"],
            **{f"{_WORKER}/memory/{name}": value for name, value in agreed.items()},
        }
        replicas = {_WORKER: {**facts["replicas"][_WORKER], "weight": 1.0}}
        hosted = [number for number in servers if number % workers == rank]
        for number in hosted:
            end, (parts, kept) = str(workers + number), servers[number]
            mine |= {f"{end}/{name}": value for name, value in parts.items()}
            replicas[end] = kept
        facts |= {"replicas": replicas, "servers": [str(workers + number) for number in hosted]}
        facts["pace"] = paces[rank]
        if rank != source:
            facts["random"] = random.Random(f"{settings.seed}/resized/{rank}").getstate()
            facts["counts"] = {**facts["counts"], "gradients": 0, "bytes": 0}
            facts["metrics"] = Metrics(workers, [rank]).state()
        # What the workers did that are no more counts for those who go on.
        for gone in [gone for gone in ranks if gone >= workers and gone % workers == rank]:
            facts["metrics"] = _together(facts["metrics"], found.facts[gone]["metrics"])
        checkpoint_files.write(folder, rank, {k: v.contiguous() for k, v in mine.items()}, facts)
    checkpoint_files.complete(folder, range(workers), [], workers)
    made = checkpoint_files.read(folder)
    for other in found.path.parent.iterdir():
        if other != folder and other.name.isdecimal():
            checkpoint_files.remove(other)
    return made


def _check(found: Checkpoint, request: TrainRequest) -> None:
    method, split = request.settings.method, request.settings.split
    workers = request.settings.cluster.workers
    reason = None
    if method.method.output == "ensemble":
        reason = "its models are never averaged"
    elif method.shape.machines > 1 or method.balance:
        reason = "its stages or shares are those of so many workers"
    elif split != "shuffled":
        reason = f"with the split {split} every worker has data of its own"
    if reason is not None:
        raise ConfigurationError(
            f"the run in {request.place} has {found.size} workers and cannot go on with {workers}, "
            f"because {reason}; start {found.size}"
        )


def _together(one: Facts, other: Facts) -> Facts:
    counts = ("steps", "samples", "exchanges", "computing_seconds")
    by_key = ("waiting_seconds", "staleness")
    return {
        **one,
        **{name: one[name] + other[name] for name in counts},
        **{
            name: {
                key: one[name].get(key, 0) + other[name].get(key, 0)
                for key in {**one[name], **other[name]}
            }
            for name in by_key
        },
    }


def _model_of(tensors: Mapping[int, Tensors], facts: Mapping[int, Facts]) -> Tensor:
    """The mean of all workers: with push-sum weights the sum of values over that of weights."""
    values = torch.stack([own[f"{_WORKER}/value"].double() for own in tensors.values()])
    weight = sum(float(facts[rank]["replicas"][_WORKER]["weight"]) for rank in tensors)
    first = next(iter(tensors.values()))[f"{_WORKER}/value"]
    if all(torch.equal(row, values[0]) for row in values) and weight == len(tensors):
        return first
    return (values.sum(0) / weight).to(first.dtype)


def _agreed_on(everyone: Sequence[Tensors]) -> Tensors:
    """What every worker remembers with the same bits."""
    prefix = f"{_WORKER}/memory/"
    first = {
        name.removeprefix(prefix): value
        for name, value in everyone[0].items() if name.startswith(prefix)
    }  # fmt: skip
    alike = {
        name: value
        for name, value in first.items()
        if all(prefix + name in own and torch.equal(own[prefix + name], value) for own in everyone)
    }
    return without_residuals(alike)


def _servers(
    tensors: Mapping[int, Tensors], facts: Mapping[int, Facts], size: int
) -> dict[int, tuple[Tensors, Facts]]:
    """By number: what each server holds, and its counts."""
    found: dict[int, tuple[Tensors, Facts]] = {}
    for rank, own in facts.items():
        for end in own["servers"]:
            prefix = f"{end}/"
            parts = {
                name.removeprefix(prefix): value
                for name, value in tensors[rank].items() if name.startswith(prefix)
            }  # fmt: skip
            found[int(end) - size] = (parts, own["replicas"][end])
    return found


def _paces(before: Sequence[Facts], workers: int, batch: int) -> list[dict[str, Any]]:
    """The place in the data of each of so many workers."""
    if "claimed" in before[0]:
        claimed = before[0]["claimed"]
        drawn = claimed // (batch * workers)
        return [{**before[0], "drawn": drawn}] * workers
    nothing = {**before[0], "taken": [], "left": [0, 0], "drawn": 0}
    paces: list[dict[str, Any]] = [
        dict(before[rank]) if rank < len(before) else dict(nothing) for rank in range(workers)
    ]
    for number, own in enumerate(before[workers:]):
        # What was left of a lease is done again as a whole, by whoever asks next.
        taken = {lease for run in own["taken"] for lease in range(*run)}
        if own["left"][0] < own["left"][1]:
            taken.discard(own["left"][0] // LEASE)
        heir = paces[number % workers]
        heir["taken"] = [*heir["taken"], *([lease, lease + 1] for lease in sorted(taken))]
    return paces
