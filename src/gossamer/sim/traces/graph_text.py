"""A recorded computation as text: the names of torch's operations and their plain arguments.

Reading it back runs nothing but operations of `torch.ops.aten`, which are looked up by name, with
numbers and names of types as arguments. So a file that somebody else has written cannot bring code
with it, as a pickle or generated source could.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

_NAME = re.compile(r"aten\.([a-z_]\w*)\.([A-Za-z_]\w*)")
_ITEM = "item"
_KINDS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.device: "device",
}


class Unwritable(Exception):
    """A recording holds something that has no text; it serves the process that made it."""


def write_graph(recorded: GraphModule) -> tuple[str, dict[str, Tensor]]:
    """The operations as text, and the tensors that they use beside the arguments, by name."""
    numbers: dict[Node, int] = {}
    steps: list[list[Any]] = []
    constants: dict[str, Tensor] = {}
    for node in recorded.graph.nodes:
        if node.op == "output":
            found = [numbers[one] for one in _nodes_in(node.args)]
            return json.dumps({"steps": steps, "outputs": found}), constants
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            steps.append(["argument"])
        elif node.op == "get_attr":
            name = f"constant_{len(constants)}"
            constants[name] = _attribute(recorded, str(node.target))
            steps.append(["constant", name])
        elif node.op == "call_function":
            steps.append(
                [
                    _name_of(node.target),
                    _plain(node.args, numbers),
                    {key: _plain(value, numbers) for key, value in node.kwargs.items()},
                ]
            )
        else:
            raise Unwritable(f"a recording with {node.op}")
    raise Unwritable("a recording without an end")


def read_graph(text: str, constants: dict[str, Tensor]) -> GraphModule:
    """The inverse: a module of flat arguments that returns (gradients, (losses, statistics)).

    Whatever is no recording raises `ValueError`.
    """
    try:
        return _read(json.loads(text), constants)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no recording: {error}") from error


def _read(told: dict[str, Any], constants: dict[str, Tensor]) -> GraphModule:
    graph, root = Graph(), torch.nn.Module()
    nodes: list[Node] = []
    for name, *rest in told["steps"]:
        if name == "argument":
            nodes.append(graph.placeholder(f"argument_{len(nodes)}"))
        elif name == "constant":
            root.register_buffer(rest[0], constants[rest[0]], persistent=False)
            nodes.append(graph.get_attr(rest[0]))
        else:
            arguments: Any = tuple(_value(one, nodes) for one in rest[0])
            named = {key: _value(one, nodes) for key, one in rest[1].items()}
            nodes.append(graph.call_function(_function_of(name), arguments, named))
    gradients, losses, statistics = (nodes[at] for at in told["outputs"])
    graph.output((gradients, (losses, statistics)))
    return GraphModule(root, graph)


def _name_of(target: object) -> str:
    if target is operator.getitem:
        return _ITEM
    name = str(target) if isinstance(target, OpOverload) else ""
    if not _NAME.fullmatch(name):
        raise Unwritable(f"a recording with {target}")
    return name


def _function_of(name: str) -> Callable[..., Any]:
    if name == _ITEM:
        return operator.getitem
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no operation of torch")
    function: Any = getattr(getattr(torch.ops.aten, found[1]), found[2])
    if not isinstance(function, OpOverload):
        raise ValueError(f"{name!r} is no operation of torch")
    return function


def _plain(value: Any, numbers: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": numbers[value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, numbers) for one in cast(Sequence[Any], value)]
    kind = _KINDS.get(type(value))
    if kind is None:
        raise Unwritable(f"a recording with a {type(value).__name__}")
    return {kind: str(value).removeprefix("torch.")}


def _value(told: Any, nodes: list[Node]) -> Any:
    if isinstance(told, list):
        return [_value(one, nodes) for one in cast(list[Any], told)]
    if not isinstance(told, dict):
        return told
    ((kind, value),) = cast(dict[str, Any], told).items()
    if kind == "node":
        return nodes[value]
    if kind == "device":
        return torch.device(value)
    found = getattr(torch, value)
    if _KINDS.get(type(found)) != kind:
        raise ValueError(f"{value!r} is no {kind}")
    return found


def _nodes_in(tree: Any) -> list[Node]:
    if isinstance(tree, Node):
        return [tree]
    if not isinstance(tree, list | tuple):
        raise Unwritable(f"a recording that returns a {type(tree).__name__}")
    return [node for part in cast(Sequence[Any], tree) for node in _nodes_in(part)]


def _attribute(recorded: GraphModule, name: str) -> Tensor:
    found: Any = recorded
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, Tensor):
        raise Unwritable(f"a recording with a {type(found).__name__}")
    return found.detach()
