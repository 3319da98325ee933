"""Work and depth of layers, counted by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from gossamer.errors import ConfigurationError
from gossamer.plan.cost import layer_work
from gossamer.plan.cost.work_depth import (
    NOT_COUNTED,
    greedy_bounds,
    layer_costs,
    model_work_depth,
)


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
    """N Cout H' W' Cin Ky Kx, and as many products in each gradient; groups see fewer."""
    (layer,) = layer_costs(nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.zeros(2, 3, 16, 16))
    assert layer.output_shape == (2, 8, 8, 8)
    assert layer.forward.work == 2 * 8 * 64 * 3 * 9
    assert layer.input_gradient.work == layer.weight_gradient.work == layer.forward.work
    assert layer.forward.depth == 2 + 2 + 2
    assert "winograd" not in layer.alternatives
    (grouped,) = layer_costs(nn.Conv2d(8, 8, 3, groups=8, padding=1), torch.zeros(1, 8, 4, 4))
    assert grouped.forward.work == 8 * 16 * 9
    (back,) = layer_costs(nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2), torch.zeros(1, 8, 4, 4))
    assert back.forward.work == 6 * 16 * 4 * 9


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(64, 32), (4, 8, 64)),
    "strided": (nn.Conv2d(8, 16, 3, stride=2, padding=1), (2, 8, 16, 16)),
    "dilated": (nn.Conv1d(8, 16, 5, dilation=2), (2, 8, 33)),
    "transposed": (nn.ConvTranspose2d(8, 6, 3, stride=2), (2, 8, 9, 9)),
    "rnn": (nn.RNN(48, 64), (24, 3, 48)),
    "gru": (nn.GRU(48, 64, num_layers=2, bidirectional=True, batch_first=True), (3, 24, 48)),
    "lstm": (nn.LSTM(48, 64), (24, 3, 48)),
    "projected": (nn.LSTM(48, 64, num_layers=2, proj_size=32), (24, 3, 48)),
    "encoder": (nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), (3, 20, 128)),
    "decoder": (nn.TransformerEncoderLayer(128, 4, 256, norm_first=True), (20, 3, 128)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:TF32 acceleration")
@pytest.mark.parametrize("kind", LAYERS)
def test_products_are_those_that_torch_counts(kind: str) -> None:
    """Forward and backward, but for the little that layers do by elements, and for the gradient by
    a recurrent layer's first state, which nobody asks for."""
    model, shape = LAYERS[kind]
    inputs = torch.randn(shape, requires_grad=True)
    plain = torch.backends.mkldnn.flags(enabled=False)
    with plain, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(inputs)
        output = output[0] if isinstance(output, tuple) else output
        forward = counter.get_total_flops() / 2
        output.sum().backward()
    backward = counter.get_total_flops() / 2 - forward
    layers = layer_costs(model, inputs.detach())
    assert sum(layer.forward.work for layer in layers) == pytest.approx(forward, rel=0.04)
    gradients = sum(layer.work - layer.forward.work for layer in layers)
    assert gradients == pytest.approx(backward, rel=0.04)
    assert not any(layer.kind == NOT_COUNTED for layer in layers)


def test_a_recurrent_layer_is_as_deep_as_its_sequence_is_long() -> None:
    """Twice the positions, twice the work and about twice the chain; packed ones count as many."""
    layer = nn.LSTM(16, 32)
    (short,), (long,) = (layer_costs(layer, torch.zeros(time, 4, 16)) for time in (10, 20))
    assert long.work == 2 * short.work
    assert long.forward.depth - 4 == 2 * (short.forward.depth - 4)
    assert short.parameter_bytes == 4 * 4 * 32 * (16 + 32 + 2)
    (cell,) = layer_costs(nn.LSTMCell(16, 32), torch.zeros(4, 16))
    assert 10 * cell.work == short.work
    packed = layer_work.recurrent(layer, pack_sequence([torch.zeros(10, 16)] * 4))
    assert packed[0] == short.forward


class Written(nn.Module):
    """Attention written out, around a layer that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(8, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projections(inputs).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Wave(nn.Module):
    """A layer of an own kind."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sin()


def test_what_is_not_counted_is_named() -> None:
    """A layer of an own kind, and a module that multiplies outside of its layers; others are not
    named, though they contain such ones."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"a": Written()})["a"], Wave())
    layers = layer_costs(model, torch.zeros(2, 5, 8))
    named = [layer.name for layer in layers if layer.kind == NOT_COUNTED]
    assert named == ["2 (Wave)", "1 (Written)"]
    assert [layer.name for layer in layers if layer.kind == "linear"] == ["0", "1.projections"]
    (alone,) = (layer for layer in layer_costs(Written(), torch.zeros(2, 5, 8)) if not layer.work)
    assert (alone.name, alone.kind) == ("(Written)", NOT_COUNTED)


def test_convolution_algorithms_trade_products_for_transforms() -> None:
    """By hand for one size; Winograd saves (a/m)^2 / r^2 of the products when channels are many."""
    sizes = layer_work.ConvolutionSizes(4, 64, 64, (32, 32), (32, 32), (3, 3))
    direct, fft, winograd = (
        way(sizes) for way in (layer_work.direct, layer_work.fft, layer_work.winograd)
    )
    assert direct.work == 4 * 64 * 1024 * 64 * 9
    assert fft.work == 1024 * 10 * (64 * 64 + 4 * 128) + 1024 * 4 * 64 * 64
    assert fft.depth == 20 + 6
    tiles, products = 4 * 16 * 16, 16 * 64 * 64 * 4 * 256
    transforms = 64 * 64 * 4 * 21 + 64 * tiles * 128 + 64 * tiles * 48
    assert winograd.work == products + transforms
    assert winograd.work < direct.work
    assert winograd.depth == 4 + 8 + 6


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


@given(st.floats(1, 1e12), st.floats(1, 1e3), st.integers(1, 10**6))
def test_greedy_schedules_lie_between_their_bounds(work: float, depth: float, p: int) -> None:
    """max(W/p, D) <= W/p + D <= 2 max(W/p, D)."""
    least, most = greedy_bounds(work, depth, p)
    assert least <= most <= 2 * least
    with pytest.raises(ConfigurationError, match="at least 1"):
        greedy_bounds(work, depth, 0)
