"""The gradient of a user's loop is reduced where it lies, and a loop that goes on is left alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.pending import Pending
from gossamer.real.driver import Driver
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.gradient import LoopGradient, LoopGradients
from gossamer.real.join.replica import LoopReplica
from gossamer.real.replicas import Place
from gossamer.real.transports.transport import StopToken
from gossamer.rules import join_buckets


class Doubling:
    """A transport whose means are twice what was put in."""

    size = 2

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        read = [tensor.clone() for tensor in tensors]
        pending: Pending[None] = Pending("all_reduce")

        def settle() -> None:
            for tensor, value in zip(tensors, read, strict=True):
                tensor.copy_(2 * value)
            pending.resolve(None)
            pending.settle = None

        pending.settle = settle
        return pending


class Loop:
    """A module, coupled, with its gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.binding = ModuleBinding(list(self.model.named_parameters()))
        self.window = self.binding.initial()
        self.binding.attach(self.window, is_private=False)
        self.driver = Driver(StopToken())
        self.gradients = LoopGradients(
            self.binding, cast(Any, Doubling()), self.driver, lambda: None, has_buckets=False
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.replica = LoopReplica(self.binding, Place(self.window), self.optimizer)

    def backward(self, factor: float = 1.0) -> LoopGradient:
        (factor * self.model(torch.ones(5, 3)).square().sum()).backward()
        return self.gradients.complete()

    def grads(self) -> list[Tensor]:
        return [cast(Tensor, parameter.grad) for parameter in self.model.parameters()]

    def awaited(self, pending: Pending[Tensor]) -> Tensor:
        self.driver.wait(pending)
        return pending.result()


def test_the_mean_takes_the_place_of_the_gradient() -> None:
    """The very tensors of the loop hold it, and a step descends along them."""
    loop = Loop()
    gradient = loop.backward()
    own, before = loop.grads(), [grad.clone() for grad in loop.grads()]
    reduced = loop.gradients.reduce(gradient, range(2))
    assert all(map(torch.equal, loop.grads(), before))
    mean = loop.awaited(reduced)
    assert all(one is other for one, other in zip(loop.grads(), own, strict=True))
    assert all(torch.equal(grad, 2 * old) for grad, old in zip(own, before, strict=True))
    window = loop.window.clone()
    loop.replica.descend_(mean)
    expected = window - 0.5 * torch.cat([2 * old.reshape(-1) for old in before])
    torch.testing.assert_close(loop.window, expected)


def test_a_step_moves_the_parameters_themselves() -> None:
    """Autograd finds out by their versions that a graph from before is of no use any more."""
    loop = Loop()
    loop.backward()
    versions = [parameter._version for parameter in loop.model.parameters()]
    loop.binding.descend(loop.optimizer.step, nullcontext())
    for parameter, version in zip(loop.model.parameters(), versions, strict=True):
        assert parameter._version > version
        assert parameter.requires_grad


def test_nobody_holds_the_gradients_of_a_step_after_it() -> None:
    """The next ones are to be made in the same memory, although the method still has the mean."""
    loop = Loop()
    reduced = loop.gradients.reduce(loop.backward(), range(2))
    mean = loop.awaited(reduced)
    loop.replica.descend_(mean)
    loop.gradients.next()
    held = [weakref.ref(grad) for grad in loop.grads()]
    loop.optimizer.zero_grad()
    assert all(grad() is None for grad in held)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_a_mean_awaited_in_a_later_step_is_that_of_its_own_gradient(
    steps: list[tuple[bool, bool]],
) -> None:
    """Whether the loop frees its gradients, or sets the same tensors to zero and adds to them; and
    whether an older mean takes their place or not."""
    loop = Loop()
    waiting: list[tuple[Pending[Tensor], Tensor]] = []
    for number, (frees, descends) in enumerate(steps, start=1):
        loop.gradients.next()
        loop.optimizer.zero_grad(set_to_none=frees)
        gradient = loop.backward(float(number))
        own = gradient.clone()
        expected = torch.cat([grad.reshape(-1) for grad in loop.grads()])
        assert torch.equal(own, expected)
        waiting.append((loop.gradients.reduce(gradient, range(2)), 2 * own))
        if descends and len(waiting) > 1:
            reduced, value = waiting.pop(0)
            mean = loop.awaited(reduced)
            assert torch.equal(mean + 0.0, value)
            loop.replica.descend_(mean)
    for reduced, value in waiting:
        assert torch.equal(loop.awaited(reduced) + 0.0, value)


def test_a_parameter_that_nobody_used_stays_without_a_gradient() -> None:
    """It counts as zero, and an optimiser would decay its weights."""
    loop = Loop()
    loop.model[0](torch.ones(5, 3)).square().sum().backward()
    mean = loop.awaited(loop.gradients.reduce(loop.gradients.complete(), range(2)))
    loop.replica.descend_(mean)
    assert [grad is None for grad in loop.grads()] == [False, False, True, True]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", ["sparse", "with a graph"])
def test_a_gradient_that_is_no_plain_tensor_is_reduced_as_a_copy(kind: str) -> None:
    table = nn.Embedding(6, 2, sparse=kind == "sparse")
    binding = ModuleBinding(list(table.named_parameters()))
    binding.attach(binding.initial(), is_private=False)
    loss = table(torch.tensor([1, 3])).square().sum()
    loss.backward(create_graph=kind != "sparse")
    (own,) = (cast(Tensor, parameter.grad) for parameter in table.parameters())
    before = own.detach().to_dense().clone() if own.is_sparse else own.detach().clone()
    (copy,) = LoopGradient.of(binding, range(1)).pieces()
    copy.zero_()
    assert torch.equal(own.detach().to_dense() if own.is_sparse else own.detach(), before)


def test_means_of_all_buckets_are_the_mean_of_the_whole() -> None:
    """In whatever memory each of them lies; nothing is put together before somebody looks."""
    loop = Loop()
    loop.backward()
    first, last = range(2), range(2, 4)
    kept = [torch.full_like(piece, 7.0) for piece in LoopGradient.of(loop.binding, last).pieces()]
    parts = [LoopGradient.of(loop.binding, last, kept), LoopGradient.of(loop.binding, first)]
    whole = join_buckets(parts)
    assert isinstance(whole, LoopGradient)
    expected = [grad.reshape(-1) for grad in [*loop.grads()[:2], *kept]]
    assert torch.equal(whole + 0.0, torch.cat(expected))
