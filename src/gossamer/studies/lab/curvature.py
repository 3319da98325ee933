"""The largest curvature where training starts: it turns the theory's edge into a learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.tasks.flat_model import FlatModel

_SAMPLES = 512
_ITERATIONS = 100
_ENOUGH = 1e-3


def largest_curvature(model: FlatModel) -> float | None:
    """The largest eigenvalue of the Hessian of the loss on one batch, at the initial parameters.

    Power iteration with Hessian-vector products by double backward. None where a layer of the model
    cannot be differentiated twice.
    """
    try:
        first = _dominant(model, shift=0.0)
        # Dominant means largest in modulus; shifted by it, the largest one is dominant.
        return first if first > 0.0 else _dominant(model, shift=-first) + first
    except (RuntimeError, NotImplementedError):
        return None


def _dominant(model: FlatModel, shift: float) -> float:
    """The eigenvalue of the largest modulus of H + shift, with its sign."""
    train = model.task.train
    inputs, targets = train.inputs[:_SAMPLES], train.targets[:_SAMPLES]
    key = torch.zeros((), dtype=torch.int64, device=model.device)
    point = model.initial.clone().requires_grad_()
    loss, _ = model.flat_loss(point, model.initial_buffers, inputs, targets, key)
    (gradient,) = torch.autograd.grad(loss, point, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(gradient @ vector, point, retain_graph=True)
        return found + shift * vector

    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(point), generator=generator).to(point)
    vector /= vector.norm()
    value = 0.0
    for _ in range(_ITERATIONS):
        image = product(vector)
        before, value = value, float(vector @ image)
        norm = image.norm()
        if not norm > 0.0 or abs(value - before) <= _ENOUGH * abs(value):
            break
        vector = image / norm
    return value
