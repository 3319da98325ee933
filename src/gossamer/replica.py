"""A worker's parameters as one flat vector, and what a method may do to them.

Code between two awaits is atomic only in the simulator. So a method never assigns to shared
parameters; it calls the replica, whose operations are atomic in every world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError

OF_RUN = "run "
"""How names in a replica's memory begin that belong to the run and not to the method."""


SCORE = "score"
"""Under this name a replica's memory has what its worker's model is worth, less being better, where
the output is the best worker's."""


def score_of(memory: Mapping[str, Tensor]) -> float:
    """What a worker's model is worth; infinite where nobody has measured it."""
    score = memory.get(SCORE)
    return math.inf if score is None or score.is_meta else float(score)


def forget(memory: dict[str, Tensor]) -> None:
    """Let a method begin anew: what it remembers is deleted, and what the run remembers stays."""
    for name in [name for name in memory if not name.startswith(OF_RUN)]:
        del memory[name]


class Replica(Protocol):
    """Flat parameters with their own optimiser state beside them."""

    weight: float
    """Push-sum weight: the model is the value divided by it; 1 for every other method."""

    output: Tensor | None
    """The replica's model if that is not its value but, for example, a moving average."""

    memory: dict[str, Tensor]
    """What the method itself remembers from step to step, such as a velocity of its own.
    Checkpoints keep it: a method resumes from its replica, its memory and the number of a step.
    What was sent, while its answer is not applied, has a name that begins with "sent ".
    """

    @property
    def version(self) -> int:
        """How many gradients this replica has descended along."""
        ...

    @property
    def learning_rate(self) -> float:
        """The rate that the next `descend_` will use."""
        ...

    def snapshot(self) -> Tensor:
        """A copy of the present value that nobody will change."""
        ...

    def add_(self, delta: Tensor, scale: float = 1.0) -> None:
        """x += scale * delta. Deltas commute, so overlapping exchanges lose no mass."""
        ...

    def mix_(self, theirs: Tensor, beta: float) -> None:
        """x += beta * (theirs - x), in one fused call."""
        ...

    def assign_(self, value: Tensor) -> None:
        """x = value; only for methods in which nobody else changes x meanwhile."""
        ...

    def descend_(
        self, gradient: Tensor, *, read: int | Sequence[int] = (), at: Tensor | None = None,
        share: float = 1.0,
    ) -> None:  # fmt: skip
        """One step of the replica's own optimiser (momentum, Adam, ...).

        A server gives in `read` the version at which each gradient of a mean was read. For a worker
        it is the version at which its last gradient was begun. The staleness that metrics report is
        `version - read`. `at` is the point of the gradient if that is not the present value; the
        weight decay is taken there, too. `share` is the fraction of the learning rate to use: a
        smaller gradient would not make Adam's step smaller.
        """
        ...

    def clipped(self, gradient: Tensor) -> Tensor:
        """The gradient, clipped as `descend_` would clip it."""
        ...

    def penalised(self, gradient: Tensor, at: Tensor) -> Tensor:
        """The gradient, taken at that point, clipped and with the optimiser's weight decay added as
        torch's SGD adds it. It is for methods that descend without `descend_`."""
        ...

    def optimiser_state(self) -> Tensor:
        """The optimiser's vectors, one after the other, as one flat copy (empty for plain SGD)."""
        ...

    def load_optimiser_state_(self, state: Tensor) -> None:
        """The inverse of `optimiser_state`."""
        ...

    def reset_optimiser_(self) -> None:
        """Forget momentum and moments, as at the start of a run."""
        ...

    @property
    def tunable(self) -> tuple[str, ...]:
        """The hyper-parameters that `tune_` can change: the learning rate, and numbers of the
        optimiser and of the schedule."""
        ...

    def tune_(self, factors: Mapping[str, float]) -> None:
        """From now on each of these is what was asked for times its factor; of a share below 1,
        such as a momentum, its distance from 1 is."""
        ...


@dataclass(frozen=True)
class Layout:
    """The place of each named tensor in a flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
        named = list(tensors)
        return Layout(
            tuple(name for name, _ in named),
            tuple(tensor.shape for _, tensor in named),
            tuple(tensor.numel() for _, tensor in named),
        )

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def within(self, part: slice) -> Layout:
        """The layout of a range of the flat vector. A tensor that is cut becomes a vector."""
        ends = list(accumulate(self.sizes))
        found: list[tuple[str, torch.Size, int]] = []
        for name, shape, size, end in zip(self.names, self.shapes, self.sizes, ends, strict=True):
            inside = max(0, min(end, part.stop) - max(end - size, part.start))
            if inside:
                found.append((name, shape if inside == size else torch.Size([inside]), inside))
        if not found:
            return Layout((), (), ())
        names, shapes, sizes = zip(*found, strict=True)
        return Layout(names, shapes, sizes)

    def pack(self, tensors: Iterable[Tensor]) -> Tensor:
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        return torch.cat(flat) if flat else torch.empty(0)

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Views by name: writing to them writes to the flat vector."""
        pieces = flat.split(list(self.sizes))
        return {
            name: piece.view(shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }


NOWHERE = Layout((), (), ())


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a method changes: tied ones once, frozen ones not at all."""
    return [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]


def cut(sizes: Sequence[int], parts: int) -> tuple[slice, ...]:
    """Consecutive ranges of a flat vector, about equal, cut at parameter boundaries only."""
    if parts > len(sizes):
        raise ConfigurationError(
            f"the model has {len(sizes)} parameter tensors and cannot be cut over {parts} servers; "
            f"use at most {len(sizes)}"
        )
    ends = list(accumulate(sizes))
    slices: list[slice] = []
    start = first = 0
    for part in range(parts):
        # The cut nearest to the ideal end that leaves at least one tensor for each later part.
        last = len(sizes) - (parts - part)
        due = ends[-1] * (part + 1) / parts
        chosen = min(range(first, last + 1), key=lambda at: abs(ends[at] - due))
        slices.append(slice(start, ends[chosen]))
        start, first = ends[chosen], chosen + 1
    return tuple(slices)


@dataclass(frozen=True)
class Fragment:
    """A part of a flat vector that is exchanged by itself: some of the tensors, in order."""

    places: tuple[slice, ...]
    """The ranges of the vector; neighbouring tensors are one range."""
    layout: Layout
    """Its tensors, one after the other."""

    @staticmethod
    def of_tensors(layout: Layout, numbers: Iterable[int]) -> Fragment:
        ends, chosen = list(accumulate(layout.sizes)), sorted(numbers)
        places: list[slice] = []
        for number in chosen:
            start, stop = ends[number] - layout.sizes[number], ends[number]
            if places and places[-1].stop == start:
                start = places.pop().start
            places.append(slice(start, stop))
        kept = [(layout.names[n], layout.shapes[n], layout.sizes[n]) for n in chosen]
        names, shapes, sizes = zip(*kept, strict=True) if kept else ((), (), ())
        return Fragment(tuple(places), Layout(names, shapes, sizes))

    def moved(self, by: int) -> Fragment:
        """The same tensors in a vector that begins so much earlier."""
        places = tuple(slice(place.start + by, place.stop + by) for place in self.places)
        return Fragment(places, self.layout)

    def of(self, flat: Tensor) -> Tensor:
        """Its numbers: the vector itself if they are all, a view where they lie together, otherwise
        a copy."""
        if len(self.places) == 1:
            return flat if self.layout.total == flat.numel() else flat[self.places[0]]
        return torch.cat([flat[place] for place in self.places])

    def put_(self, flat: Tensor, value: Tensor) -> None:
        """Write its numbers into a vector of the whole model."""
        pieces = value.split([place.stop - place.start for place in self.places])
        for place, piece in zip(self.places, pieces, strict=True):
            flat[place].copy_(piece)


DIVISIONS = ("balanced", "sequential", "strided")


def fragments_of(layout: Layout, count: int, by: str) -> tuple[Fragment, ...]:
    """The model as so many fragments of whole tensors, or one per tensor where there are fewer.

    `balanced` gives each tensor, the largest first, to the fragment that is smallest so far;
    `sequential` cuts the model into consecutive ranges; `strided` deals the tensors out in turn.
    """
    sizes = layout.sizes
    count = min(count, len(sizes))
    held: list[list[int]] = [[] for _ in range(count)]
    if by == "sequential":
        starts = [part.start for part in cut(sizes, count)]
        for number, end in enumerate(accumulate(sizes)):
            begin = end - sizes[number]
            held[sum(start <= begin for start in starts) - 1].append(number)
    elif by == "strided":
        held = [list(range(first, len(sizes), count)) for first in range(count)]
    else:
        lengths = [0] * count
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            smallest = lengths.index(min(lengths))
            held[smallest].append(number)
            lengths[smallest] += sizes[number]
    return tuple(Fragment.of_tensors(layout, numbers) for numbers in held)
