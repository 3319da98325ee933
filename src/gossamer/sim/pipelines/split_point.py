"""Gradients of pipelines without weight stashing: backward passes at other weights than forward.

A layer's forward pass has made its output with the weights of that time. When its backward pass
comes, the weights have changed, and the gradient is that of the layer with the new weights at the
old input. As one expression that autograd understands, for the layer f, its input x, the weights w
of the forward pass and u of the backward pass:

    y = f(u, x) + constant(f(w, x) - f(u, x))

whose value is f(w, x) and whose derivatives are those of f(u, .) at x.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from gossamer.pipeline.chain import chain_of
from gossamer.precision import autocasting
from gossamer.tasks.data import Tensors
from gossamer.tasks.flat_model import FlatModel, checked_loss
from gossamer.worker import Lesson

Values = Mapping[str, Tensor]


class _PartOf(nn.Module):
    """A model of which one part is run at a time."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self._parts = chain_of(whole)

    def forward(self, number: int, value: Any) -> Any:
        return self._parts[number].run(value)

    def __len__(self) -> int:
        return len(self._parts)


class SplitPointModel(FlatModel):
    """Its points are two vectors, one after the other: the weights of the backward pass, and those
    of the forward pass."""

    def _parts(self) -> _PartOf:
        return _PartOf(self.module)

    def flat_loss(
        self, flat: Tensor, buffers: Tensor, inputs: Tensors, targets: Tensors, key: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        backward, forward = flat.split(self.layout.total)
        loss, packed = self._split_loss(
            self.layout.unpack(backward), self.layout.unpack(forward.detach()), buffers, inputs,
            targets, key,
        )  # fmt: skip
        return loss, (loss.detach(), packed)

    def gradient(
        self, flat: Tensor, buffers: Tensor, batch: Tensor, key: int,
        lesson: Lesson | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Plain autograd for one worker."""
        point = flat.clone().requires_grad_()
        inputs, targets = self.task.train.at(batch)
        keyed = torch.tensor(key, device=flat.device)
        loss, (told, packed) = self.flat_loss(point, buffers, inputs, targets, keyed)
        (gradient,) = torch.autograd.grad(loss, [point])
        return gradient, told, packed.detach()

    def _split_loss(
        self, backward: Values, forward: Values, buffers: Tensor, inputs: Tensors,
        targets: Tensors, key: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.task.augment is not None:
            inputs = self.task.augment(inputs, key)
        parts = self._parts()
        statistics = {name: v.clone() for name, v in self.buffer_layout.unpack(buffers).items()}
        unused = {name: v.clone() for name, v in statistics.items()}
        fixed = dict.fromkeys(self.key_names, key)
        value: Any = inputs
        with autocasting(self.precision, self.device):
            for number in range(len(parts)):
                new = _run(parts, {**backward, **unused, **fixed}, number, value)
                old = _run(parts, {**forward, **statistics, **fixed}, number, value)
                value = new + (old - new).detach()
            loss = checked_loss(self.task, value, targets)
        packed = self.buffer_layout.pack(statistics.values()) if statistics else buffers
        return loss.to(torch.promote_types(loss.dtype, torch.float32)), packed


def _run(parts: _PartOf, state: Values, number: int, value: Any) -> Any:
    named = {f"whole.{name}": tensor for name, tensor in state.items()}
    return functional_call(parts, named, (number, value))
