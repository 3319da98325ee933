"""Engines: the gradients of many workers at once, or one after the other as the reference.

The vectorised engine evaluates `vmap(grad(loss))` over stacked parameters. If a width recurs, its
Python overhead is removed by tracing: the batched computation is recorded as a plain list of tensor
operations and replayed, on a GPU as one CUDA graph. This needs no compiler. `torch.compile` is
added on a GPU if the run is long enough. Which of these is used follows from the run's settings and
from how often a width has come, never from a measured time.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.func import grad, vmap  # pyright: ignore[reportUnknownVariableType]
from torch.utils.flop_counter import FlopCounterMode

from gossamer.config.settings import ENGINES
from gossamer.errors import unknown_name
from gossamer.own_code import place_in
from gossamer.sim.forms.chosen_forms import ChosenForms
from gossamer.sim.traced import Batched, GraphReplay, record
from gossamer.sim.traces.trace_cache import TraceCache
from gossamer.tasks.data import Tensors, leaves
from gossamer.tasks.flat_model import FlatModel

_GRAPH_BYTES = 128 << 20
"""Up to so many bytes of parameters a call is replayed as a CUDA graph. That copies parameters and
gradients; where they are larger, so are the kernels, and starting them one by one costs nothing."""
_COMPILED_SECONDS = 120.0
"""A compiler pays if gradients take longer without it: it takes a minute and saves half."""
_TRACED_RATE = 5e13
"""Operations per second of a traced model of some size on a large GPU."""
_SHORTEST_SECONDS = 0.002
"""What the evaluation of a small model takes."""
_COMPILER: dict[str, Any] = {"deterministic": True, "shape_padding": False}
"""No choices from measured times: the same seed gives the same bits. Shapes are padded by forms."""
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
        compile_after: int = 64,
        forms: Collection[str] | None = None,
    ) -> None:
        self.notices: list[str] = []
        self._model = model
        self._compiled = compiled
        self._most_rows = most_rows
        self._trace_after = trace_after
        """Uses of a width before it is traced: tracing costs about that many evaluations."""
        self._compile_after = compile_after
        """Uses of a width before it is compiled, so that a width which is rare never is."""

        self._forms = forms
        self._cache = TraceCache(model)
        self._batched = self._batched_over(compiled=False)
        self._traced: dict[tuple[int, ...], Batched] = {}
        self._compiled_shapes: set[tuple[int, ...]] = set()
        self._uses: dict[tuple[int, ...], int] = {}
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
            # A model that asks whether it is traced then looks at no values, such as a mask's.
            told = patch.object(torch.compiler, "is_compiling", lambda: True)
            with _without_fallback_warnings(), told, forms:
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
        inputs, targets = self._model.task.train.at(batches, keys)
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
        shape = (*points.shape, leaves(inputs)[0].shape[1])
        arguments = (points, buffers, inputs, targets, keys)
        uses = self._uses[shape] = self._uses.get(shape, 0) + 1
        if self._compiled and uses > max(self._compile_after, self._trace_after):
            if shape not in self._compiled_shapes:
                self._compiled_shapes.add(shape)
                self._traced.pop(shape, None)
                self._traced[shape] = self._compiled_form(arguments)
        elif shape not in self._traced:
            # On a GPU a recording is replayed as a graph, whose memory a few uses are not worth.
            may_be_kept = uses > self._trace_after or (uses == 1 and not points.is_cuda)
            kept = self._cache.find(arguments, *self._facts()) if may_be_kept else None
            if kept is None and uses <= self._trace_after:
                return self._batched
            self._traced[shape] = self._traced_form(arguments, kept)
        return self._traced[shape]

    def _facts(self) -> tuple[object, ...]:
        """What decides beside the model and the shapes how gradients are recorded."""
        own = () if self._model.microbatches == 1 else (self._model.microbatches,)
        return (self._forms and sorted(self._forms), *own)

    def _traced_form(self, arguments: tuple[Tensors, ...], kept: Batched | None = None) -> Batched:
        """The batched computation as a list of operations; as it is where it cannot be recorded,
        because the model looks at values while it computes."""
        try:
            function = kept or self._cache.keep(
                record(self._batched, arguments), arguments, *self._facts()
            )
        except Exception as error:
            self._batched(*arguments)  # what cannot be batched either fails here
            reason = str(error).strip().partition(". ")[0].splitlines()[0]
            self.notices.append(f"evaluated together, but not traced ({reason})")
            self._compiled = False
            return self._batched
        return _replayed(function, arguments)

    def _compiled_form(self, arguments: tuple[Tensors, ...]) -> Batched:
        """The batched computation compiled; as a list of operations where that fails."""
        try:
            function = record(self._batched_over(compiled=True), arguments)
            compiled: Batched = torch.compile(function, dynamic=False, options=_compiler_options())
            compiled(*arguments)
            return _replayed(compiled, arguments)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            self.notices.append(f"not compiled ({reason}); the traced form is as exact")
            self._compiled = False
        return self._traced_form(arguments)

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


def _replayed(function: Batched, arguments: tuple[Tensors, ...]) -> Batched:
    points = leaves(arguments[0])[0]
    is_small = points.numel() * points.element_size() <= _GRAPH_BYTES
    if points.is_cuda and is_small:
        return GraphReplay(function, arguments)
    # The call of a module looks for hooks, which takes as long as some operations.
    return getattr(function, "forward", function)


def _compiler_options() -> dict[str, Any]:
    """The options that this torch knows."""
    from torch._inductor import config

    return {name: value for name, value in _COMPILER.items() if hasattr(config, name)}


def pays_to_compile(model: FlatModel, batch: int, gradients: float, workers: int) -> bool:
    """Whether a run of so many gradients is long enough, from the operations of one gradient."""
    if model.device.type != "cuda":
        return False
    numbers = torch.zeros(batch, dtype=torch.int64, device=model.device)
    with FlopCounterMode(display=False) as counter:
        model.gradient(model.initial, model.initial_buffers, numbers, 0)
    at_once = workers * counter.get_total_flops() / _TRACED_RATE
    return gradients / workers * max(_SHORTEST_SECONDS, at_once) >= _COMPILED_SECONDS


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


def make_engine(
    kind: str, model: FlatModel, *, compiled: bool = False, most_rows: int = 128
) -> Engine:
    if kind == "vector":
        return VectorEngine(model, compiled=compiled, most_rows=most_rows)
    if kind == "loop":
        return LoopEngine(model)
    if kind == "none":
        return NullEngine()
    raise unknown_name("engine", kind, ENGINES)
