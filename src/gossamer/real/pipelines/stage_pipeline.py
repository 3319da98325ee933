"""The gradients of one stage: its weights go in, its part of the gradient comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.pipeline.shape import ReplicaShape
from gossamer.pipeline.stage_module import StageCall, StageModule
from gossamer.real.pipelines.emptied_pipeline import EmptiedPipeline, borders_of
from gossamer.real.pipelines.flowing_pipeline import FlowingPipeline, StageStep, UnstashedPipeline
from gossamer.real.pipelines.stage_links import StageLinks
from gossamer.real.pipelines.stage_parts import StageParts
from gossamer.tasks.flat_model import FlatModel, checked_loss, drawing_from
from gossamer.tasks.keyed import fold


class StagePipeline:
    """Chooses the engine, and hands it weights, samples and keys."""

    def __init__(
        self, model: FlatModel, parts: StageParts, shape: ReplicaShape, links: StageLinks,
        batch: int, progress: Callable[[int], float],
    ) -> None:  # fmt: skip
        """`progress` says which part of the run is over at a step."""
        self._model, self._layout = model, parts.layouts[links.stage]
        self._microbatches = shape.microbatches_of(batch)
        self._keys: Mapping[int, int] = {}
        self._step = 0
        own = {
            number: parts.modules[number]
            for number, stage in enumerate(parts.places) if stage == links.stage
        }  # fmt: skip
        named = dict(model.module.named_parameters())
        self._parameters = [named[name] for name in self._layout.names]
        self._emptied: EmptiedPipeline | None = None
        self._flowing: FlowingPipeline | None = None
        if shape.is_asynchronous:
            (module,) = own.values()
            lag = shape.lags()[links.stage]
            if shape.has_split_points and lag:
                singles = [StageModule(model.module, [part]) for part in module.parts]
                self._flowing = UnstashedPipeline(
                    model.module, [StageCall(model.module, one) for one in singles], lag, links,
                    self._loss, self._set_keys, is_corrected=shape.pipeline == "pipemare",
                    progress=progress,
                )  # fmt: skip
            else:
                stage = StageCall(model.module, module)
                self._flowing = FlowingPipeline(
                    stage, lag, self._microbatches, links, self._loss, self._set_keys
                )
        else:
            part = model.task.train.first(batch // self._microbatches).inputs
            borders = borders_of(model.module, parts.modules, part)
            self._emptied = EmptiedPipeline(
                shape, self._microbatches, own, borders, links, self._loss
            )
            for module in own.values():
                _count_passes(module, self._microbatches, lambda n: self._set_keys(self._step, n))

    def _loss(self, output: Any, targets: Any) -> Tensor:
        return checked_loss(self._model.task, output, targets)

    def _set_keys(self, step: int, microbatch: int) -> None:
        """What dropout draws from in the next forward pass."""
        key = torch.tensor(self._keys[step])
        if self._microbatches > 1:
            key = fold(key, microbatch)
        for name in self._model.key_names:
            self._model.module.get_buffer(name).copy_(key)

    def _data(self, samples: Tensor, key: int) -> tuple[Any, Any]:
        task = self._model.task
        inputs, targets = task.train.at(samples)
        if task.augment is not None:
            inputs = task.augment(inputs, torch.tensor(key))
        return inputs, targets

    def step(
        self, point: Tensor, coming: Mapping[int, Tensor], keys: Mapping[int, int]
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The gradient of the first step of those that are coming, and in the last stage its loss.
        `coming` has their samples by number, `keys` what they draw from."""
        self._keys = {**self._keys, **keys}
        self._step = min(coming)
        for old in [number for number in self._keys if number < self._step]:
            del self._keys[old]
        with drawing_from(keys[self._step], self._model.device):
            if self._flowing is not None:
                return self._flow(self._flowing, point, coming)
            assert self._emptied is not None
            return self._empty(self._emptied, point, coming)

    def _flow(
        self, flowing: FlowingPipeline, point: Tensor, coming: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        # Each parameter gets memory of its own: alignment decides the last bits.
        weights = {
            name: value.clone().requires_grad_()
            for name, value in self._layout.unpack(point).items()
        }
        steps: list[StageStep] = []
        for number, samples in coming.items():
            inputs, targets = self._data(samples, self._keys[number])
            size = self._microbatches
            steps.append(StageStep(number, inputs.chunk(size), targets.chunk(size)))
        gradients, loss = flowing.step(weights, steps)
        return self._layout.pack(gradients), loss

    def _empty(
        self, emptied: EmptiedPipeline, point: Tensor, coming: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        for tensor, value in zip(
            self._parameters, self._layout.unpack(point).values(), strict=True
        ):
            tensor.detach().copy_(value)
            tensor.grad = None
        loss = emptied.step(*self._data(coming[self._step], self._keys[self._step]))
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return self._layout.pack(pieces), loss

    def buffers(self) -> Tensor:
        """The model's statistics, as far as this stage has made them."""
        named = dict(self._model.module.named_buffers())
        flat = [named[name] for name in self._model.buffer_layout.names]
        return self._model.buffer_layout.pack(flat)

    @property
    def most_versions(self) -> int:
        """The most versions of the weights that were kept at one time."""
        return 1 if self._flowing is None else self._flowing.most_stashed

    def close(self) -> None:
        if self._emptied is not None:
            self._emptied.close()


def _count_passes(
    module: torch.nn.Module, microbatches: int, tell: Callable[[int], None]
) -> None:  # fmt: skip
    """Tell the number of the micro-batch before each forward pass: schedules keep their order."""
    passes = 0

    def before(*_: object) -> None:
        nonlocal passes
        tell(passes % microbatches)
        passes += 1

    module.register_forward_pre_hook(before)
