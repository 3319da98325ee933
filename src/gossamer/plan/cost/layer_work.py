"""The work and the depth of one layer, by its kind (Ben-Nun & Hoefler 2019, section 4 and table 6).

Every kind gives three figures: the forward pass, the gradient with respect to the weights, and the
gradient with respect to the input. N is the batch, Cin and Cout are the channels, H x W is the
image, H' x W' the result, and Ky x Kx the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class WorkDepth:
    """The number of operations, and the longest chain of operations that need each other."""

    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0


NOTHING = WorkDepth(0, 0)
Passes = tuple[WorkDepth, WorkDepth, WorkDepth]
"""The forward pass, the gradient by the weights and the gradient by the input."""

_POOLINGS = (
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd,  # pyright: ignore[reportPrivateUsage]
    nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd,  # pyright: ignore[reportPrivateUsage]
)  # fmt: skip
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)  # pyright: ignore[reportPrivateUsage]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_Convolution = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d
    | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)  # fmt: skip
_ELEMENTWISE = ("activation", "dropout", "padding", "pixelshuffle", "upsampling", "channelshuffle")
"""Modules of torch.nn whose layers do a few operations for each number of their output."""
_MOVES = (nn.Flatten, nn.Identity, nn.Unflatten)
_GATES = {"LSTM": 4, "GRU": 3}


def passes_of(
    layer: nn.Module, given: Sequence[Tensor | PackedSequence], output: Tensor
) -> tuple[str, Passes] | None:
    """The kind of a layer and its work and depth; None for a kind that is not counted."""
    first = given[0]
    if isinstance(layer, nn.RNNBase):
        return "recurrent", recurrent(layer, first)
    if isinstance(first, PackedSequence):
        return None
    if isinstance(layer, nn.RNNCellBase):
        return "recurrent", _cell(layer, first)
    if isinstance(layer, nn.MultiheadAttention):
        key = given[1] if len(given) > 1 else first
        assert isinstance(key, Tensor)
        return "attention", _attention(layer, first, key)
    if isinstance(layer, nn.Linear):
        return "linear", _linear(layer, output)
    if isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED)):
        # A transposed convolution multiplies at every place of its input.
        places = first if isinstance(layer, _TRANSPOSED) else output
        # Each product of the forward pass has one in either gradient, whatever the stride.
        return "convolution", _alike(direct(_sizes(layer, first, places)))
    if isinstance(layer, _POOLINGS):
        return "pooling", _pooling(first, output)
    if isinstance(layer, _NORMS):
        return "norm", _alike(_norm(layer, first))
    each = WorkDepth(output.numel(), 1)
    if isinstance(layer, nn.Embedding):
        return "embedding", (each, each, NOTHING)
    module = type(layer).__module__.removeprefix("torch.nn.modules.")
    kind = "activation" if module == "activation" else type(layer).__name__.lower()
    if type(layer) in _MOVES:
        return kind, _alike(NOTHING)
    return (kind, _alike(each)) if module in _ELEMENTWISE else None


def _alike(one: WorkDepth) -> Passes:
    return one, one, one


def log2_up(count: int) -> int:
    """The depth of a sum of so many numbers."""
    return (max(1, count) - 1).bit_length()


def _linear(layer: nn.Linear, output: Tensor) -> Passes:
    """Cout Cin N each; the sums are over Cin, over the rows and over Cout."""
    rows = output.numel() // layer.out_features
    work = layer.out_features * layer.in_features * rows
    over_inputs, over_rows, over_outputs = (
        WorkDepth(work, max(1, log2_up(count)))
        for count in (layer.in_features, rows, layer.out_features)
    )
    return over_inputs, over_rows, over_outputs


def _pooling(given: Tensor, output: Tensor) -> Passes:
    """NCHW, with a maximum or mean over the window; backward, each input has its share at once."""
    window = max(1, round(given.numel() / output.numel()))
    forward = WorkDepth(given.numel(), max(1, log2_up(window)))
    return forward, NOTHING, WorkDepth(given.numel(), 1)


def _norm(layer: nn.Module, given: Tensor) -> WorkDepth:
    """NCHW, with sums over the batch (BatchNorm) or over the numbers that are normalised."""
    over = given.shape[0]
    if isinstance(layer, nn.LayerNorm):
        over = math.prod(layer.normalized_shape)
    elif isinstance(layer, nn.GroupNorm):
        over = given[0].numel() // layer.num_groups
    return WorkDepth(given.numel(), max(1, log2_up(over)))


# ---------------------------------------------------------------------- sequences


def recurrent(layer: nn.RNNBase, given: Tensor | PackedSequence) -> Passes:
    """In every layer, direction and position the gates see the input and the previous state; the
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
    return _along_a_chain(products * positions, elementwise * positions, chain, positions)


def _cell(layer: nn.RNNCellBase, given: Tensor) -> Passes:
    """One position of a recurrent layer."""
    rows = math.prod(given.shape[:-1])
    gates, seen = layer.weight_ih.shape
    products = gates * (seen + layer.hidden_size)
    chain = log2_up(max(seen, layer.hidden_size)) + 2
    return _along_a_chain(products * rows, gates * rows, chain, rows)


def _along_a_chain(products: float, elementwise: float, chain: float, rows: int) -> Passes:
    """The gradient by the weights is a sum over all rows, after the chain was followed back."""
    there = WorkDepth(products + elementwise, chain)
    return there, WorkDepth(products, chain + log2_up(rows)), there


def _attention(layer: nn.MultiheadAttention, query: Tensor, key: Tensor) -> Passes:
    """Four projections, and for every pair of positions a product with the key and one with the
    value; each of these two products has two gradients, none of them by weights."""
    at = 1 if layer.batch_first and query.dim() == 3 else 0
    queries, keys = query.shape[at], key.shape[at]
    seen = keys + (layer.bias_k is not None) + layer.add_zero_attn
    batch = query.shape[1 - at] if query.dim() == 3 else 1
    width, heads = layer.embed_dim, layer.num_heads
    projections = batch * (2 * queries * width * width + keys * width * (layer.kdim + layer.vdim))
    products = batch * queries * seen * width
    softmax = batch * heads * queries * seen
    chain = 2 * log2_up(width) + log2_up(width // heads) + 2 * log2_up(seen) + 1
    return (
        WorkDepth(projections + 2 * products + softmax, chain),
        WorkDepth(projections, chain + log2_up(batch * max(queries, keys))),
        WorkDepth(projections + 4 * products + softmax, chain),
    )


# ---------------------------------------------------------------------- convolutions


@dataclass(frozen=True)
class ConvolutionSizes:
    """The sizes of one convolution; image, result and kernel have one number per dimension."""

    batch: int
    inputs: int
    """Channels that one output channel sees."""
    outputs: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    kernel: tuple[int, ...]


def algorithms(
    layer: nn.Module, given: Sequence[Tensor | PackedSequence], output: Tensor
) -> dict[str, WorkDepth]:
    """The forward pass of a convolution by four algorithms; empty for any other layer."""
    first = given[0]
    if not isinstance(layer, _CONVOLUTIONS) or not isinstance(first, Tensor):
        return {}
    sizes = _sizes(layer, first, output)
    # im2col does the same products as one matrix product, and needs more memory.
    found = {"direct": direct(sizes), "im2col": direct(sizes), "fft": fft(sizes)}
    is_dense = set(layer.stride) | set(layer.dilation) == {1}
    if is_dense and len(sizes.kernel) == 2 and sizes.kernel[0] == sizes.kernel[1] > 1:
        found["winograd"] = winograd(sizes)
    return found


def _sizes(layer: _Convolution, given: Tensor, places: Tensor) -> ConvolutionSizes:
    """At each of the places there is a product with the whole kernel."""
    dimensions = len(layer.kernel_size)
    image = tuple(given.shape[-dimensions:])
    return ConvolutionSizes(
        batch=given.numel() // (layer.in_channels * math.prod(image)),
        inputs=layer.in_channels // layer.groups,
        outputs=layer.out_channels,
        image=image,
        result=tuple(places.shape[-dimensions:]),
        kernel=tuple(layer.kernel_size),
    )


def direct(sizes: ConvolutionSizes) -> WorkDepth:
    """N Cout H' W' Cin Ky Kx; the sums over Cin, Ky and Kx follow each other."""
    work = sizes.batch * sizes.outputs * math.prod(sizes.result)
    work *= sizes.inputs * math.prod(sizes.kernel)
    depth = log2_up(sizes.inputs) + sum(log2_up(size) for size in sizes.kernel)
    return WorkDepth(work, max(1, depth))


def fft(sizes: ConvolutionSizes) -> WorkDepth:
    """HW log2(HW) (Cout Cin + N Cin + N Cout) + HW N Cin Cout.

    All kernels and images are transformed, their transforms are multiplied, and all results are
    transformed back.
    """
    places = math.prod(sizes.image)
    pairs = sizes.outputs * sizes.inputs
    transforms = pairs + sizes.batch * (sizes.inputs + sizes.outputs)
    work = places * math.log2(places) * transforms + places * sizes.batch * pairs
    return WorkDepth(work, 2 * log2_up(places) + log2_up(sizes.inputs))


def winograd(sizes: ConvolutionSizes, tile: int = 2) -> WorkDepth:
    """F(m x m, r x r) on tiles of a = m + r - 1 (the table prints m - r + 1, which is a misprint).

    The table's a (r^2 + a r + 2 a^2 + a m + m^2) is the cost of transforming one kernel, one tile
    of an image and one of the result. Here each transform counts as often as it is done, and there
    are a^2 products for each pair of channels and each tile.
    """
    r, m = sizes.kernel[0], tile
    a = m + r - 1
    tiles = sizes.batch * math.prod(-(-size // m) for size in sizes.result)
    kernels = sizes.outputs * sizes.inputs * a * (r * r + a * r)
    images = sizes.inputs * tiles * 2 * a**3
    results = sizes.outputs * tiles * a * (a * m + m * m)
    products = a * a * sizes.outputs * sizes.inputs * tiles
    depth = 2 * log2_up(r) + 4 * log2_up(a) + log2_up(sizes.inputs)
    return WorkDepth(kernels + images + results + products, depth)
