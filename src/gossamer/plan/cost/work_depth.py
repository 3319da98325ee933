"""Work and depth of a model's layers: what they compute, and what must come after what.

Ben-Nun & Hoefler 2019 (section 4): the work W is the number of operations, the depth D the longest
chain of operations that need each other's results. On p processing elements any greedy schedule
takes max(W / p, D) <= T_p <= W / p + D operations one after the other, and W / D is the average
parallelism: more elements than that stand idle. An operation is a multiplication with its addition.
"""

from __future__ import annotations

from collections.abc import Container, KeysView, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from gossamer.errors import ConfigurationError
from gossamer.plan.cost import convolution, sequences
from gossamer.tasks.data import Data, call, device_of
from gossamer.tasks.flat_model import drawing_from

NOT_COUNTED = "not counted"
"""The kind of a module that computes something else than layers that are known here."""


@dataclass(frozen=True)
class WorkDepth:
    """Operations, and the longest chain of them."""

    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0


Three = tuple[WorkDepth, WorkDepth, WorkDepth]
"""The forward pass, the gradient by the weights and that by the input."""


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


def layer_costs(model: nn.Module, inputs: Tensor | Data) -> list[LayerCost]:
    """What each layer of a model computes for this batch, in order of execution.

    Counted are the layers of torch.nn. A module that computes in another way is there, too, as not
    counted: a layer of an own kind, or one that multiplies outside of its layers (attention written
    out). Sums of branches and other work by elements between layers are not seen.
    """
    found: list[LayerCost] = []
    handles: list[torch.utils.hooks.RemovableHandle] = []
    modules = dict(model.named_modules())
    layers = {name for name, module in modules.items() if _is_layer(module)}
    modules = {name: module for name, module in modules.items() if not _inside(name, layers)}
    products = _Products()

    def watch(name: str, module: nn.Module) -> None:
        def begun(_: nn.Module, given: object) -> None:
            products.within.append(name)

        def ended(
            layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: object
        ) -> None:
            products.within.pop()
            if name in layers:
                found.append(_cost(name, layer, (*given, *named.values()), output))

        handles.append(module.register_forward_pre_hook(begun))
        handles.append(module.register_forward_hook(ended, with_kwargs=True))

    for name, module in modules.items():
        watch(name, module)
    was_training, was_fast = model.training, torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused encoder calls no layer
    try:
        with torch.no_grad(), drawing_from(0, device_of(inputs)), products:
            call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return found + [
        _not_counted(name, modules[name]) for name in products.found if name not in layers
    ]


class _Products(TorchFunctionMode):
    """Which modules multiply in their own text."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[str] = []
        self._found: dict[str, None] = {}

    @property
    def found(self) -> KeysView[str]:
        """In order of execution."""
        return self._found.keys()

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _MULTIPLYING:
            self._found[self.within[-1]] = None
        return func(*args, **(kwargs or {}))


_MULTIPLYING = frozenset((
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "einsum",
    "tensordot", "addmm", "addmv", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "linear",
    "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "scaled_dot_product_attention", "multi_head_attention_forward", "cdist",
))  # fmt: skip


def _is_layer(module: nn.Module) -> bool:
    """Attention calls none of its own children."""
    return isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None


def _inside(name: str, layers: Container[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in layers for count in range(1, len(parts)))


_POOLINGS = (
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd,  # pyright: ignore[reportPrivateUsage]
)  # fmt: skip
_ADAPTIVE = (
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
"""Modules of torch.nn whose layers take a few operations for each number that they give."""
_MOVES = (nn.Flatten, nn.Identity, nn.Unflatten)


def _cost(name: str, layer: nn.Module, given: Sequence[object], output: object) -> LayerCost:
    tensors = [one for one in given if isinstance(one, Tensor | PackedSequence)]
    first: object = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
    if isinstance(first, PackedSequence):
        first = first.data
    known = None
    if tensors and isinstance(first, Tensor):
        known = _known(layer, tensors, first)
    if known is None or not isinstance(first, Tensor):
        return _not_counted(name, layer)
    kind, three = known
    alternatives: dict[str, WorkDepth] = {}
    if isinstance(layer, _CONVOLUTIONS) and isinstance(tensors[0], Tensor):
        alternatives = _alternatives(layer, tensors[0], first)
    parameters = list(layer.parameters())
    if not parameters:
        three = (three[0], WorkDepth(0, 0), three[2])
    return LayerCost(
        name or type(layer).__name__, kind, tuple(first.shape), *three,
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        activation_bytes=first.numel() * first.element_size(),
        alternatives=alternatives,
    )  # fmt: skip


def _not_counted(name: str, module: nn.Module) -> LayerCost:
    nothing = WorkDepth(0, 0)
    own = module.parameters(recurse=False)
    return LayerCost(
        f"{name} ({type(module).__name__})".lstrip(), NOT_COUNTED, (), nothing, nothing, nothing,
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in own),
        activation_bytes=0, alternatives={},
    )  # fmt: skip


def _known(
    layer: nn.Module, given: Sequence[Tensor | PackedSequence], output: Tensor
) -> tuple[str, Three] | None:
    """The kind of a layer and what it computes; None for a kind that nobody has counted here."""
    first = given[0]
    if isinstance(layer, nn.RNNBase):
        return "recurrent", _pairs(sequences.recurrent(layer, first))
    if isinstance(first, PackedSequence):
        return None
    if isinstance(layer, nn.RNNCellBase):
        return "recurrent", _pairs(sequences.cell(layer, first))
    if isinstance(layer, nn.MultiheadAttention):
        key = given[1] if len(given) > 1 else first
        assert isinstance(key, Tensor)
        return "attention", _pairs(sequences.attention(layer, first, key))
    if isinstance(layer, nn.Linear):
        return "linear", _linear(layer, output)
    if isinstance(layer, _CONVOLUTIONS):
        return "convolution", _convolution(_sizes(layer, first, output))
    if isinstance(layer, _TRANSPOSED):
        return "convolution", _convolution(_sizes(layer, first, first))
    if isinstance(layer, (*_POOLINGS, *_ADAPTIVE)):
        return "pooling", _pooling(first, output)
    if isinstance(layer, _NORMS):
        return "norm", _norm(layer, first)
    if isinstance(layer, nn.Embedding):
        return "embedding", (_elementwise(output), _elementwise(output), WorkDepth(0, 0))
    module = type(layer).__module__.removeprefix("torch.nn.modules.")
    kind = "activation" if module == "activation" else type(layer).__name__.lower()
    if type(layer) not in _MOVES and module not in _ELEMENTWISE:
        return None
    own = WorkDepth(0, 0) if type(layer) in _MOVES else _elementwise(output)
    return kind, (own, own, own)


def _pairs(pairs: sequences.Pairs) -> Three:
    forward, weight, back = (WorkDepth(*pair) for pair in pairs)
    return forward, weight, back


def _elementwise(tensor: Tensor) -> WorkDepth:
    return WorkDepth(tensor.numel(), 1)


def _linear(layer: nn.Linear, output: Tensor) -> Three:
    """Cout Cin N each; sums over Cin, over the rows, over Cout."""
    rows = output.numel() // layer.out_features
    work = layer.out_features * layer.in_features * rows
    sums = (layer.in_features, rows, layer.out_features)
    forward, weight, back = (WorkDepth(work, max(1, convolution.log2_up(n))) for n in sums)
    return forward, weight, back


def _sizes(layer: _Convolution, given: Tensor, places: Tensor) -> convolution.Sizes:
    """At each place there is a product with the whole kernel: at those of the output, or of the
    input of a transposed convolution."""
    dimensions = len(layer.kernel_size)
    return convolution.Sizes(
        batch=given.numel() // (layer.in_channels * _product(given.shape[-dimensions:])),
        inputs=layer.in_channels // layer.groups,
        outputs=layer.out_channels,
        image=tuple(given.shape[-dimensions:]),
        result=tuple(places.shape[-dimensions:]),
        kernel=tuple(layer.kernel_size),
    )


def _convolution(sizes: convolution.Sizes) -> Three:
    """Each product of the forward pass has one in either gradient, whatever the stride."""
    one = WorkDepth(*convolution.direct(sizes))
    return one, one, one


def _alternatives(layer: _Convolution, given: Tensor, output: Tensor) -> dict[str, WorkDepth]:
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
