"""The largest rate that a delay allows: delayed gradient descent on a quadratic.

On a quadratic of curvature h, heavy-ball descent with rate eta, momentum m and a delay of d steps
is a linear recurrence: its solutions are powers of the roots z of

    z^(d-1) (z - 1) (z - m) + eta h = 0          (times z for d = 0)

and it is stable while every root lies inside the unit circle. So the product eta h alone decides,
and there is one edge for each delay and momentum. The largest curvature where training starts turns
that edge into a learning rate.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import Optimiser, Sgd
from gossamer.specs import check_range
from gossamer.tasks.flat_model import FlatModel

_HALVINGS = 200
_SAMPLES = 512
_ITERATIONS = 100
_ENOUGH = 1e-3


def stability_edge(delay: int, momentum: float = 0.0) -> float:
    """The largest eta h for which delayed descent on a quadratic is stable."""
    _check(delay, momentum)
    if momentum == 0.0:
        return 2.0 * math.sin(math.pi / (2 * (2 * delay + 1)))
    return numerical_edge(delay, momentum)


def numerical_edge(delay: int, momentum: float) -> float:
    """Find the edge, where a root crosses the unit circle, for any momentum.

    At the edge a root is z = e^(i angle), where z^(d-1) (z - 1) (z - m) is a negative number: its
    phase is pi. The phase starts at pi/2 and grows with the angle, and so does the modulus, hence
    the first angle of phase pi is the edge, and halving finds it.
    """
    _check(delay, momentum)
    low, high = 0.0, math.pi
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _phase(middle, delay, momentum) < math.pi:
            low = middle
        else:
            high = middle
    z = cmath.exp(1j * high)
    return abs(z - 1) * abs(z - momentum)


def _phase(angle: float, delay: int, momentum: float) -> float:
    z = cmath.exp(1j * angle)
    return (delay - 1) * angle + (math.pi + angle) / 2 + cmath.phase(z - momentum)


def edge_of(optimiser: Optimiser, delay: int) -> float | None:
    """The edge of an optimiser; None where the theory does not cover it."""
    if not isinstance(optimiser, Sgd) or optimiser.nesterov or optimiser.dampening:
        return None
    return stability_edge(delay, optimiser.momentum) if optimiser.momentum < 1.0 else None


def _check(delay: int, momentum: float) -> None:
    check_range("delay", delay, 0)
    if not 0.0 <= momentum < 1.0:
        raise ConfigurationError(
            f"momentum must be at least 0 and below 1 for a stable recurrence, got {momentum}"
        )


def largest_curvature(
    model: FlatModel, at: Tensor | None = None, held: Tensor | None = None
) -> float | None:
    """The largest eigenvalue of the Hessian of the loss on one batch, at the initial parameters or
    those of `at`; with `held`, of its block for the parameters where that is 1 and not 0.

    Power iteration with Hessian-vector products by double backward. None where a layer of the model
    cannot be differentiated twice.
    """
    try:
        product = curvature_product(model, at)
        first = _dominant(model, product, 0.0, held)
        # The dominant eigenvalue has the largest modulus; after the shift the largest dominates.
        return first if first > 0.0 else _dominant(model, product, -first, held) + first
    except (RuntimeError, NotImplementedError):
        return None


def curvature_product(model: FlatModel, at: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The Hessian of the loss on one batch, at the initial parameters or those of `at`, times a
    vector."""
    train = model.task.train
    inputs, targets = train.first(_SAMPLES).inputs, train.first(_SAMPLES).targets
    key = torch.zeros((), dtype=torch.int64, device=model.device)
    point = (model.initial if at is None else at).clone().requires_grad_()
    loss, _ = model.flat_loss(point, model.initial_buffers, inputs, targets, key)
    (gradient,) = torch.autograd.grad(loss, point, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(gradient @ vector, point, retain_graph=True)
        return found

    return product


def _dominant(
    model: FlatModel, product: Callable[[Tensor], Tensor], shift: float, held: Tensor | None
) -> float:
    """The eigenvalue of the largest modulus of H + shift, with its sign."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(model.layout.total, generator=generator).to(model.initial)
    vector = vector if held is None else vector * held
    vector /= vector.norm()
    value = 0.0
    for _ in range(_ITERATIONS):
        image = product(vector) + shift * vector
        image = image if held is None else image * held
        before, value = value, float(vector @ image)
        norm = image.norm()
        if not norm > 0.0 or abs(value - before) <= _ENOUGH * abs(value):
            break
        vector = image / norm
    return value
