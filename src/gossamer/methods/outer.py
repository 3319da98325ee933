"""What all methods with an outer loop share: who meets when, and what becomes of a meeting.

Each of them is the same sequence. A worker makes local steps; a *part* of its model (all of it, or
a fragment) goes to a *meeting*; what the others brought is *merged*; an *outer optimiser* moves the
model that was agreed on before; the worker *adopts* the result.
"""

from __future__ import annotations

from torch import Tensor

from gossamer.replica import Fragment, Replica
from gossamer.rules import OuterOptimiser


def due(step: int, period: int, count: int) -> list[int]:
    """Which of `count` fragments meet after this step: each once in a period, evenly spread."""
    return [turn % count for turn in range(step * count // period, (step + 1) * count // period)]


def own_copy(x: Replica, part: Fragment) -> Tensor:
    """The replica's fragment, which nobody will change."""
    whole = x.snapshot()
    own = part.of(whole)
    return own if own is whole else own.clone()


def adopt_(x: Replica, part: Fragment, value: Tensor, mix: float = 0.0) -> None:
    """The replica's fragment becomes this value, or keeps the share `mix` of its own."""
    whole = x.snapshot()
    own = part.of(whole)
    if mix == 0.0 and value.shape == whole.shape:
        x.assign_(value)
        return
    part.put_(whole, own.lerp(value, 1 - mix) if mix else value)
    x.assign_(whole)


class OuterModel:
    """The model as it was after the last meeting of each fragment, and its outer velocity.

    Both are kept in the replica's memory, so a checkpoint has them. On a server the replica itself
    is that model.
    """

    def __init__(self, x: Replica, optimiser: OuterOptimiser) -> None:
        self._memory = x.memory
        self._optimiser = optimiser
        self._memory.setdefault("start", x.snapshot())

    @property
    def start(self) -> Tensor:
        return self._memory["start"]

    def step(self, part: Fragment, mean: Tensor, inner_rate: float | None = None) -> Tensor:
        """One outer step of a fragment towards (or past) the mean of the models."""
        start, velocity = self.start, self._memory.get("velocity")
        own = part.of(start)
        is_whole = own.shape == start.shape
        outer = self._optimiser
        outer.velocity = None if velocity is None else part.of(velocity)
        new = outer.step(own, mean, inner_rate)
        if outer.velocity is not None and is_whole:
            self._memory["velocity"] = outer.velocity
        elif outer.velocity is not None:
            whole = self._memory.setdefault("velocity", start.new_zeros(start.shape))
            part.put_(whole, outer.velocity)
        outer.velocity = None
        if is_whole:
            self._memory["start"] = new
        else:
            part.put_(start, new)
        return new
