"""The noise scale agrees with closed forms, and is told by every world."""

from __future__ import annotations

import pytest
import torch

import gossamer
from gossamer.observe.noise_scale import NoiseScale
from gossamer.tasks import make_task


def test_the_noise_scale_of_a_quadratic_is_that_of_its_closed_form():
    """On a quadratic the gradient of a sample is h (theta - c), so tr(S) and |G|^2 are known: the
    run that hardly moves reports their ratio to within 10 %."""
    spec = "quadratic:dimension=20,noise=1,samples=8192"
    result = gossamer.simulate(
        spec, "all_reduce", "equal-8", batch=4, epochs=1.0, learning_rate=1e-7, seed=3
    )
    task = make_task(spec)
    curvatures = torch.logspace(0.0, 1.0, 20, base=0.1, dtype=torch.float64)
    points = task.train.inputs.double()
    gradients = curvatures * (result.parameters.double() - points)
    closed = gradients.var(0).sum() / gradients.mean(0).square().sum()
    assert result.summary["noise_scale"] == pytest.approx(float(closed), rel=0.1)
    assert result.history[-1]["noise_scale"] == pytest.approx(float(closed), rel=0.1)


@pytest.mark.parametrize("rows", [1, 3, 8, 50])
def test_both_parts_are_unbiased_however_the_gradients_come(rows):
    """Gradients of known mean and covariance, shown one by one or many at a time."""
    generator = torch.Generator().manual_seed(0)
    mean, batch = torch.full((30,), 0.5), 4
    found = []
    for _ in range(60):
        scale = NoiseScale()
        for _ in range(48 // rows + 1):
            noise = torch.randn(rows, 30, generator=generator) / batch**0.5
            scale.add(mean + 2 * noise, batch)
        found.append(scale.sums)
    noise, signal = torch.tensor(found).mean(0)
    assert noise == pytest.approx(4 * 30, rel=0.05)
    assert signal == pytest.approx(0.25 * 30, rel=0.05)


def test_what_cannot_be_told_is_absent():
    """Too few gradients, or none but noise, have no scale."""
    few, lost = NoiseScale(), NoiseScale()
    few.add(torch.ones(3, 2), 1)
    assert few.samples is None
    lost.add(torch.tensor([[1.0], [-1.0]]).repeat(4, 1), 1)
    assert lost.samples is None


def test_batches_of_two_sizes_are_not_compared():
    """A window holds gradients of one size only."""
    scale = NoiseScale()
    for size in (1, 2, 1, 2):
        scale.add(torch.randn(5, 4), size)
    assert scale.sums == []
