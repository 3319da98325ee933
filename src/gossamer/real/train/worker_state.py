"""What a checkpoint keeps of one worker of `gossamer train` and its servers, and how they get it
back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.real.batches import Batches
from gossamer.real.books import Books
from gossamer.real.replicas import WindowReplica
from gossamer.real.train import checkpoint_files as checkpoint
from gossamer.real.train.checkpoint_files import Checkpoint, Facts
from gossamer.real.worker import RealWorker

_WORKER = "worker"
_BOOKS = ("steps", "samples", "exchanges", "computing", "waiting", "observed",
          "longest_gap", "longest_gap_at")  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """The numbers that a worker goes on counting from."""

    gradients: int
    """Numbers the keys of dropout and augmentation."""
    bytes: int
    seconds: float
    next_evaluation: float


@dataclass(frozen=True)
class Parts:
    """Whatever of one process a checkpoint speaks of."""

    worker: RealWorker
    replica: WindowReplica
    servers: Mapping[int, WindowReplica]
    pace: Batches
    books: Books
    buffers: Tensor
    counts: Counts

    @property
    def named(self) -> dict[str, WindowReplica]:
        return {_WORKER: self.replica} | {str(end): held for end, held in self.servers.items()}


def save(folder: Path, parts: Parts, options: Mapping[str, Any]) -> None:
    """Between two steps of this worker."""
    tensors = {"buffers": parts.buffers.clone()}
    replicas: Facts = {}
    for name, replica in parts.named.items():
        state = replica.state_dict()
        tensors |= {f"{name}/{what}": state[what] for what in ("value", "optimiser")}
        tensors |= {f"{name}/memory/{what}": value for what, value in state["memory"].items()}
        replicas[name] = {what: state[what] for what in ("version", "steps", "weight")}
    facts: Facts = {
        "step": parts.worker.step,
        "epoch": parts.pace.epoch,
        "options": dict(options),
        "replicas": replicas,
        "servers": [str(end) for end in parts.servers],
        "pace": parts.pace.state(),
        "random": parts.worker.rng.getstate(),
        "counts": dataclasses.asdict(parts.counts),
        "books": {name: getattr(parts.books, name) for name in _BOOKS},
        "staleness": [[updates, count] for updates, count in parts.books.staleness.items()],
    }
    checkpoint.write(folder, parts.worker.rank, tensors, facts)


class Kept:
    """The part of a checkpoint that one worker goes on from."""

    def __init__(self, whole: Checkpoint, rank: int) -> None:
        self._whole = whole
        self._rank = rank
        self._tensors = whole.tensors_of(rank)
        self._facts = whole.facts[whole.source_of(rank)]

    @staticmethod
    def of(folder: str, rank: int) -> Kept:
        return Kept(checkpoint.read(Path(folder)), rank)

    @property
    def options(self) -> dict[str, Any]:
        """As they were: a run that has grown would resolve some of them differently."""
        return self._facts["options"]

    @property
    def counts(self) -> Counts:
        return Counts(**self._facts["counts"])

    @property
    def buffers(self) -> Tensor:
        return self._tensors["buffers"]

    def value_of(self, end: int, size: int) -> Tensor:
        """What an end of this process publishes from its first moment on."""
        return self._tensors[f"{_WORKER if end < size else end}/value"]

    def load(self, replica: WindowReplica, end: int | None = None) -> None:
        """All of a replica but its value; without an end, the worker's."""
        name = _WORKER if end is None else str(end)
        prefix = f"{name}/memory/"
        memory = {
            key.removeprefix(prefix): value
            for key, value in self._tensors.items() if key.startswith(prefix)
        }  # fmt: skip
        state = {"optimiser": self._tensors[f"{name}/optimiser"], "memory": memory}
        replica.load_state_dict(self._facts["replicas"][name] | state)

    def restore(self, worker: RealWorker, pace: Batches, books: Books) -> None:
        whole, facts = self._whole, self._facts
        worker.step = facts["step"]
        everyone = [one["pace"] for one in whole.facts.values()]
        if self._rank not in whole.facts:
            # It had died: it starts like another one, with dice and books of its own.
            own = facts["pace"] if "claimed" in facts["pace"] else {
                **facts["pace"], "taken": [], "left": [0, 0], "drawn": 0
            }  # fmt: skip
            pace.resume(own, everyone)
            return
        pace.resume(facts["pace"], everyone)
        version, internal, gauss = facts["random"]
        worker.rng.setstate((version, tuple(internal), gauss))
        for name, value in facts["books"].items():
            setattr(books, name, value)
        books.bytes = self.counts.bytes
        books.staleness = dict(facts["staleness"])
