"""A server that descends with the user's own optimiser: its class, its groups, its slice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.real.binding import Binding, LoopReplica


def slice_optimizer(
    binding: Binding,
    optimizer: torch.optim.Optimizer,
    part: slice,
    window: Tensor,
    guard: Callable[[], AbstractContextManager[None]],
    on_descend: Callable[[int], None],
) -> LoopReplica:
    """The replica of one server. The learning rate follows the user's schedule, which runs in this
    process too, so it need not travel."""
    offset, own = 0, list[tuple[str, nn.Parameter]]()
    made: dict[nn.Parameter, nn.Parameter] = {}
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
    groups: list[dict[str, Any]] = []
    followed: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        twins = [made[p] for p in group["params"] if p in made]
        if twins:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({"params": twins, **options})
            followed.append(group)
    twin_optimizer = type(optimizer)(groups, **optimizer.defaults)

    def follow() -> None:
        for mine, theirs in zip(twin_optimizer.param_groups, followed, strict=True):
            mine["lr"] = theirs["lr"]

    twin_binding = Binding(own)
    twin_binding.attach(window, is_private=False)
    return LoopReplica(twin_binding, window, twin_optimizer, guard, on_descend, follow)
