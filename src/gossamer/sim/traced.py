"""A batched computation recorded as a plain list of tensor operations, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gossamer.tasks.data import Tensors, leaves, mapped

Batched = Callable[[Tensor, Tensor, Tensors, Tensors, Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]

_ATEN: Any = torch.ops.aten
_SAME_SHAPE = {
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.expand.default,
    _ATEN.detach.default,
}


def record(function: Batched, arguments: tuple[Tensors, ...]) -> GraphModule:
    """The operations of a call with arguments of these shapes, as one flat module."""
    recorded = make_fx(function)(*arguments)
    _drop_idle(recorded.graph)
    recorded.recompile()
    return recorded


def _drop_idle(graph: Graph) -> None:
    """Remove operations that change nothing: a third of them in small models."""
    for node in list(graph.nodes):
        if _is_idle(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_idle(node: Node) -> bool:
    """A view onto the same shape and strides, or a product with one."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is _ATEN.mul.Scalar:
        return bool(node.args[1] == 1)
    if node.target not in _SAME_SHAPE:
        return False
    before, after = node.args[0].meta.get("tensor_meta"), node.meta.get("tensor_meta")
    if before is None or after is None:
        return False
    return before.shape == after.shape and before.stride == after.stride


class GraphReplay:
    """A function recorded as one CUDA graph: all of its kernels are launched by one call."""

    def __init__(self, function: Batched, arguments: tuple[Tensors, ...]) -> None:
        self._inputs: tuple[Tensors, ...] = mapped(arguments, Tensor.clone)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # Libraries choose their algorithms in the first calls, so those are not recorded.
            for _ in range(3):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(*self._inputs)

    def __call__(self, *arguments: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        for static, argument in zip(leaves(self._inputs), leaves(arguments), strict=True):
            static.copy_(argument)
        self._graph.replay()
        gradients, (losses, statistics) = self._outputs
        # The next replay writes to the same memory, so the results are copied.
        return gradients.clone(), (losses.clone(), statistics.clone())
