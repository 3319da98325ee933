"""All trainings of one group at once: gradients, delays and updates of many rows per operation.

Row r of every matrix is one point of the grid. The gradients of a step are one vectorised call.
They enter a ring buffer, from which each row takes the one that its delay makes due; one call of
the batched optimiser then updates all rows. Rows are ordered by delay, so those that have something
to apply are always the first ones.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap  # pyright: ignore[reportUnknownVariableType]

from gossamer.optim.optimisers import make_optimiser
from gossamer.sim.engine import VectorEngine, pays_to_compile
from gossamer.studies.lab.grid import Grid, GridGroup, steps_of
from gossamer.tasks import Order, Task
from gossamer.tasks.evaluator import Answers, judged, whole
from gossamer.tasks.flat_model import FlatModel, drawing_from
from gossamer.tasks.keyed import key_of

Arrays = dict[str, NDArray[np.float32]]

_TRACE_FROM_STEPS = 64
_MOST_ROWS = 128
# Beyond a core's cache, more rows in one operation gain nothing on a CPU.
_CPU_BYTES = 2_000_000
_GPU_BYTES = 1_500_000_000
_EVALUATED_AT_ONCE = 1000
_LOOK_AHEAD_STEPS = 64


@dataclass(frozen=True)
class GroupScores:
    """The scores of all rows on the test set. An accuracy is NaN if the task has none."""

    losses: list[float]
    accuracies: list[float]


class RingBuffer:
    """Keeps the gradients of the last d + 1 steps of each row, each with its own delay d."""

    def __init__(self, delays: list[int], width: int, device: torch.device) -> None:
        self._sizes = torch.tensor([delay + 1 for delay in delays], device=device)
        self._starts = torch.cumsum(self._sizes, 0) - self._sizes
        self.slots = torch.zeros(int(self._sizes.sum()), width, device=device)

    def exchange(self, step: int, fresh: Tensor) -> Tensor:
        """Store the gradients of this step; return those of d steps ago, or zeros before that."""
        self.slots.index_copy_(0, self._starts + step % self._sizes, fresh)
        # The next slot to be overwritten is the oldest, which holds the gradient of step - d.
        return self.slots.index_select(0, self._starts + (step + 1) % self._sizes)


class GroupTraining:
    """Trains the rows of one group, from their initial values to their last step."""

    def __init__(self, models: Models, group: GridGroup, grid: Grid) -> None:
        self.group = group
        self._grid = grid
        self._models = models
        self._model = model = models.first
        points = group.points
        self._delays = [point.delay for point in points]
        samples = len(model.task.train)
        self.steps = steps_of(grid.epochs, samples, group.batch)
        self.step = 0
        self.optimiser = make_optimiser(group.optimiser).suited(model.layout.shapes)
        self.parameters = torch.stack([models.initial[point.seed] for point in points])
        self.buffers = model.initial_buffers.repeat(len(points), 1)
        self.state = {
            slot: torch.full_like(self.parameters, self.optimiser.initial(slot))
            for slot in self.optimiser.slots
        }
        self.ring = RingBuffer(self._delays, model.layout.total, model.device)
        rates = [[point.used_rate] for point in points]
        self._rates = torch.tensor(rates, dtype=torch.float64, device=model.device)
        self._schedule = grid.schedule()
        self._orders = [Order(samples, seed, group.batch) for seed in grid.seeds]
        places = [grid.seeds.index(point.seed) for point in points]
        self._seed_of_row = torch.tensor(places, device=model.device)
        self._ahead: tuple[Tensor, Tensor] | None = None
        trace_after = 0 if self.steps >= _TRACE_FROM_STEPS else self.steps
        rows = models.rows_at_once(group.batch)
        gradients = self.steps * len(points)
        self.engine = VectorEngine(
            model,
            compiled=pays_to_compile(model, group.batch, gradients, min(rows, len(points))),
            most_rows=rows,
            trace_after=trace_after,
            compile_after=trace_after,
        )

    @property
    def epochs(self) -> float:
        return self.step * self.group.batch / len(self._model.task.train)

    @property
    def is_over(self) -> bool:
        return self.step >= self.steps

    def advance(self) -> None:
        """Do one step of every row."""
        batches, keys = self._samples()
        found = self.engine.evaluate(self.parameters, self.buffers, batches, keys)
        self.buffers = found.buffers
        due = self.ring.exchange(self.step, found.gradients)
        # A row applies nothing before its delay has passed.
        ready = bisect.bisect_right(self._delays, self.step)
        self.optimiser.descend_(
            self.parameters[:ready],
            due[:ready],
            {slot: matrix[:ready] for slot, matrix in self.state.items()},
            [self.step - delay for delay in self._delays[:ready]],
            self._rates[:ready] * self._schedule.factor(self.epochs),
        )
        self.step += 1

    def _samples(self) -> tuple[Tensor, Tensor]:
        """The sample numbers [rows, batch] and keys, which all rows of a seed share."""
        place = self.step % _LOOK_AHEAD_STEPS
        if place == 0 or self._ahead is None:
            self._ahead = self._look_ahead(self.step - place)
        numbers, keys = self._ahead
        return numbers[self._seed_of_row, place], keys[self._seed_of_row, place]

    def _look_ahead(self, start: int) -> tuple[Tensor, Tensor]:
        """Fetch the samples of many steps: on a GPU a transfer costs as much as some steps."""
        size, steps = self.group.batch, range(start, start + _LOOK_AHEAD_STEPS)
        numbers = [
            order.lookup(start * size, len(steps) * size).reshape(-1, size)
            for order in self._orders
        ]
        keys = [[key_of(seed, 0, step) for step in steps] for seed in self._grid.seeds]
        device = self._model.device
        return torch.from_numpy(np.stack(numbers)).to(device), torch.tensor(keys, device=device)

    def scores(self) -> GroupScores:
        """The present scores of all rows on the test set."""
        return self._models.scores(self.parameters, self.buffers)

    def arrays(self) -> Arrays:
        """Everything that the next step depends on."""
        return {name: tensor.cpu().numpy() for name, tensor in self._tensors().items()}

    def load(self, step: int, arrays: Arrays) -> None:
        """Continue at this step from what `arrays` returned there."""
        self.step = step
        self._ahead = None
        for name, tensor in self._tensors().items():
            tensor.copy_(torch.from_numpy(arrays[name]))

    def _tensors(self) -> dict[str, Tensor]:
        slots = {f"state_{slot}": matrix for slot, matrix in self.state.items()}
        kept = {"parameters": self.parameters, "buffers": self.buffers, "ring": self.ring.slots}
        return kept | slots


class Models:
    """The task's model on the device, with the initial values of every seed."""

    _last: ClassVar[tuple[Task, Models] | None] = None

    @classmethod
    def of(
        cls, task: Task, device: torch.device, seeds: tuple[int, ...], precision: str = "fp32"
    ) -> Models:
        """The models that were made last, if task, device, seeds and precision are the same: the
        groups of a grid share them, with the data on the device."""
        if cls._last is not None and cls._last[0] is task:
            models = cls._last[1]
            here = (models.first.device, tuple(models.initial), models.first.precision)
            if here == (device, seeds, precision):
                return models
        cls._last = (task, cls(task, device, seeds, precision))
        return cls._last[1]

    def __init__(
        self, task: Task, device: torch.device, seeds: tuple[int, ...], precision: str = "fp32"
    ) -> None:
        self.first = FlatModel(task, device, seed=seeds[0], precision=precision)
        # The task of the first model has its data on the device already.
        rest = {seed: FlatModel(self.first.task, device, seed=seed).initial for seed in seeds[1:]}
        self.initial = {seeds[0]: self.first.initial, **rest}
        """The initial parameters by seed."""
        self._sample_bytes = _largest_output_bytes(self.first)

    def rows_at_once(self, batch: int) -> int:
        """How many rows one vectorised call should take on this device."""
        allowed = _GPU_BYTES if self.first.device.type == "cuda" else _CPU_BYTES
        return min(_MOST_ROWS, max(1, int(allowed / (batch * self._sample_bytes))))

    def scores(self, parameters: Tensor, buffers: Tensor) -> GroupScores:
        """Loss and accuracy of every row on the test set."""
        width = self.rows_at_once(_EVALUATED_AT_ONCE)
        self.first.module.eval()
        with torch.no_grad(), drawing_from(0, self.first.device):
            parts = zip(parameters.split(width), buffers.split(width), strict=True)
            found = [self._score(answers) for part in parts for answers in self._outputs(*part)]
        self.first.module.train()
        return GroupScores([loss for loss, _ in found], [accuracy for _, accuracy in found])

    def _outputs(self, rows: Tensor, buffers: Tensor) -> list[Answers]:
        predict = self.first.predict
        test = self.first.task.test
        parts = list(test.parts(_EVALUATED_AT_ONCE))
        # One that computes its own loss returns an object, which cannot be batched.
        if len(rows) == 1 or self.first.has_buffers or self.first.task.place:
            return [
                whole([predict(row, own, one.inputs, one.targets) for one in parts], test, parts)
                for row, own in zip(rows, buffers, strict=True)
            ]
        together = vmap(predict, in_dims=(0, 0, None, None))
        found = [together(rows, buffers, one.inputs, one.targets) for one in parts]
        return [[(output, test)] for output in torch.cat(found, dim=1)]

    def _score(self, answers: Answers) -> tuple[float, float]:
        loss, metric = judged(self.first, answers)
        return loss, metric if metric is not None and self.first.task.has_accuracy else math.nan


def _largest_output_bytes(model: FlatModel) -> int:
    """The size of the largest output of any layer for one sample."""
    largest = 1

    def watch(_module: nn.Module, _inputs: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.numel() * output.element_size())

    handles = [module.register_forward_hook(watch) for module in model.module.modules()]
    model.module.eval()
    with torch.no_grad(), drawing_from(0, model.device):
        model.task.train.first(1).call(model.module)
    model.module.train()
    for handle in handles:
        handle.remove()
    return largest
