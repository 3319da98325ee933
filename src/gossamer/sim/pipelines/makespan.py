"""How long a schedule takes in units, with links that take a given time: no run, only the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gossamer.pipeline.schedule import Action, Pass, PipelineSchedule
from gossamer.sim.kernel import Kernel
from gossamer.sim.pipelines.play import Play


@dataclass
class Makespan:
    """What playing a schedule has taken."""

    busy: list[int]
    """The units in which each machine worked."""
    most_held: list[int]
    """The most micro-batches, counted by chunk, whose activations each machine held at once."""
    units: int = 0
    """Until the last pass has ended."""

    @property
    def bubble_fraction(self) -> float:
        return 1 - sum(self.busy) / (self.units * len(self.busy))


@dataclass
class _Units:
    """The units of each chunk for a forward pass and for a backward pass, in one or two halves."""

    forward: Sequence[int]
    backward: Sequence[int]
    link: int
    found: Makespan
    kernel: Kernel = field(default_factory=lambda: Kernel(0))

    def __post_init__(self) -> None:
        self.held = [0] * len(self.found.busy)

    def work_ns(self, machine: int, action: Action) -> int:
        if action.kind is Pass.FORWARD:
            self.held[machine] += 1
            most = self.found.most_held
            most[machine] = max(most[machine], self.held[machine])
            return self.forward[action.chunk]
        whole = self.backward[action.chunk]
        half = whole // 2
        return {Pass.BACKWARD: whole, Pass.BY_INPUT: half}.get(action.kind, whole - half)

    def send(self, action: Action, source: int, target: int, arrived: Callable[[], None]) -> None:
        self.kernel.at(self.link, arrived)

    def ended(self, machine: int, action: Action, began_ns: int) -> None:
        self.found.units = self.kernel.now
        self.found.busy[machine] += self.kernel.now - began_ns
        if action.kind in (Pass.BACKWARD, Pass.BY_WEIGHTS):
            self.held[machine] -= 1


def makespan(
    schedule: PipelineSchedule, forward: Sequence[int] = (), link: int = 0,
    backward: Sequence[int] = (),
) -> Makespan:  # fmt: skip
    """Play a schedule. `forward` are the units of one pass of each chunk, by default 1, `backward`
    by default twice as many; whatever crosses from machine to machine takes `link`."""
    machines = len(schedule.machines)
    found = Makespan([0] * machines, [0] * machines)
    ahead = forward or [1] * schedule.chunks
    units = _Units(ahead, backward or [2 * one for one in ahead], link, found)
    play = Play(units.kernel, schedule, units)
    play.feed(schedule.machines)
    units.kernel.run()
    return found
