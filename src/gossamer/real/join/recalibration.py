"""Batches that a loop has trained on, and the output's BatchNorm statistics made anew on them.

A hook keeps some of the inputs that pass through `model(...)` in training, as the loop has prepared
them. The statistics of the output model are recomputed on these, so no loader is read again.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.payload import payload
from gossamer.real.join.several_optimizers import SeveralModels
from gossamer.tasks.calibration import layers_with_statistics, recompute_
from gossamer.tasks.flat_model import drawing_from

BATCHES = 32
_MOST_BYTES = 64 << 20
"""How many bytes of inputs are kept, at most; a single batch may be larger."""
_EVERY = 64
"""Once enough batches are kept, every so-many-th pass replaces the oldest of them."""


@payload
@dataclass(frozen=True, slots=True)
class Averages:
    """The statistics of all layers as the mean over `count` batches."""

    count: int
    values: Tensor


NO_AVERAGES = Averages(0, torch.empty(0))


def combined_averages(found: Sequence[Averages]) -> Averages:
    """The mean over everybody's batches; all who combine the same averages get the same bits."""
    total = sum(one.count for one in found)
    if not total:
        return NO_AVERAGES
    weighted = [one.values * (one.count / total) for one in found if one.count]
    return Averages(total, torch.stack(weighted).sum(0))


class _Watching:
    """The hook. Copies of the model, and saved models, get a hook that does nothing instead."""

    def __init__(self, passed: Callable[[nn.Module, Any, Any], None]) -> None:
        self._passed = passed

    def __call__(self, model: nn.Module, given: Any, named: Any) -> None:
        self._passed(model, given, named)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return copied_hook, ()


def copied_hook() -> Callable[..., None]:
    """The hook of copies."""
    return _unwatched


def _unwatched(model: nn.Module, given: Any, named: Any) -> None:
    pass


class Recalibration:
    """Keeps batches of one worker, and recomputes BatchNorm's statistics on them."""

    def __init__(self, model: nn.Module, most: int, *, is_needed: bool) -> None:
        """`most` batches are kept. `is_needed` says that the output is another model than the
        trained one, which matters if it has layers with statistics."""
        self._model = model
        self._most = most
        self._layers = layers_with_statistics(model) if is_needed else []
        self.is_needed = bool(self._layers) and most > 0
        self.is_paused = False
        """Set while the model is not the one that this worker trains."""
        self._passes: deque[tuple[Callable[[], object], int]] = deque()
        """Forward passes to repeat, each with the number of bytes of its inputs."""
        self._resting: list[nn.Module] = []
        """Modules that the loop keeps in evaluation mode, such as frozen BatchNorm."""
        self._seen = 0
        self._is_full = False
        self._has_warned = False
        called = list(model) if isinstance(model, SeveralModels) else [model]
        self._hooks = [
            one.register_forward_pre_hook(_Watching(self._passed), with_kwargs=True)
            for one in (called if self.is_needed else [])
        ]

    def close(self) -> None:
        """Keep no more batches."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _passed(self, model: nn.Module, given: Any, named: Any) -> None:
        if not model.training or self.is_paused or torch.compiler.is_compiling():
            return
        self._seen += 1
        if self._is_full and self._seen % _EVERY:
            return
        # The inputs are copied, because the loop or the model may work in place.
        arguments = pytree.tree_map(_copied, (given, named))
        leaves = pytree.tree_leaves(arguments)
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if self._is_full:
            self._passes.popleft()
        self._passes.append((partial(_pass, model, arguments), size))
        held = sum(size for _, size in self._passes)
        while len(self._passes) > 1 and held - self._passes[0][1] >= _MOST_BYTES:
            held -= self._passes.popleft()[1]
        self._is_full = len(self._passes) >= self._most or held >= _MOST_BYTES
        self._resting = [module for module in self._model.modules() if not module.training]

    def take(self, batches: Iterable[Any], forward: Callable[[Any], object] | None) -> None:
        """Use these batches from now on, and no others."""
        if self._model.training:
            self._resting = [module for module in self._model.modules() if not module.training]
        self.close()
        chosen = islice(batches, self._most or BATCHES)
        call = forward or partial(_forward, self._model)
        self._passes = deque((partial(call, batch), 0) for batch in chosen)

    def recompute(self, *, warns: bool) -> int:
        """Recompute the statistics of the model as it is. Returns on how many batches; without any,
        the statistics stay as they are."""
        if not self._passes:
            self._warn(
                warns and self._seen == 0,
                "no batch was seen to pass through model(...) in training mode; give the worker "
                "some with worker.recalibrate(batches)",
            )
            return 0
        layers = [layer for layer in self._layers if layer not in self._resting]
        try:
            with self._as_in_training(layers):
                return recompute_(layers, [one for one, _ in self._passes])
        except Exception as error:
            self._warn(
                warns,
                f"the model failed on batches that it was trained on ({error}); give the worker "
                "others with worker.recalibrate(batches, forward=...)",
            )
            return 0

    def _warn(self, is_due: bool, reason: str) -> None:
        if is_due and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the output model has the mean of the workers' BatchNorm statistics, which need "
                f"not fit it: {reason}",
                stacklevel=2,
            )

    def averages(self, *, warns: bool) -> Averages:
        """Recompute, and return what this worker adds to everybody's averages."""
        count = self.recompute(warns=warns)
        values = [value.detach().reshape(-1) for value in self._values()]
        return Averages(count, torch.cat(values).to("cpu", torch.float64))

    def load(self, averages: Averages) -> None:
        at = 0
        for value in self._values():
            value.copy_(averages.values[at : at + value.numel()].view_as(value))
            at += value.numel()
        for layer in self._layers:
            if layer not in self._resting and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(averages.count)

    def _values(self) -> list[Tensor]:
        both = [(layer.running_mean, layer.running_var) for layer in self._layers]
        return [value for pair in both for value in pair if value is not None]

    @contextmanager
    def _as_in_training(self, layers: Sequence[nn.Module]) -> Generator[None]:
        """Inside, the model is in training mode. Afterwards modes, random numbers and buffers other
        than the statistics are as before."""
        modes = [(module, module.training) for module in self._model.modules()]
        moved = {id(buffer) for layer in layers for buffer in layer.buffers()}
        buffers = [buffer for buffer in self._model.buffers() if id(buffer) not in moved]
        before = [buffer.clone() for buffer in buffers]
        was_paused, self.is_paused = self.is_paused, True
        self._model.train()
        for module in self._resting:
            module.training = False
        try:
            with _own_draws(self._model):
                yield
        finally:
            self.is_paused = was_paused
            for module, was_training in modes:
                module.training = was_training
            for buffer, value in zip(buffers, before, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _own_draws(model: nn.Module) -> Generator[None]:
    """Whatever the model draws inside, the loop's random numbers go on as they would have."""
    state, state_of_numpy = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as stack:
            for device in {torch.device("cpu"), next(model.parameters()).device}:
                stack.enter_context(drawing_from(0, device))
            yield
    finally:
        random.setstate(state)
        np.random.set_state(state_of_numpy)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _pass(model: nn.Module, arguments: Any) -> object:
    given, named = pytree.tree_map(_copied, arguments)
    return model(*given, **named)


def _forward(model: nn.Module, batch: Any) -> object:
    """Pass a batch as loaders give it: inputs, inputs with targets, or a mapping by name."""
    device = next(model.parameters()).device

    def there(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    if isinstance(batch, Mapping):
        return model(**pytree.tree_map(there, dict(cast("Mapping[str, Any]", batch))))
    return model(there(batch[0] if isinstance(batch, list | tuple) else batch))
