"""What descends in a user's loop: a worker with the user's own optimiser, and a server with another
of its class, with its groups, on its slice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.optim.optimisers import Optimiser, make_optimiser
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.replica import LoopReplica, Momentum, slowed
from gossamer.real.replicas import WindowReplica

Guard = AbstractContextManager[None]


def momentum_left_out(
    spec: MethodSpec, optimizer: torch.optim.Optimizer, *, is_synchronous: bool
) -> list[str]:
    """What the user must be told of this optimiser's momentum."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    spec.check_kind(is_sgd, type(optimizer).__name__)
    groups = optimizer.param_groups if is_sgd else []
    most = max((float(group["momentum"]) for group in groups), default=0.0)
    notice = spec.notice(most, is_synchronous=is_synchronous)
    return [] if notice is None else [notice]


def worker_replica(
    spec: MethodSpec, binding: ModuleBinding, window: Tensor, optimizer: torch.optim.Optimizer,
    guard: Guard | None, on_descend: Callable[[int], None], *, ends: int, is_synchronous: bool,
) -> LoopReplica:  # fmt: skip
    """It descends as the servers of its method do, where it does so between two reads of them."""
    replica = LoopReplica(binding, window, optimizer, guard, on_descend)
    if spec.server_optimiser:
        chosen = make_optimiser(spec.server_optimiser)
        rule = spec.optimiser(chosen, ends, is_synchronous=is_synchronous)
        replica.rule = WindowReplica(window, rule, lambda: replica.learning_rate, guard=guard)
    elif spec.method.leaves_out_momentum:
        replica.momentum = lambda own: spec.momentum(own, ends, is_synchronous=is_synchronous)
    return replica


def server_replica(
    spec: MethodSpec, worker: LoopReplica, binding: ModuleBinding, optimizer: torch.optim.Optimizer,
    part: slice, window: Tensor, guard: Guard, on_descend: Callable[[int], None], *, ends: int,
    is_synchronous: bool,
) -> LoopReplica | OwnOptimiserReplica:  # fmt: skip
    """With the optimiser that the method's options name, or else one like the user's."""
    if spec.server_optimiser:
        chosen = make_optimiser(spec.server_optimiser)
        return OwnOptimiserReplica.of(
            spec.optimiser(chosen, ends, is_synchronous=is_synchronous), window,
            lambda: worker.learning_rate, guard, on_descend,
        )  # fmt: skip
    return slice_optimizer(
        binding, optimizer, part, window, guard, on_descend,
        momentum=lambda own: spec.momentum(own, ends, is_synchronous=is_synchronous),
    )  # fmt: skip


def slice_optimizer(
    binding: ModuleBinding,
    optimizer: torch.optim.Optimizer,
    part: slice,
    window: Tensor,
    guard: Guard,
    on_descend: Callable[[int], None],
    *,
    momentum: Momentum = lambda own: own,
) -> LoopReplica:
    """The replica of one server. The learning rate, and whatever else the user's schedule changes,
    follows that schedule, which runs in this process too, so it need not travel.

    `momentum` says what becomes of the momentum of torch's SGD: momentum and delay multiply. Any
    other class stays as it is, for its learning rate would be none for plain SGD.
    """
    own: list[tuple[str, nn.Parameter]] = []
    made: dict[nn.Parameter, nn.Parameter] = {}
    offset = 0
    for name, size, shape, parameter in zip(
        binding.layout.names, binding.layout.sizes, binding.layout.shapes, binding.parameters,
        strict=True,
    ):  # fmt: skip
        if part.start <= offset < part.stop:
            start = offset - part.start
            twin = nn.Parameter(window[start : start + size].view(shape))
            own.append((name, twin))
            made[parameter] = twin
        offset += size
    is_sgd = isinstance(optimizer, torch.optim.SGD)

    def options_of(group: dict[str, Any]) -> dict[str, Any]:
        return slowed(_options(group), momentum) if is_sgd else _options(group)

    def twins_of(group: dict[str, Any]) -> list[nn.Parameter]:
        return [made[p] for p in group["params"] if p in made]

    followed = [group for group in optimizer.param_groups if twins_of(group)]
    groups = [{**options_of(group), "params": twins_of(group)} for group in followed]
    twin_optimizer = _another(optimizer, groups) if groups else None
    if twin_optimizer is not None:
        # A checkpoint of the loop's own brings what the server's had been.
        for parameter, twin in made.items():
            if optimizer.state.get(parameter):
                twin_optimizer.state[twin] = deepcopy(optimizer.state[parameter])
        lay_out_state(twin_optimizer)
    known = len(optimizer.param_groups)

    def follow() -> None:
        nonlocal known
        for group in optimizer.param_groups[known:]:
            _add(twin_optimizer, {**options_of(group), "params": twins_of(group)})
            followed.extend([group] if twins_of(group) else [])
        known = len(optimizer.param_groups)
        if twin_optimizer is not None:
            for mine, theirs in zip(twin_optimizer.param_groups, followed, strict=True):
                mine.update(options_of(theirs))

    twin_binding = ModuleBinding(own, is_server=True)
    twin_binding.attach(window, is_private=False)
    return LoopReplica(twin_binding, window, twin_optimizer or _idle(), guard, on_descend, follow)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a schedule may change; names of parameters are not."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _another(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """One more of the same class. Some defaults are the class's own business (AdamW's
    decoupling), and its constructor would not take them."""
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    taken = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    try:
        return kind(groups, **defaults)
    except Exception as error:  # whatever a class of the user's own makes of such arguments
        raise ConfigurationError(
            f"the server cannot make another {type(optimizer).__name__} ({error}); name its "
            "optimiser in the method, as in server_optimiser=sgd"
        ) from error


def _add(twin_optimizer: torch.optim.Optimizer | None, group: dict[str, Any]) -> None:
    """A group that the user's optimiser got while training."""
    if not group["params"]:
        return
    if twin_optimizer is None:
        raise ConfigurationError(
            "a parameter group was added for a server that had nothing to train so far; give the "
            "optimizer all groups before gossamer.join, with the learning rate 0 until their time"
        )
    twin_optimizer.add_param_group(group)


def _idle() -> torch.optim.Optimizer:
    """For a slice of which the user's optimiser trains nothing."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=0.0)


class OwnOptimiserReplica(WindowReplica):
    """A server with an optimiser of ours, where the method's options name one."""

    @staticmethod
    def of(
        optimiser: Optimiser, window: Tensor, learning_rate: Callable[[], float], guard: Guard,
        on_descend: Callable[[int], None],
    ) -> OwnOptimiserReplica:  # fmt: skip
        return OwnOptimiserReplica(
            window, optimiser, learning_rate, guard=guard, on_descend=on_descend
        )
