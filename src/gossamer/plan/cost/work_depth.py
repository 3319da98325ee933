"""The work and the depth of a model: how many operations there are, and how many in a row.

Ben-Nun & Hoefler 2019 (section 4): the work W is the number of operations, the depth D the longest
chain of operations that need each other's results. On p processing elements any greedy schedule
takes max(W / p, D) <= T_p <= W / p + D operations in a row, and W / D is the average parallelism:
more elements than that stand idle. An operation is a multiplication with its addition.

torch's own `FlopCounterMode` cannot take the place of `layer_work`: it knows no depth, it counts
neither norms nor pooling nor activations, and it sees nothing in a fused recurrent layer.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from gossamer.errors import ConfigurationError
from gossamer.plan.cost.layer_work import NOTHING, WorkDepth, algorithms, passes_of
from gossamer.tasks.data import Data, call, device_of
from gossamer.tasks.flat_model import drawing_from

NOT_COUNTED = "not counted"
"""The kind of a module whose operations `layer_work` does not know."""
_MULTIPLYING = frozenset((
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "einsum",
    "tensordot", "addmm", "addmv", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "linear",
    "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "scaled_dot_product_attention", "multi_head_attention_forward", "cdist",
))  # fmt: skip


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
    """The bytes of the output, which the backward pass needs again."""
    alternatives: dict[str, WorkDepth]
    """The forward pass of a convolution by other algorithms."""

    @property
    def work(self) -> float:
        return self.forward.work + self.weight_gradient.work + self.input_gradient.work

    @property
    def depth(self) -> float:
        """The two gradients do not need each other."""
        return self.forward.depth + max(self.weight_gradient.depth, self.input_gradient.depth)

    @property
    def parallelism(self) -> float:
        return WorkDepth(self.work, self.depth).parallelism


def greedy_bounds(work: float, depth: float, elements: int) -> tuple[float, float]:
    """The least and the most that any greedy schedule takes on so many processing elements."""
    if elements < 1:
        raise ConfigurationError(f"processing elements must be at least 1, got {elements}")
    return max(work / elements, depth), work / elements + depth


def model_work_depth(layers: Sequence[LayerCost]) -> WorkDepth:
    """One forward and one backward pass over layers that follow each other.

    In the backward pass the gradient by the input goes to the layer before. No layer needs the
    gradient by the weights, so the longest chain ends in one of these.
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
    """The cost of each layer of a model for this batch, in order of execution.

    The layers of torch.nn are counted. A module that computes in another way is listed as not
    counted: a layer of the user's own, or a module that multiplies outside of its layers (such as
    attention written out). Elementwise work between layers, such as sums of branches, is not seen.
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
    """Records which modules multiply in their own code."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[str] = []
        self.found: dict[str, None] = {}
        """In order of execution."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _MULTIPLYING:
            self.found[self.within[-1]] = None
        return func(*args, **(kwargs or {}))


def _is_layer(module: nn.Module) -> bool:
    """Attention has child modules, but calls none of them."""
    return isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None


def _inside(name: str, layers: Container[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in layers for count in range(1, len(parts)))


def _cost(name: str, layer: nn.Module, given: Sequence[object], output: object) -> LayerCost:
    tensors = [one for one in given if isinstance(one, Tensor | PackedSequence)]
    first: object = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
    if isinstance(first, PackedSequence):
        first = first.data
    if not tensors or not isinstance(first, Tensor):
        return _not_counted(name, layer)
    known = passes_of(layer, tensors, first)
    if known is None:
        return _not_counted(name, layer)
    kind, (forward, weight_gradient, input_gradient) = known
    parameters = list(layer.parameters())
    return LayerCost(
        name or type(layer).__name__, kind, tuple(first.shape), forward,
        weight_gradient if parameters else NOTHING, input_gradient,
        parameter_bytes=sum(tensor.nbytes for tensor in parameters),
        activation_bytes=first.nbytes,
        alternatives=algorithms(layer, tensors, first),
    )  # fmt: skip


def _not_counted(name: str, module: nn.Module) -> LayerCost:
    own = module.parameters(recurse=False)
    return LayerCost(
        f"{name} ({type(module).__name__})".lstrip(), NOT_COUNTED, (), NOTHING, NOTHING, NOTHING,
        parameter_bytes=sum(tensor.nbytes for tensor in own), activation_bytes=0, alternatives={},
    )  # fmt: skip
