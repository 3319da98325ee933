"""SGD's update without its optimiser: the same bits, and left alone where somebody listens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.real.join.binding import Binding
from gossamer.real.join.descent import Descent

STEPS = 5
SHAPES = ((3, 7), (7,), (5, 2, 3), ())


def parameters_of(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def places_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach() for parameter in parameters]


def gradients_of(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer_of(parameters: list[nn.Parameter], **options: Any) -> torch.optim.SGD:
    """Two groups that differ, the second not in the order of the parameters."""
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[:0:-1], "lr": 0.3, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.1, **options)


OPTIONS = [
    {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov, "dampening": dampening,
         "maximize": maximize}
    for momentum, decay, nesterov, dampening, maximize in product(
        (0.0, 0.9), (0.0, 0.01), (False, True), (0.0, 0.5), (False, True)
    )
    if not nesterov or (momentum > 0 and dampening == 0)
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bits_of_torchs_sgd(options: dict[str, Any]) -> None:
    theirs, ours = parameters_of(1), parameters_of(1)
    their_optimizer, optimizer = optimizer_of(theirs, **options), optimizer_of(ours, **options)
    elsewhere = [parameter.detach().clone() for parameter in ours]
    untouched = [parameter.detach().clone() for parameter in ours]
    descent = Descent(optimizer, ours)
    for step in range(STEPS):
        for parameters in (theirs, ours):
            for parameter, gradient in zip(parameters, gradients_of(step), strict=True):
                parameter.grad = gradient
            # One is not used in the first step and in one later: torch leaves it alone.
            if step in (0, 3):
                parameters[2].grad = None
        for group in (*their_optimizer.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.9
        their_optimizer.step()
        assert descent.descend_at(elsewhere)
        for mine, expected in zip(elsewhere, theirs, strict=True):
            assert torch.equal(mine, expected)
        for parameter, gradient in zip(ours, gradients_of(step), strict=True):
            assert parameter.grad is None or torch.equal(parameter.grad, gradient)
    for parameter, before in zip(ours, untouched, strict=True):
        assert torch.equal(parameter, before)
    expected_state, state = their_optimizer.state_dict(), optimizer.state_dict()
    assert state["state"].keys() == expected_state["state"].keys()
    for number, entry in expected_state["state"].items():
        for name, value in entry.items():
            assert torch.equal(state["state"][number][name], value)


def test_the_parameters_themselves_and_their_versions() -> None:
    parameters = parameters_of(2)
    optimizer = optimizer_of(parameters, momentum=0.9)
    for parameter, gradient in zip(parameters, gradients_of(0), strict=True):
        parameter.grad = gradient
    versions = [parameter._version for parameter in parameters]
    window = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    binding = Binding([(str(number), p) for number, p in enumerate(parameters)])
    binding.attach(window, is_private=False)
    before = window.clone()
    binding.descend(Descent(optimizer, parameters), nullcontext())
    assert not torch.equal(window, before)
    # Autograd finds out by them that a graph from before the step is of no use any more.
    for parameter, version in zip(parameters, versions, strict=True):
        assert parameter._version > version
        assert parameter.requires_grad


def test_nobody_holds_a_step_s_gradients_after_it() -> None:
    """The next ones are to be made in the same memory."""
    parameters = parameters_of(2)
    binding = Binding([(str(number), p) for number, p in enumerate(parameters)])
    binding.attach(binding.initial(), is_private=False)
    for parameter, gradient in zip(parameters, gradients_of(0), strict=True):
        parameter.grad = gradient
    del parameter, gradient
    binding.new_gradient()
    binding.write_gradient(binding.cut(torch.empty(binding.layout.total)), 0.5)
    held = [weakref.ref(parameter.grad) for parameter in parameters]
    binding.let_go()
    optimizer_of(parameters).zero_grad()
    assert all(gradient() is None for gradient in held)


def hooked(optimizer: torch.optim.SGD) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def watched(optimizer: torch.optim.SGD) -> None:
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]


def watched_under_a_schedule(optimizer: torch.optim.SGD) -> None:
    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer.step = Counted.step.__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def with_rate_as_tensor(optimizer: torch.optim.SGD) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


def with_sparse_gradient(optimizer: torch.optim.SGD) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = parameter.grad.to_sparse()


@pytest.mark.parametrize(
    "change",
    [hooked, watched, watched_under_a_schedule, with_rate_as_tensor, with_sparse_gradient],
)
def test_left_to_the_optimiser(change: Callable[[torch.optim.SGD], None]) -> None:
    parameters = parameters_of(3)
    optimizer = optimizer_of(parameters)
    for parameter, gradient in zip(parameters, gradients_of(0), strict=True):
        parameter.grad = gradient
    before = [parameter.detach().clone() for parameter in parameters]
    assert Descent(optimizer, parameters).descend_at([value.clone() for value in before])
    change(optimizer)
    assert not Descent(optimizer, parameters).descend_at(parameters)
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)


def test_hooks_of_all_optimisers_are_heard() -> None:
    parameters = parameters_of(3)
    descent = Descent(optimizer_of(parameters), parameters)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not descent.descend_at(parameters)
    finally:
        handle.remove()
    assert descent.descend_at(places_of(parameters))


@pytest.mark.parametrize("kind", [torch.optim.Adam, type("Own", (torch.optim.SGD,), {})])
def test_other_optimisers_make_their_own_steps(kind: Callable[..., torch.optim.Optimizer]) -> None:
    parameters = parameters_of(4)
    assert not Descent(kind(parameters, lr=0.1), parameters).descend_at(parameters)


def test_a_schedule_does_not_count() -> None:
    parameters = parameters_of(5)
    optimizer = optimizer_of(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert Descent(optimizer, parameters).descend_at(places_of(parameters))
