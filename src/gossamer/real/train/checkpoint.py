"""What a checkpoint holds of one worker of `gossamer train`, and when it is written.

A worker always writes it between two steps. With a synchronous method all workers write at the same
step, so a resumed run goes on as if it had never stopped. With an asynchronous method each worker
writes at a step of its own; messages that are on their way then are lost.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.quantities import seconds
from gossamer.real.launch.console import say
from gossamer.real.replicas import PublishedReplica
from gossamer.real.session import Session
from gossamer.real.train import checkpoint_files
from gossamer.real.train.batches import Batches, LeasedBatches
from gossamer.real.train.checkpoint_files import Checkpoint, Facts
from gossamer.real.train.request import TrainRequest
from gossamer.real.transports.checked_values import number_from, numbers_from
from gossamer.real.transports.transport import Store
from gossamer.real.worker import RealWorker

_ASKS = 20
"""How often per interval synchronous workers agree on whether it is time."""
_FARTHEST = 1000
_WORKER = "worker"


@dataclass(frozen=True)
class WorkerCounts:
    """The numbers that a worker goes on counting from."""

    gradients: int
    """The gradients computed so far; the number is a key of dropout and augmentation."""
    bytes: int
    seconds: float
    next_evaluation: float


def save(
    folder: Path, session: Session, worker: RealWorker, replica: PublishedReplica,
    batches: Batches, buffers: Tensor, counts: WorkerCounts,
) -> None:  # fmt: skip
    """Write the part of this process between two steps of its worker."""
    tensors = {"buffers": buffers.clone()}
    replicas: Facts = {}
    for end, held in [(_WORKER, replica), *session.servers.items()]:
        state = held.state_dict()
        tensors |= {f"{end}/{what}": state[what] for what in ("value", "optimiser")}
        tensors |= {f"{end}/memory/{what}": value for what, value in state["memory"].items()}
        replicas[str(end)] = {what: state[what] for what in ("version", "steps", "weight")}
    facts: Facts = {
        "step": worker.step,
        "epoch": batches.epoch,
        "options": dict(session.options),
        "replicas": replicas,
        "servers": [str(end) for end in session.servers],
        "pace": batches.state(),
        "random": worker.rng.getstate(),
        "counts": dataclasses.asdict(counts),
        "metrics": session.metrics.state(),
    }
    checkpoint_files.write(folder, session.rank, tensors, facts)


class WorkerState:
    """The part of a checkpoint that one worker goes on from."""

    def __init__(self, whole: Checkpoint, rank: int) -> None:
        self._whole = whole
        self._rank = rank
        self._tensors = whole.tensors_of(rank)
        self._facts = whole.facts[whole.source_of(rank)]

    @staticmethod
    def read(folder: Path, rank: int) -> WorkerState:
        return WorkerState(checkpoint_files.read(folder), rank)

    @property
    def options(self) -> dict[str, Any]:
        """The method's options as they were: a longer run would resolve some differently."""
        return self._facts["options"]

    @property
    def counts(self) -> WorkerCounts:
        return WorkerCounts(**self._facts["counts"])

    @property
    def buffers(self) -> Tensor:
        return self._tensors["buffers"]

    def value_of(self, end: int, size: int) -> Tensor:
        """What a worker or server of this process publishes from its first moment on."""
        return self._tensors[f"{_WORKER if end < size else end}/value"]

    def load(self, replica: PublishedReplica, end: int | None = None) -> None:
        """Restore all of a replica but its value. `end=None` means the worker's own replica."""
        name = _WORKER if end is None else str(end)
        prefix = f"{name}/memory/"
        memory = {
            key.removeprefix(prefix): value
            for key, value in self._tensors.items() if key.startswith(prefix)
        }  # fmt: skip
        state = {"optimiser": self._tensors[f"{name}/optimiser"], "memory": memory}
        replica.load_state_dict(self._facts["replicas"][name] | state)

    def restore(self, session: Session, worker: RealWorker, batches: Batches) -> None:
        whole, facts = self._whole, self._facts
        worker.step = facts["step"]
        everyone = [one["pace"] for one in whole.facts.values()]
        if self._rank not in whole.facts:
            # This worker had died. It starts from another worker's state, with its own random
            # state and counters.
            own = facts["pace"] if "claimed" in facts["pace"] else {
                **facts["pace"], "taken": [], "left": [0, 0], "drawn": 0
            }  # fmt: skip
            batches.resume(own, everyone)
            return
        batches.resume(facts["pace"], everyone)
        version, internal, gauss = facts["random"]
        worker.rng.setstate((version, tuple(internal), gauss))
        session.metrics.load(self._rank, facts["metrics"])
        session.router.bytes_sent = self.counts.bytes


# ---------------------------------------------------------------------- when


@dataclass(frozen=True)
class Every:
    """An interval: of seconds, or of steps."""

    amount: float
    is_steps: bool

    @staticmethod
    def parse(text: str) -> Every:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|steps)", text.strip())
        if found is None or float(found[1]) <= 0 or (found[2] == "steps" and "." in found[1]):
            raise ConfigurationError(
                "--checkpoint-every must be a time such as 30s or 5m, or steps such as 100steps, "
                f"got {text!r}"
            )
        if found[2] == "steps":
            return Every(float(found[1]), True)
        return Every(seconds(text, "--checkpoint-every"), False)


class CheckpointTimer(Protocol):
    """Says under which number a checkpoint is to be written now, if at all."""

    def due(self, step: int) -> int | None: ...

    def at_end(self, step: int) -> int: ...


class SynchronousTimer:
    """For synchronous methods: everyone comes to the same answer at the same step."""

    def __init__(self, every: Every, store: Store, begin: int) -> None:
        self._every = every
        self._store = store
        self._ask_at = begin + 1
        self._asked = (begin, time.monotonic())
        self._next = time.monotonic() + every.amount

    def due(self, step: int) -> int | None:
        if self._every.is_steps:
            return step if step > 0 and step % int(self._every.amount) == 0 else None
        if step != self._ask_at:
            return None
        # The first worker to ask decides by its clock, and says when all will ask again.
        now = time.monotonic()
        before, then = self._asked
        per_step = max(1e-6, (now - then) / (step - before))
        ahead = max(1, min(_FARTHEST, int(self._every.amount / _ASKS / per_step)))
        proposal = f"{int(now >= self._next)} {ahead}"
        key = f"checkpoint/{step}"
        agreed = self._store.agree(key, proposal)
        decided, *_, ahead = numbers_from(key, agreed, " ")
        self._asked, self._ask_at = (step, now), step + ahead
        if not decided:
            return None
        self._next = now + self._every.amount
        return step

    def at_end(self, step: int) -> int:
        return step


class AsynchronousTimer:
    """For asynchronous methods: by the batches that all have taken, or by each worker's clock.

    The next checkpoint begins when all living workers have made the last one, and a worker that is
    due makes the one that another has begun. So each becomes whole, however unequal workers are.
    """

    def __init__(
        self, every: Every, store: Store, batches: LeasedBatches, living: Callable[[], int],
        size: int, begin: int,
    ) -> None:  # fmt: skip
        self._every = every
        self._store = store
        self._batches = batches
        self._living = living
        self._size = size
        self._last = begin
        self._next = time.monotonic() + every.amount
        self._made = 0

    def due(self, step: int) -> int | None:
        if not self._is_time() or not self._have_all_made_the_last():
            return None
        key = f"checkpoint/{self._made}"
        self._last = number_from(key, self._store.agree(key, str(self._name())))
        self._next = time.monotonic() + self._every.amount
        self._store.add(f"checkpoint/{self._made}/made", 1)
        self._made += 1
        return self._last

    def at_end(self, step: int) -> int:
        """A number after all others: none of them is higher than the steps of the run."""
        return self._steps(self._batches.batches) + 1

    def _is_time(self) -> bool:
        if not self._every.is_steps:
            return time.monotonic() >= self._next
        return self._rounded(self._batches.reached // self._size) > self._last

    def _have_all_made_the_last(self) -> bool:
        if self._made == 0:
            return True
        return self._store.add(f"checkpoint/{self._made - 1}/made", 0) >= self._living()

    def _name(self) -> int:
        """The steps that each worker has made on average."""
        if self._every.is_steps:
            return self._rounded(self._batches.reached // self._size)
        return self._steps(self._batches.position)

    def _steps(self, batches: int) -> int:
        return -(-batches // self._size)

    def _rounded(self, steps: int) -> int:
        return steps - steps % int(self._every.amount)


class CheckpointedBatches:
    """Batches with a pause between two steps in which a checkpoint may be written."""

    def __init__(
        self, batches: Batches, timer: CheckpointTimer, save: Callable[[int], None], begin: int
    ) -> None:
        self._batches = batches
        self._timer = timer
        self._save = save
        self._last = begin

    @property
    def expected_steps(self) -> int:
        return self._batches.expected_steps

    def open_step(self, step: int) -> bool:
        self._consider(self._timer.due(step))
        if self._batches.open_step(step):
            return True
        # The last checkpoint is for runs that are made longer later on.
        self._consider(self._timer.at_end(step))
        return False

    def _consider(self, name: int | None) -> None:
        if name is not None and name > self._last:
            self._last = name
            self._save(name)


class CheckpointWriter:
    """Writes one worker's checkpoints."""

    def __init__(
        self, request: TrainRequest, session: Session, save: Callable[[Path], None]
    ) -> None:
        """`save` writes the part of this process into the folder of a checkpoint."""
        self._request = request
        self._session = session
        self._router = session.router
        self._save_part = save
        self.count = 0
        self.seconds = 0.0
        """How long the worker stood still for them."""

    def between_steps(self, batches: Batches) -> Batches | CheckpointedBatches:
        """The batches with checkpoints where they are wanted."""
        if self._request.checkpoint_every is None:
            return batches
        every, store = Every.parse(self._request.checkpoint_every), self._router.transport.store
        start = self._request.checkpoint
        begin = 0 if start is None else int(start.name)
        if not isinstance(batches, LeasedBatches):
            timer = SynchronousTimer(every, store, begin)
        else:
            router = self._router
            timer = AsynchronousTimer(
                every, store, batches, lambda: len(router.live), router.addresses.size, begin
            )
        return CheckpointedBatches(batches, timer, self._save, begin)

    def _save(self, name: int) -> None:
        began = time.monotonic()
        if self._session.is_synchronous and self._session.method.server is not None:
            self._let_servers_catch_up()
        folder = self._request.place / "checkpoint" / str(name)
        addresses = self._router.addresses
        try:
            self._save_part(folder)
            servers = range(addresses.size, addresses.ends)
            if checkpoint_files.complete(folder, self._router.live, servers, addresses.size):
                checkpoint_files.prune(folder.parent)
        except OSError as error:
            # A full disk must not end a run that could go on without it.
            say(f"worker {self._router.rank} could not write checkpoint {name}: {error}")
        self.count += 1
        self.seconds += time.monotonic() - began

    def _let_servers_catch_up(self) -> None:
        """A gradient on its way to a server would be in no part of the checkpoint."""
        router = self._router
        for process in sorted(router.live - {router.rank}):
            # The answer comes after everything that was sent there before, or the process dies.
            answer = router.call(process, "flush")
            router.driver.wait(answer, "checkpoint")
        everyone = router.transport.all_reduce([torch.zeros(1)], range(router.addresses.size))
        router.driver.wait(everyone, "checkpoint")
