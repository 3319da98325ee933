"""The output model of a virtual moment, for the loops that look at it.

With a synchronous method it is the output after the steps that the asker has made. Who has made
fewer contributes when it has made as many, and until then the asker's next gradient is held up: it
would wait on real workers, too. Who is ahead contributes what it has. With an asynchronous method
everybody contributes at once. Looking takes no virtual time by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from gossamer.sim.script.script_gradients import ScriptGradient
    from gossamer.sim.script.script_world import ScriptWorld


@dataclass(frozen=True)
class HeldByWorker:
    """What one worker holds: its value, its push-sum weight, its buffers."""

    value: Tensor
    weight: float
    buffers: Tensor
    counters: Tensor


@dataclass
class Ask:
    """One look that waits for others."""

    gradient: ScriptGradient
    steps: int
    found: dict[int, HeldByWorker] = field(default_factory=dict[int, HeldByWorker])
    missing: set[int] = field(default_factory=set[int])


class Consensus:
    """All looks of one run."""

    def __init__(self, world: ScriptWorld) -> None:
        self._world = world
        self._waiting: list[Ask] = []
        self._kept: dict[tuple[int, int], HeldByWorker] = {}
        """By worker and steps: what a worker had when it looked itself, for who looks later."""

    def ask(self, gradient: ScriptGradient, steps: int) -> bool:
        """Whether the asker has its answer."""
        world, asker = self._world, gradient.worker
        ask = Ask(gradient, steps)
        is_synchronous = world.budget.is_synchronous and world.method.output != "ensemble"
        if is_synchronous:
            self._kept[asker, steps] = world.contribution(asker)
        for rank in world.standing():
            loop = world.source.loops[rank]
            if is_synchronous and loop.made < steps and not loop.has_ended:
                ask.missing.add(rank)
            else:
                kept = self._kept.get((rank, steps)) if is_synchronous else None
                ask.found[rank] = kept or world.contribution(rank)
        if ask.missing:
            self._waiting.append(ask)
            return False
        self._answer(ask)
        return True

    def came(self, rank: int) -> None:
        """A worker has made one more step."""
        made = self._world.source.loops[rank].made
        for ask in self._waiting:
            if rank in ask.missing and made >= ask.steps:
                ask.missing.discard(rank)
                ask.found[rank] = self._world.contribution(rank)
        self._go_on()

    def gone(self, rank: int) -> None:
        """A worker has left its loop, or died: nobody waits for it."""
        world = self._world
        self._waiting = [ask for ask in self._waiting if ask.gradient.worker in world.alive]
        for ask in self._waiting:
            if rank in ask.missing:
                ask.missing.discard(rank)
                if rank in world.standing():
                    ask.found[rank] = world.contribution(rank)
        self._go_on()

    def _go_on(self) -> None:
        loops = self._world.source.loops
        least = min((loops[r].made for r in self._world.standing()), default=0)
        self._kept = {key: own for key, own in self._kept.items() if key[1] >= least}
        ready = [ask for ask in self._waiting if not ask.missing]
        self._waiting = [ask for ask in self._waiting if ask.missing]
        for ask in ready:
            self._answer(ask)
            ask.gradient.go_on()

    def _answer(self, ask: Ask) -> None:
        world, rank = self._world, ask.gradient.worker
        found = [ask.found[one] for one in sorted(ask.found)] or [world.contribution(rank)]
        world.put_output(rank, found)
        world.crew.members[rank].tell("output")
