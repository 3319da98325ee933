"""Muon: torch's for matrices, AdamW for everything else, for many workers at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gossamer import simulate
from gossamer.optim.layerwise import orthogonal
from gossamer.optim.optimisers import make_optimiser
from support import digits

SHAPES = ((6, 4), (4,), (3, 2, 2, 2), (4, 6), (6, 4))
"""Matrices, a vector, and a kernel, which torch's Muon refuses."""


def gradients(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(2, sum(map(math.prod, SHAPES)), generator=generator)


def moved(spec: str, scale: float = 1.0, steps: int = 4) -> Tensor:
    """Two workers after some steps."""
    optimiser = make_optimiser(spec).suited(SHAPES)
    parameters = gradients(99)
    state = {slot: torch.zeros_like(parameters) for slot in optimiser.slots}
    for step in range(steps):
        optimiser.descend_(parameters, gradients(step, scale), state, [step] * 2, 0.01)
    return parameters


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_matrices_move_as_torch_moves_them_and_the_rest_by_adamw() -> None:
    """Worker by worker; orthogonalising in 16 bits leaves differences of the last bits."""
    start, found = gradients(99), moved("muon")
    for row in range(2):
        parts = start[row].split(list(map(math.prod, SHAPES)))
        own = [
            nn.Parameter(part.view(shape).clone())
            for part, shape in zip(parts, SHAPES, strict=True)
        ]
        matrices = [one for one in own if one.dim() == 2]
        others = [one for one in own if one.dim() != 2]
        pair = [
            torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.01, weight_decay=0.1),
        ]
        for step in range(4):
            given = gradients(step)[row].split(list(map(math.prod, SHAPES)))
            for one, gradient in zip(own, given, strict=True):
                one.grad = gradient.view(one.shape).clone()
            for optimizer in pair:
                optimizer.step()
        expected = torch.cat([one.detach().flatten() for one in own])
        torch.testing.assert_close(found[row], expected, rtol=0, atol=2e-4)


def test_the_length_of_gradients_does_not_matter() -> None:
    torch.testing.assert_close(moved("muon", 1.0), moved("muon", 128.0), rtol=0, atol=2e-4)


def test_singular_values_come_near_to_one() -> None:
    """Between 0.4 and 1.6, however far they were apart."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(5, 12, 7, generator=generator) * torch.logspace(-3, 3, 5).view(-1, 1, 1)
    values = torch.linalg.svdvals(orthogonal(matrices, 5).float())
    assert bool((values > 0.4).all() and (values < 1.6).all())


@pytest.mark.parametrize("method", ["all_reduce", "diloco:period=8"])
def test_muon_trains_alone_and_inside_an_outer_loop(method: str) -> None:
    """The second is MuLoCo."""
    result = simulate(digits(), method, "equal-8", seed=3, evaluations=1, optimiser="muon",
                      learning_rate=0.02)  # fmt: skip
    assert result.accuracy >= 0.93
