"""How large a step a delay allows: delayed gradient descent on a quadratic.

On a quadratic of curvature h, heavy-ball descent with rate eta, momentum m and a delay of d steps
is a linear recurrence: its solutions are powers of the roots z of

    z^(d-1) (z - 1) (z - m) + eta h = 0          (times z for d = 0)

and it is stable while every root lies inside the unit circle. So the product eta h alone decides,
and there is one edge for each delay and momentum.
"""

from __future__ import annotations

import cmath
import math

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import Optimiser, Sgd
from gossamer.specs import check_range

_HALVINGS = 200


def stability_edge(delay: int, momentum: float = 0.0) -> float:
    """The largest eta h for which delayed descent on a quadratic is stable."""
    _check(delay, momentum)
    if momentum == 0.0:
        return 2.0 * math.sin(math.pi / (2 * (2 * delay + 1)))
    return numerical_edge(delay, momentum)


def numerical_edge(delay: int, momentum: float) -> float:
    """The edge from where the roots cross the unit circle, for any momentum.

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


def characteristic_roots(product: float, delay: int, momentum: float) -> NDArray[np.complex128]:
    """The roots of the recurrence at eta h = `product`; stable where all are below 1 in modulus."""
    _check(delay, momentum)
    polynomial = np.zeros(delay + 3)
    polynomial[:3] = 1.0, -(1.0 + momentum), momentum
    # Multiplied by z, so that one form serves no delay too; the root at 0 that this adds is stable.
    polynomial[-2] += product
    return np.roots(polynomial).astype(np.complex128)


def edge_of(optimiser: Optimiser, delay: int) -> float | None:
    """The edge of an optimiser, None for those that the theory does not cover."""
    if not isinstance(optimiser, Sgd) or optimiser.nesterov or optimiser.dampening:
        return None
    return stability_edge(delay, optimiser.momentum) if optimiser.momentum < 1.0 else None


def _check(delay: int, momentum: float) -> None:
    check_range("delay", delay, 0)
    if not 0.0 <= momentum < 1.0:
        raise ConfigurationError(
            f"momentum must be at least 0 and below 1 for a stable recurrence, got {momentum}"
        )
