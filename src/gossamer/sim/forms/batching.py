"""Workers as a dimension: what the batching rules of forms have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class FirstDerivative(torch.autograd.Function):
    """A function that computes gradients, and has none of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError("second derivatives are not computed")


def stacked(workers: int, in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """Each tensor with the workers as its first dimension; a shared one is only expanded."""
    return [
        tensor.expand(workers, *tensor.shape) if at is None else tensor.movedim(at, 0)
        for at, tensor in zip(in_dims, tensors, strict=False)
    ]


def folded(stack: Tensor) -> Tensor:
    """[workers, samples, ...] to [workers x samples, ...]."""
    return stack.flatten(0, 1)


def apart(fold: Tensor, workers: int) -> Tensor:
    """The inverse of `folded`."""
    return fold.unflatten(0, (workers, -1))


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as autocast gives them to products of matrices, where it is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [one.to(dtype) if one.is_floating_point() else one for one in tensors]
