"""The copies of a model that a method's text holds, beside its replica and one gradient.

While a run goes on, everything that the coroutines of a worker can reach is looked at: their
variables, what they have started and what has come of it, what the replica remembers for them, and
the messages that wait for them. A tensor counts where it has the size of a model; gradients as the
engine gives them do not, because every step has one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from types import CoroutineType
from typing import Any, cast

from torch import Tensor

from gossamer.mailbox import Mailbox
from gossamer.pending import Pending
from gossamer.sim.engine import Evaluated
from gossamer.sim.simulation import Simulation
from gossamer.worker import Message


def held_copies(simulation: Simulation, *, every: int = 3) -> float:
    """Run it; the most models that any worker held in the moments when a gradient began."""
    world = simulation.world
    size = world.workers.parameters[0].nbytes
    batcher, engine = cast(Any, world.batcher), cast(Any, simulation.engine)
    start, evaluate = batcher.start, engine.evaluate
    most = begun = 0

    def evaluated(points: Tensor, *rest: Tensor) -> Evaluated:
        found = evaluate(points, *rest)
        # One row more than asked for, so that no gradient alone has the size of a model.
        rows = found.gradients.new_empty((len(points) + 1, found.gradients.shape[1]))
        rows[:-1] = found.gradients
        return Evaluated(rows[:-1], found.losses, found.buffers)

    def started(gradient: Any) -> None:
        nonlocal most, begun
        start(gradient)
        begun += 1
        if begun % every == 0:
            for rank in range(world.size):
                most = max(most, _held(simulation, rank, size))

    engine.evaluate, batcher.start = evaluated, started
    simulation.run()
    # Where others change a worker's parameters, its gradient is taken at a copy.
    return most + world.method.shares_replica


def _held(simulation: Simulation, rank: int, size: int) -> int:
    world = simulation.world
    replica = world.replicas[rank]
    tasks = cast(Any, world.kernel)._tasks.get(rank, ())
    roots = [task.coroutine for task in tasks if not task.finished.done]
    found: set[int] = set()
    for tensor in _tensors([*roots, replica.memory, world.mailboxes[rank]], set()):
        storage = tensor.untyped_storage()
        if storage.nbytes() == size:
            found.add(storage.data_ptr())
    return len(found)


def _tensors(what: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that can be reached from a method's own values."""
    if isinstance(what, Tensor):
        yield what
        return
    if id(what) in seen:
        return
    seen.add(id(what))
    inside: list[Any] = []
    if isinstance(what, CoroutineType):
        frame, awaited = what.cr_frame, what.cr_await
        names = dict(frame.f_locals) if frame is not None else {}
        names.pop("grad", None)
        inside = [*names.values(), awaited]
    elif isinstance(what, Mapping):
        inside = list(cast(Mapping[Any, Any], what).values())
    elif isinstance(what, list | tuple | set | deque):
        inside = list(cast(list[Any], what))
    elif isinstance(what, Message):
        inside = [what.payload]
    elif isinstance(what, Pending):
        inside = [cast(Any, what)._value]
    elif isinstance(what, Mailbox):
        inside = [cast(Any, what)._arrived]
    elif dataclasses.is_dataclass(what) and not isinstance(what, type):
        inside = [getattr(what, field.name) for field in dataclasses.fields(what)]
    for one in inside:
        yield from _tensors(one, seen)
