"""What a loop's module and optimiser must be to be coupled, and must stay while they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.step_guard import check_not_wrapped
from gossamer.real.transports.checked_values import broken_value
from gossamer.real.transports.transport import Store


def check_joinable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if hasattr(model, "_orig_mod"):
        raise ConfigurationError(
            "the model is already compiled; join the plain module first and compile it afterwards"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigurationError(
            "the model is wrapped in DistributedDataParallel, which would couple it a second time; "
            "join the plain module"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the model several times in a step, and no method can come in between; "
            "use an optimiser that takes one gradient per step"
        )
    known = set(model.parameters())
    others = sum(p not in known for group in optimizer.param_groups for p in group["params"])
    if others:
        raise ConfigurationError(
            f"the optimizer trains {others} parameters that are not the model's and would drift "
            "apart; join one module that holds them all, such as an nn.ModuleList"
        )
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigurationError(
            f"parameter {name} has no shape yet; run the model once on a batch before joining"
        )
    if parameter.is_complex():
        raise ConfigurationError(
            f"parameter {name} is complex ({parameter.dtype}), and only real numbers are averaged;"
            " keep it as torch.view_as_real of it"
        )


def check_apart(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """No two may lie in the same memory: each gets memory of its own, and they would come apart."""
    extents = sorted(
        ((*_extent(parameter), name) for name, parameter in named if parameter.numel()),
        key=lambda extent: extent[:2],
    )
    for (_, end, first), (start, _, second) in pairwise(extents):
        if start < end:
            raise ConfigurationError(
                f"parameters {first} and {second} share memory and are not the same parameter, so"
                " each would be trained apart; tie them by giving both modules one nn.Parameter"
            )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first element to behind the last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def check_alike(model: nn.Module, binding: ModuleBinding, store: Store) -> None:
    """Everybody's model has the same parameters and buffers: they are averaged by their place."""
    parts = [f"{name} {tuple(shape)}" for name, shape in zip(
        binding.layout.names, binding.layout.shapes, strict=True
    )]  # fmt: skip
    parts += [f"{name} {tuple(buffer.shape)}" for name, buffer in model.named_buffers()]
    sizes = f"{binding.layout.total} trained numbers of {binding.dtype} and {len(parts)} tensors"
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    said = store.agree("model", json.dumps([digest, sizes]))
    try:
        agreed, theirs = json.loads(said)
    except (ValueError, TypeError):
        raise broken_value("model", said, "what the first worker's model is like") from None
    if agreed != digest:
        raise ConfigurationError(
            f"this worker's model is another than that of the first to come: it has {sizes}, that"
            f" one {theirs}; names and shapes must be the same on all workers"
        )


class LoopWatch:
    """Looks at one parameter in each step: a look at all would take longer than some steps do."""

    def __init__(self, model: nn.Module, binding: ModuleBinding) -> None:
        self._binding = binding
        trained = {id(p): at for at, p in enumerate(binding.parameters)}
        named = [(name, p, trained.get(id(p))) for name, p in model.named_parameters()]
        self._next = cycle(named).__next__
        self._is_first = True

    def look(self) -> None:
        if self._is_first:
            self._is_first = False
            check_not_wrapped(self._binding.parameters)
        name, parameter, at = self._next()
        if at is not None:
            if not self._binding.is_in_place(at):
                raise ConfigurationError(
                    f"parameter {name} no longer lies where gossamer.join put it, so it would not"
                    " be trained: something has replaced its .data inside the `with`; change it in"
                    " place (p.data.copy_(...)), and move or convert the model before joining"
                )
        elif parameter.requires_grad:
            raise ConfigurationError(
                f"parameter {name} was frozen when the model was joined and is to be trained now,"
                " which only this worker would see; join it trainable, with the learning rate 0"
                " until its time has come"
            )
