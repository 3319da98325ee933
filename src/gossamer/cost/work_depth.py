"""Work and depth of a model's layers: what they compute, and what must come after what.

Ben-Nun & Hoefler 2019 (section 4): the work W is the number of operations, the depth D the longest
chain of operations that need each other's results. On p processing elements any greedy schedule
takes max(W / p, D) <= T_p <= W / p + D operations one after the other, and W / D is the average
parallelism: more elements than that stand idle. An operation is a multiplication with its addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.cost import convolution
from gossamer.errors import ConfigurationError
from gossamer.model import drawing_from


@dataclass(frozen=True)
class WorkDepth:
    """Operations, and the longest chain of them."""

    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0


@dataclass(frozen=True)
class LayerCost:
    """One layer on one batch."""

    name: str
    kind: str
    output_shape: tuple[int, ...]
    forward: WorkDepth
    weight_gradient: WorkDepth
    input_gradient: WorkDepth
    parameter_bytes: int
    activation_bytes: int
    """Of the output, which the backward pass needs again."""
    alternatives: dict[str, WorkDepth]
    """Of a convolution, the forward pass by other algorithms."""

    @property
    def work(self) -> float:
        return self.forward.work + self.weight_gradient.work + self.input_gradient.work

    @property
    def depth(self) -> float:
        """The two gradients do not need each other."""
        return self.forward.depth + max(self.weight_gradient.depth, self.input_gradient.depth)

    @property
    def parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0


def greedy_bounds(work: float, depth: float, elements: int) -> tuple[float, float]:
    """The least and the most that any greedy schedule takes on so many processing elements."""
    if elements < 1:
        raise ConfigurationError(f"processing elements must be at least 1, got {elements}")
    return max(work / elements, depth), work / elements + depth


def reduction(items: int) -> WorkDepth:
    """The sum of so many numbers."""
    return WorkDepth(max(0, items - 1), convolution.log2_up(items))


def model_work_depth(layers: Sequence[LayerCost]) -> WorkDepth:
    """One forward and one backward pass over layers that follow each other.

    Backwards, the gradient by the input goes on to the layer before; that by the weights is needed
    by nobody, so that the chain ends in one of them.
    """
    forward = sum(layer.forward.depth for layer in layers)
    backwards = list(reversed(layers))
    until = [0.0, *accumulate(layer.input_gradient.depth for layer in backwards)]
    backward = max(
        (before + layer.weight_gradient.depth
         for before, layer in zip(until, backwards, strict=False)),
        default=0.0,
    )  # fmt: skip
    return WorkDepth(sum(layer.work for layer in layers), forward + backward)


def layer_costs(model: nn.Module, inputs: Tensor) -> list[LayerCost]:
    """What each layer of a model computes for this batch, in order of execution.

    Counted are modules without children; what a forward pass computes outside of them (sums of
    branches, attention written out) is not seen.
    """
    found: list[LayerCost] = []
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(layer: nn.Module, given: tuple[Any, ...], output: object) -> None:
            if isinstance(output, Tensor) and given and isinstance(given[0], Tensor):
                found.append(_cost(name or type(layer).__name__, layer, given[0], output))

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            watch(name, module)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), drawing_from(0, inputs.device):
            model(inputs)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return found


_POOLINGS = (
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd,  # pyright: ignore[reportPrivateUsage]
)  # fmt: skip
_ADAPTIVE = (
    nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd,  # pyright: ignore[reportPrivateUsage]
)  # fmt: skip
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)  # pyright: ignore[reportPrivateUsage]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _cost(name: str, layer: nn.Module, given: Tensor, output: Tensor) -> LayerCost:
    alternatives: dict[str, WorkDepth] = {}
    if isinstance(layer, nn.Linear):
        kind, three = "linear", _linear(layer, output)
    elif isinstance(layer, _CONVOLUTIONS):
        kind, three = "convolution", _convolution(layer, given, output)
        alternatives = _alternatives(layer, given, output)
    elif isinstance(layer, (*_POOLINGS, *_ADAPTIVE)):
        kind, three = "pooling", _pooling(given, output)
    elif isinstance(layer, _NORMS):
        kind, three = "norm", _norm(layer, given)
    elif isinstance(layer, nn.Embedding):
        kind, three = "embedding", (_elementwise(output), _elementwise(output), WorkDepth(0, 0))
    else:
        is_activation = type(layer).__module__ == "torch.nn.modules.activation"
        kind = "activation" if is_activation else type(layer).__name__.lower()
        moves = isinstance(layer, nn.Flatten | nn.Identity | nn.Unflatten)
        own = WorkDepth(0, 0) if moves else _elementwise(output)
        three = (own, WorkDepth(0, 0), own)
    parameters = list(layer.parameters(recurse=False))
    if not parameters:
        three = (three[0], WorkDepth(0, 0), three[2])
    return LayerCost(
        name, kind, tuple(output.shape), *three,
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        activation_bytes=output.numel() * output.element_size(),
        alternatives=alternatives,
    )  # fmt: skip


Three = tuple[WorkDepth, WorkDepth, WorkDepth]


def _elementwise(tensor: Tensor) -> WorkDepth:
    return WorkDepth(tensor.numel(), 1)


def _linear(layer: nn.Linear, output: Tensor) -> Three:
    """Cout Cin N each; sums over Cin, over the rows, over Cout."""
    rows = output.numel() // layer.out_features
    work = layer.out_features * layer.in_features * rows
    sums = (layer.in_features, rows, layer.out_features)
    forward, weight, back = (WorkDepth(work, max(1, convolution.log2_up(n))) for n in sums)
    return forward, weight, back


def _sizes(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, given: Tensor, output: Tensor
) -> convolution.Sizes:
    dimensions = len(layer.kernel_size)
    return convolution.Sizes(
        batch=given.numel() // (layer.in_channels * _product(given.shape[-dimensions:])),
        inputs=layer.in_channels // layer.groups,
        outputs=layer.out_channels,
        image=tuple(given.shape[-dimensions:]),
        result=tuple(output.shape[-dimensions:]),
        kernel=tuple(layer.kernel_size),
    )


def _convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, given: Tensor, output: Tensor) -> Three:
    sizes = _sizes(layer, given, output)
    work, depth = convolution.direct(sizes)
    # The gradient by the input covers the image, not the result.
    back = work * _product(sizes.image) / _product(sizes.result)
    return WorkDepth(work, depth), WorkDepth(work, depth), WorkDepth(back, depth)


def _alternatives(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, given: Tensor, output: Tensor
) -> dict[str, WorkDepth]:
    sizes = _sizes(layer, given, output)
    found = {
        "direct": WorkDepth(*convolution.direct(sizes)),
        "im2col": WorkDepth(*convolution.im2col(sizes)),
        "fft": WorkDepth(*convolution.fft(sizes)),
    }
    is_dense = set(layer.stride) | set(layer.dilation) == {1}
    if is_dense and len(sizes.kernel) == 2 and sizes.kernel[0] == sizes.kernel[1] > 1:
        found["winograd"] = WorkDepth(*convolution.winograd(sizes))
    return found


def _pooling(given: Tensor, output: Tensor) -> Three:
    """NCHW, with a maximum or mean over the window; backwards each input has its share at once."""
    window = max(1, round(given.numel() / output.numel()))
    forward = WorkDepth(given.numel(), max(1, convolution.log2_up(window)))
    return forward, WorkDepth(0, 0), WorkDepth(given.numel(), 1)


def _norm(layer: nn.Module, given: Tensor) -> Three:
    """NCHW, with sums over the batch (BatchNorm) or over what is normalised."""
    over = given.shape[0]
    if isinstance(layer, nn.LayerNorm):
        over = _product(layer.normalized_shape)
    elif isinstance(layer, nn.GroupNorm):
        over = given[0].numel() // layer.num_groups
    each = WorkDepth(given.numel(), max(1, convolution.log2_up(over)))
    return each, each, each


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
