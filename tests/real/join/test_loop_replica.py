"""What the replica of a user's own loop adds to a gradient for a method with its own descent."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.gradient import LoopGradient
from gossamer.real.join.loop_session import LoopSession
from gossamer.real.join.replica import LoopReplica
from gossamer.real.replicas import Place
from gossamer.worker import Gradient

decays = st.sampled_from([0.0, 0.25, 0.5])


@settings(max_examples=20)
@given(decays, decays, st.booleans())
def test_each_group_of_parameters_has_its_own_weight_decay(
    first: float, second: float, is_used: bool
) -> None:
    """The penalised gradient is what torch's SGD at rate 1 and without momentum subtracts from the
    parameters: every group with its own decay, and nothing from what has no gradient."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [
        {"params": model[0].parameters(), "weight_decay": first},
        {"params": model[1].parameters(), "weight_decay": second},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    binding = ModuleBinding(list(model.named_parameters()))
    window = binding.initial()
    binding.attach(window, is_private=True)
    (model if is_used else model[0])(torch.ones(4, 3)).square().sum().backward()
    replica = LoopReplica(binding, Place(window), optimizer)
    gradient = replica.penalised(LoopGradient.of(binding, range(len(binding.parameters))), window)
    before = window.clone()
    replica.descend_(LoopGradient.of(binding, range(len(binding.parameters))))
    torch.testing.assert_close(before - window, gradient + torch.zeros_like(window))


def test_a_method_with_its_own_descent_clips_for_one_step() -> None:
    """What the loop asked for before a step holds for the gradient of that step, with its norm;
    weight decay comes on top."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    binding = ModuleBinding(list(model.named_parameters()))
    window = binding.initial()
    binding.attach(window, is_private=True)
    model(torch.ones(4, 3)).square().sum().backward()
    replica = LoopReplica(binding, Place(window), optimizer)
    gradient = LoopGradient.of(binding, range(len(binding.parameters))) + torch.zeros_like(window)
    replica.clip = 0.01
    clipped = replica.penalised(gradient, window) - 0.5 * window
    torch.testing.assert_close(clipped, gradient * (0.01 / gradient.norm()))
    assert torch.equal(replica.clipped(gradient), gradient)


class _Taken(AbstractContextManager[None]):
    """The guard of a window that somebody else is changing."""

    def __exit__(self, *_: object) -> None: ...

    def __enter__(self) -> None:
        raise AssertionError("whoever waited here would wait for the other to finish")


def test_a_point_is_loaded_from_a_window_that_is_being_changed() -> None:
    model = nn.Linear(3, 2)
    binding = ModuleBinding(list(model.named_parameters()))
    window = binding.initial()
    binding.attach(window, is_private=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = LoopReplica(binding, Place(window, _Taken()), optimizer)
    window.add_(1.0)
    gradients = SimpleNamespace(next=lambda: Gradient("gradient"))
    watch = SimpleNamespace(given=lambda point: None)
    coupling: Any = SimpleNamespace(
        _binding=binding,
        replica=replica,
        gradients=gradients,
        _watch=watch,
        _is_watched=False,
        lessons=SimpleNamespace(begin=lambda lesson: None),
    )
    gradient = LoopSession._gradient(coupling, cast(Any, replica), None, None)  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(binding.initial(), window)
    assert gradient is coupling._wanted
    assert not gradient.done
