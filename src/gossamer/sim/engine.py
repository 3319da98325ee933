"""Engines: the gradients of many workers at once, or one after the other as the reference.

The vectorised engine evaluates `vmap(grad(loss))` over stacked parameters. If a width recurs, its
Python overhead is removed by tracing: the batched computation is recorded as a plain list of tensor
operations and replayed, on a GPU as one CUDA graph. This needs no compiler. `torch.compile` is
added on a GPU if the run is long enough.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap  # pyright: ignore[reportUnknownVariableType]

from gossamer.config.settings import ENGINES
from gossamer.errors import unknown_name
from gossamer.own_code import place_in
from gossamer.sim.forms.chosen_forms import ChosenForms
from gossamer.sim.traced import Batched, GraphReplay, record
from gossamer.sim.traces.trace_cache import TraceCache
from gossamer.tasks.data import Tensors, leaves
from gossamer.tasks.flat_model import FlatModel

_WIDTHS = sorted({w for power in range(13) for w in (2**power, 3 * 2**power)})


@dataclass(slots=True)
class Evaluated:
    """Row i belongs to request i."""

    gradients: Tensor
    losses: Tensor
    buffers: Tensor


class Engine(Protocol):
    """Evaluates the gradients of several workers."""

    notices: list[str]

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        """Points [workers, parameters], sample numbers [workers, batch], one key per worker."""
        ...


class LoopEngine:
    """Plain autograd, one worker after the other."""

    def __init__(self, model: FlatModel) -> None:
        self.notices: list[str] = []
        self._model = model

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        rows = [
            self._model.gradient(points[row], buffers[row], batch, key)
            for row, (batch, key) in enumerate(zip(batches, keys.tolist(), strict=True))
        ]
        gradients, losses, statistics = zip(*rows, strict=True)
        return Evaluated(torch.stack(gradients), torch.stack(losses), torch.stack(statistics))


class VectorEngine:
    """`vmap(grad(loss))`, traced once per width; the loop is used if a model cannot be
    vectorised."""

    def __init__(
        self,
        model: FlatModel,
        *,
        compiled: bool = False,
        most_rows: int = 128,
        trace_after: int = 32,
        forms: Collection[str] | None = None,
    ) -> None:
        self.notices: list[str] = []
        self._model = model
        self._compiled = compiled
        self._most_rows = most_rows
        self._trace_after = trace_after
        """Uses of a width before it is traced: tracing costs about that many evaluations."""

        self._forms = forms
        self._cache = TraceCache(model)
        self._batched = self._batched_over(compiled=False)
        self._traced: dict[tuple[int, int], Batched] = {}
        self._uses: dict[tuple[int, int], int] = {}
        self._fallback: LoopEngine | None = None

    def _batched_over(self, *, compiled: bool) -> Batched:
        """The gradients of several workers, with the forms that suit their number."""
        model = self._model

        def loss(
            flat: Tensor, buffers: Tensor, inputs: Tensors, targets: Tensors, key: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return model.flat_loss(flat, buffers, inputs, targets, key)

        gradients: Batched = vmap(grad(loss, has_aux=True))

        def batched(
            points: Tensor, buffers: Tensor, inputs: Tensors, targets: Tensors, keys: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            forms = ChosenForms(
                len(points), model.precision, only=self._forms, is_compiled=compiled
            )
            with _without_fallback_warnings(), forms:
                return gradients(points, buffers, inputs, targets, keys)

        return batched

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        if self._fallback is not None:
            return self._fallback.evaluate(points, buffers, batches, keys)
        rows = points.shape[0]
        if rows > self._most_rows:
            halves = [slice(at, at + self._most_rows) for at in range(0, rows, self._most_rows)]
            parts = [self.evaluate(points[s], buffers[s], batches[s], keys[s]) for s in halves]
            return Evaluated(
                torch.cat([part.gradients for part in parts]),
                torch.cat([part.losses for part in parts]),
                torch.cat([part.buffers for part in parts]),
            )
        # Only a few widths are used, so that few traces are made. Extra rows repeat the first row.
        width = _WIDTHS[bisect.bisect_left(_WIDTHS, rows)]
        if width > rows:
            index = torch.arange(width, device=points.device)
            index[rows:] = 0
            points, buffers, batches, keys = (t[index] for t in (points, buffers, batches, keys))
        inputs, targets = self._model.task.train.at(batches)
        try:
            function = self._function(points, buffers, inputs, targets, keys)
            gradients, (losses, statistics) = function(points, buffers, inputs, targets, keys)
        except Exception as error:  # a user's model may fail in any way; alone it may not
            return self._fall_back(
                error, points[:rows], buffers[:rows], batches[:rows], keys[:rows]
            )
        return Evaluated(gradients[:rows], losses[:rows], statistics[:rows])

    def _function(
        self, points: Tensor, buffers: Tensor, inputs: Tensors, targets: Tensors, keys: Tensor
    ) -> Batched:
        shape = (points.shape[0], leaves(inputs)[0].shape[1])
        if shape not in self._traced:
            arguments = (points, buffers, inputs, targets, keys)
            uses = self._uses[shape] = self._uses.get(shape, 0) + 1
            # A CUDA graph costs memory, and a compilation time, which a few uses are not worth.
            is_cheap = not (points.is_cuda or self._compiled)
            if uses <= self._trace_after and not (is_cheap and uses == 1):
                return self._batched
            function = self._cache.find(arguments, *self._facts())
            if function is None and uses <= self._trace_after:
                return self._batched
            self._traced[shape] = self._recorded(function, arguments)
        return self._traced[shape]

    def _recorded(self, kept: Batched | None, arguments: tuple[Tensors, ...]) -> Batched:
        """The batched computation as a list of operations, compiled if asked for and possible."""
        function = kept or self._cache.keep(
            record(self._batched_over(compiled=self._compiled), arguments), arguments,
            *self._facts(),
        )  # fmt: skip
        if self._compiled:
            compiled: Batched = torch.compile(function, dynamic=False)
            try:
                compiled(*arguments)
                function = compiled
            except Exception as error:
                reason = str(error).strip().splitlines()[0]
                self.notices.append(f"not compiled ({reason}); the traced form is as exact")
                self._compiled = False
        if arguments[0].is_cuda:
            return GraphReplay(function, arguments)
        # The call of a module looks for hooks, which takes as long as some operations.
        return getattr(function, "forward", function)

    def _facts(self) -> tuple[object, ...]:
        """What decides beside the model and the shapes how gradients are recorded."""
        return self._compiled, self._forms and sorted(self._forms)

    def _fall_back(
        self, error: Exception, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor
    ) -> Evaluated:
        said = str(error).strip().splitlines()
        reason = said[0].partition(". ")[0] if said else type(error).__name__
        place = place_in(error)
        reason = f"{place}: {reason}" if place else reason
        self._fallback = LoopEngine(self._model)
        self.notices.append(
            f"{self._model.task.name} cannot be vectorised ({reason}); "
            "gradients are computed one worker after the other"
        )
        return self._fallback.evaluate(points, buffers, batches, keys)


@contextmanager
def _without_fallback_warnings() -> Generator[None]:
    """Torch warns of operations that it batches one by one; they are right all the same."""
    functorch: Any = getattr(getattr(torch, "_C"), "_functorch")  # noqa: B009  (no stub)
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


class NullEngine:
    """Zero gradients at no cost, for questions about time only."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        return Evaluated(torch.zeros_like(points), points.new_zeros(points.shape[0]), buffers)


def make_engine(kind: str, model: FlatModel, *, compiled: bool = False) -> Engine:
    if kind == "vector":
        return VectorEngine(model, compiled=compiled)
    if kind == "loop":
        return LoopEngine(model)
    if kind == "none":
        return NullEngine()
    raise unknown_name("engine", kind, ENGINES)
