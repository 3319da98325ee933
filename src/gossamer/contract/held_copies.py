"""What a method holds besides its replica: the copies of a model that live while a run goes on.

Every tensor of the size of a model that is made while a worker's or a server's text runs belongs to
it until it is freed. What arrives is copied for whom it reaches, as a network would do: in virtual
time both ends of a message share one tensor. Gradients as the engine gives them are not counted,
because every step has one; nor are the matrices of replicas and of the optimiser.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.sim.engine import Evaluated
from gossamer.sim.simulation import Simulation

_EVERY = 7
"""Gradients between two looks; a number that has nothing in common with usual periods."""


class HeldCopies(TorchDispatchMode):
    """Counts the models that each end of a simulation holds, for the time of its run."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        world = simulation.world
        self.most: Counter[int] = Counter()
        """By worker, or server, the most models at one time while a gradient is computed."""
        self._world = world
        self._bytes = world.workers.parameters[0].nbytes
        self._live: dict[int, weakref.ref[Any]] = {}
        self._held: Counter[int] = Counter()
        self._receiver: int | None = None
        self._looks = 0
        self._watch_mailboxes()
        self._pass_over_gradients(simulation)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage().nbytes() == self._bytes:
                self._hold(one)
        return made

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if (known := self._live.get(key)) is not None and known() is storage:
            return
        current = self._world.kernel.current
        owner = self._receiver
        if owner is None:
            owner = -1 if current is None else current.worker

        def freed(_: object) -> None:
            self._held[owner] -= 1
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, freed)
        self._held[owner] += 1

    def look(self) -> None:
        """Note what everybody holds now, without what nobody can reach any more."""
        self._looks += 1
        if self._looks % _EVERY:
            return
        gc.collect()
        for owner, count in self._held.items():
            self.most[owner] = max(self.most[owner], count)

    def _watch_mailboxes(self) -> None:
        for end, mailbox in enumerate(self._world.mailboxes):
            usual = mailbox.deliver

            def deliver(tag: Any, message: Any, end: int = end, usual: Any = usual) -> Any:
                before, self._receiver = self._receiver, end
                try:
                    copied = dataclasses.replace(message, payload=_copied(message.payload))
                finally:
                    self._receiver = before
                del message
                return usual(tag, copied)

            cast(Any, mailbox).deliver = deliver

    def _pass_over_gradients(self, simulation: Simulation) -> None:
        engine, usual = simulation.engine, simulation.engine.evaluate
        batcher = cast(Any, self._world.batcher)
        start = batcher.start

        def evaluate(points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
            found = usual(points, buffers, batches, keys)
            # One row more than asked for, so that no gradient has the size of a model alone.
            rows = found.gradients.new_empty((len(points) + 1, points.shape[1]))
            rows[:-1] = found.gradients
            return Evaluated(rows[:-1], found.losses, found.buffers)

        def started(gradient: Any) -> None:
            start(gradient)
            self.look()

        cast(Any, engine).evaluate = evaluate
        batcher.start = started


def _copied(payload: Any) -> Any:
    if isinstance(payload, Tensor):
        return payload.clone()
    if dataclasses.is_dataclass(payload) and not isinstance(payload, type):
        names = [field.name for field in dataclasses.fields(payload)]
        return dataclasses.replace(payload, **{n: _copied(getattr(payload, n)) for n in names})
    return payload


def held_copies(simulation: Simulation) -> tuple[float, float]:
    """The most models that a worker, and that a server, holds in this run."""
    held = HeldCopies(simulation)
    with held:
        simulation.run()
    size = simulation.world.size
    return _most(held.most, range(size)), _most(held.most, range(size, simulation.world.ends))


def _most(found: Counter[int], ends: Sequence[int]) -> float:
    return float(max((found[end] for end in ends), default=0))
