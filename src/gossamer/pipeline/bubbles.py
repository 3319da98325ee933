"""How long a schedule takes and what it holds, in closed form.

For p machines, m micro-batches and v chunks a machine, with stages that are equal and links that
take no time, the forms are exact. Otherwise they are exact for GPipe and LoopedBFS; elsewhere a
machine may wait for another in a way that no short formula has (`sim.pipelines.makespan` plays it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BubbleForm:
    """The bubble in passes of a chunk, of which a forward pass is one and each half of a backward
    pass is one; and the most activations of a machine, in chunks of a micro-batch."""

    idle: Callable[[int], int]
    """From the machines."""
    held: Callable[[int, int, int, int], int]
    """From the machines, the micro-batches, the chunks of a machine and the machine."""
    is_counted: bool = False
    """Whether it was counted in PyTorch's own table instead of published."""

    def held_at(self, machines: int, microbatches: int, chunks: int, machine: int) -> int:
        """There are no more than all of them."""
        return min(chunks * microbatches, self.held(machines, microbatches, chunks, machine))


FORMS: dict[str, BubbleForm] = {
    "gpipe": BubbleForm(lambda p: 3 * (p - 1), lambda p, m, v, s: m),
    "1f1b": BubbleForm(lambda p: 3 * (p - 1), lambda p, m, v, s: p - s),
    "interleaved": BubbleForm(
        lambda p: 3 * (p - 1), lambda p, m, v, s: 2 * (p - 1 - s) + (v - 1) * p + 1
    ),
    "looped_bfs": BubbleForm(lambda p: 3 * (p - 1), lambda p, m, v, s: v * m),
    "zero_bubble": BubbleForm(lambda p: p - 1, lambda p, m, v, s: 2 * p, is_counted=True),
    "zbv": BubbleForm(lambda p: p - 1, lambda p, m, v, s: 2 * p, is_counted=True),
    "dualpipev": BubbleForm(lambda p: 2 * (p - 1), lambda p, m, v, s: 2 * p + 1, is_counted=True),
}


@dataclass(frozen=True)
class ChunkPasses:
    """The seconds of the forward and the backward pass of each chunk for a micro-batch, the machine
    of each chunk, and the seconds that whatever crosses from machine to machine takes."""

    forward: Sequence[float]
    backward: Sequence[float]
    places: Sequence[int]
    link_s: float = 0.0

    @property
    def machines(self) -> int:
        return max(self.places) + 1

    def busiest_s(self) -> float:
        """What the machine with the most work has with one micro-batch."""
        work = [0.0] * self.machines
        for one, ahead, back in zip(self.places, self.forward, self.backward, strict=True):
            work[one] += ahead + back
        return max(work)

    @property
    def crossings(self) -> int:
        """Machines between which a micro-batch passes, one way."""
        return self.machines - 1


def step_seconds(name: str, microbatches: int, passes: ChunkPasses) -> float:
    """From the first pass to the last of a synchronous schedule."""
    both = [a + b for a, b in zip(passes.forward, passes.backward, strict=True)]
    there_s = 2 * passes.crossings * passes.link_s
    if name == "gpipe":
        slowest_s = max(passes.forward) + max(passes.backward)
        return sum(both) + there_s + (microbatches - 1) * slowest_s
    period_s = _period(name, microbatches, passes, both)
    if name == "1f1b":
        return sum(both) + there_s + (microbatches - 1) * period_s
    machines = passes.machines
    others_s = (sum(both) - passes.busiest_s()) * machines / len(both)
    bubble = FORMS[name].idle(machines) / max(1, 3 * (machines - 1))
    return microbatches * period_s + bubble * others_s + there_s


def _period(name: str, microbatches: int, passes: ChunkPasses, both: Sequence[float]) -> float:
    """Between the ends of two micro-batches in the middle of a step: the work of the busiest
    machine; or by Little's law, since a machine holds so many activations at most, the time that
    each is held over their number."""
    places, machines = passes.places, passes.machines
    chunks = len(places) // machines
    held_s, way_s = [0.0] * machines, 0.0
    for chunk in reversed(range(len(places))):
        if chunk + 1 < len(places) and places[chunk] != places[chunk + 1]:
            way_s += 2 * passes.link_s
        way_s += both[chunk]
        held_s[places[chunk]] += way_s
    return max(
        passes.busiest_s(),
        *(
            one / FORMS[name].held_at(machines, microbatches, chunks, machine)
            for machine, one in enumerate(held_s)
        ),
    )
