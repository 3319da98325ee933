"""Work and depth of layers over sequences: recurrent ones and attention.

Each function gives (work, depth) of the forward pass, of the gradient by the weights and of that by
the input.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gossamer.plan.cost.convolution import log2_up

Pairs = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
_GATES = {"LSTM": 4, "GRU": 3}


def recurrent(layer: nn.RNNBase, given: Tensor | PackedSequence) -> Pairs:
    """In every layer, direction and position the gates see the input and the state before; the
    positions of a layer follow each other."""
    if isinstance(given, PackedSequence):
        positions, times = given.data.shape[0], len(given.batch_sizes)
    else:
        positions = math.prod(given.shape[:-1])
        times = given.shape[1 if layer.batch_first and given.dim() == 3 else 0]
    directions = 2 if layer.bidirectional else 1
    gates = _GATES.get(layer.mode, 1) * layer.hidden_size
    state = layer.proj_size or layer.hidden_size
    products = chain = 0
    for number in range(layer.num_layers):
        seen = state * directions if number else layer.input_size
        products += directions * gates * (seen + state)
        chain += log2_up(seen) + times * (log2_up(state) + 2)
        if layer.proj_size:
            products += directions * layer.hidden_size * layer.proj_size
            chain += times * log2_up(layer.hidden_size)
    elementwise = layer.num_layers * directions * gates
    return _three(products * positions, elementwise * positions, chain, positions)


def cell(layer: nn.RNNCellBase, given: Tensor) -> Pairs:
    """One position of a recurrent layer."""
    rows = math.prod(given.shape[:-1])
    gates, seen = layer.weight_ih.shape
    products = gates * (seen + layer.hidden_size)
    chain = log2_up(max(seen, layer.hidden_size)) + 2
    return _three(products * rows, gates * rows, chain, rows)


def attention(layer: nn.MultiheadAttention, query: Tensor, key: Tensor) -> Pairs:
    """Four projections, and for every pair of positions a product with the key and one with the
    value; each of these two has two gradients, none of them by weights."""
    at = 1 if layer.batch_first and query.dim() == 3 else 0
    asking = query.shape[at]
    asked = key.shape[at] + (layer.bias_k is not None) + layer.add_zero_attn
    batch = query.shape[1 - at] if query.dim() == 3 else 1
    width, heads = layer.embed_dim, layer.num_heads
    rows = batch * max(asking, key.shape[at])
    projections = batch * (
        2 * asking * width * width + key.shape[at] * width * (layer.kdim + layer.vdim)
    )
    products = batch * asking * asked * width
    softmax = batch * heads * asking * asked
    chain = 2 * log2_up(width) + log2_up(width // heads) + 2 * log2_up(asked) + 1
    return (
        (projections + 2 * products + softmax, chain),
        (projections, chain + log2_up(rows)),
        (projections + 4 * products + softmax, chain),
    )


def _three(products: float, elementwise: float, chain: float, rows: int) -> Pairs:
    """The gradients by the weights add up over all rows once the chain has gone back."""
    there = (products + elementwise, chain)
    return there, (products, chain + log2_up(rows)), there
