"""Work and depth of layers, counted by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer.cost import convolution
from gossamer.cost.work_depth import (
    greedy_bounds,
    layer_costs,
    model_work_depth,
    reduction,
)
from gossamer.errors import ConfigurationError


def test_a_linear_layer_multiplies_every_input_with_every_output() -> None:
    """Cout Cin N for y and for each gradient; depths log Cin, log N, log Cout."""
    (layer,) = layer_costs(nn.Linear(64, 10), torch.zeros(32, 64))
    assert layer.forward.work == layer.weight_gradient.work == layer.input_gradient.work
    assert layer.forward.work == 64 * 10 * 32
    depths = (layer.forward.depth, layer.weight_gradient.depth, layer.input_gradient.depth)
    assert depths == (6, 5, 4)
    assert layer.parameter_bytes == 4 * 650
    assert layer.activation_bytes == 4 * 320


def test_a_convolution_counts_places_channels_and_kernel() -> None:
    """N Cout H' W' Cin Ky Kx; the gradient by the input covers the image; groups see fewer."""
    (layer,) = layer_costs(nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.zeros(2, 3, 16, 16))
    assert layer.output_shape == (2, 8, 8, 8)
    assert layer.forward.work == 2 * 8 * 64 * 3 * 9
    assert layer.input_gradient.work == 4 * layer.forward.work
    assert layer.forward.depth == 2 + 2 + 2
    assert "winograd" not in layer.alternatives
    (grouped,) = layer_costs(nn.Conv2d(8, 8, 3, groups=8, padding=1), torch.zeros(1, 8, 4, 4))
    assert grouped.forward.work == 8 * 16 * 9


def test_convolution_algorithms_trade_products_for_transforms() -> None:
    """By hand for one size; Winograd saves (a/m)^2 / r^2 of the products when channels are many."""
    sizes = convolution.Sizes(4, 64, 64, (32, 32), (32, 32), (3, 3))
    direct, _ = convolution.direct(sizes)
    assert convolution.im2col(sizes) == convolution.direct(sizes)
    assert direct == 4 * 64 * 1024 * 64 * 9
    fft, depth = convolution.fft(sizes)
    assert fft == 1024 * 10 * (64 * 64 + 4 * 128) + 1024 * 4 * 64 * 64
    assert depth == 20 + 6
    winograd, depth = convolution.winograd(sizes)
    tiles, products = 4 * 16 * 16, 16 * 64 * 64 * 4 * 256
    assert winograd == products + 64 * 64 * 4 * 21 + 64 * tiles * 128 + 64 * tiles * 48
    assert winograd < direct
    assert depth == 4 + 8 + 6


def test_pooling_norm_activation_and_reshaping() -> None:
    """NCHW each, with the depth of the sums that each needs; moving data is no work."""
    model = nn.Sequential(
        nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    layers = layer_costs(model, torch.zeros(8, 4, 6, 6))
    norm, relu, pool, mean, flat = layers
    kinds = [layer.kind for layer in layers]
    assert kinds == ["norm", "activation", "pooling", "pooling", "flatten"]
    assert norm.forward.work == relu.forward.work == pool.forward.work == 8 * 4 * 36
    assert (norm.forward.depth, relu.forward.depth, pool.forward.depth) == (3, 1, 2)
    assert relu.weight_gradient.work == 0
    assert mean.forward.depth == 4
    assert flat.work == 0
    assert flat.parallelism == 0


def test_the_model_is_left_as_it_was() -> None:
    """Training mode, statistics and hooks."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model.train()
    layer_costs(model, torch.ones(4, 3))
    assert model.training
    assert float(model[0].running_mean.sum()) == 0.0
    assert not any(module._forward_hooks for module in model.modules())


def test_the_chain_of_a_model_ends_in_a_gradient_by_weights() -> None:
    """Forward through all, back through the inputs of all but the first, then its weights."""
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    layers = layer_costs(model, torch.zeros(64, 16))
    whole = model_work_depth(layers)
    assert whole.work == 3 * 64 * (16 * 8 + 8 * 4) + 2 * 64 * 8
    assert whole.depth == (4 + 1 + 3) + (2 + 1 + 6)


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 1e12), st.floats(1, 1e3), st.integers(1, 10**6))
def test_greedy_schedules_lie_between_their_bounds(work: float, depth: float, p: int) -> None:
    """max(W/p, D) <= W/p + D <= 2 max(W/p, D)."""
    least, most = greedy_bounds(work, depth, p)
    assert least <= most <= 2 * least
    with pytest.raises(ConfigurationError, match="at least 1"):
        greedy_bounds(work, depth, 0)


def test_a_sum_of_n_numbers() -> None:
    """n - 1 additions, ceil(log2 n) of them after each other."""
    assert (reduction(1).work, reduction(1).depth) == (0, 0)
    assert (reduction(9).work, reduction(9).depth) == (8, 4)
