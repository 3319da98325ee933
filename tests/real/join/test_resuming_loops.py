"""A user's loop saved between two steps and loaded again, alone with its servers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from gossamer.methods import parse_method
from gossamer.real.join.joined_worker import JoinedWorker, coupled
from gossamer.real.transports.local import LocalTransport

STEPS = 6
METHODS = (
    [
        f"{method}:synchronous=true,alpha=0.3,period={period}"
        for method in ("easgd", "eamsgd")
        for period in (1, 2)
    ]
    + ["all_reduce", "sync_server", "local_sgd:period=2", "push_sum"]
    + [
        "diloco:period=2,outer_rate=0.7,outer_momentum=0.5+topk:share=0.3",
        "sync_server+onebit",
        "all_reduce+topk:share=0.3",
    ]
)


def loop_of(method: str, seed: int = 0, *, is_adam: bool = False) -> JoinedWorker:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return coupled(LocalTransport(), model, optimizer, parse_method(method))


def train(worker: JoinedWorker, begin: int, end: int) -> None:
    for step in range(begin, end):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        worker.optimizer.zero_grad()
        worker.model(inputs).square().mean().backward()
        worker.step()


def parameters(worker: JoinedWorker) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in worker.model.parameters()])


@pytest.mark.parametrize("cut", [1, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_loop_ends_with_the_same_bits(method: str, cut: int) -> None:
    """Also where the method had begun its next step when the state was taken."""
    whole = loop_of(method)
    with whole:
        train(whole, 0, STEPS)
    saved, file = loop_of(method), io.BytesIO()
    with saved:
        train(saved, 0, cut)
        parts = (saved.model, saved.optimizer, saved)
        torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    again = loop_of(method, seed=1)
    parts = (again.model, again.optimizer, again)
    for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    with again:
        train(again, cut, STEPS)
    assert torch.equal(parameters(again), parameters(whole))
    assert not torch.equal(parameters(saved), parameters(whole))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("method", ["sync_server:servers=2", "downpour"])
def test_an_ordinary_checkpoint_holds_what_the_servers_optimisers_remember(
    method: str, inside: bool
) -> None:
    """Of the model and the optimiser alone, as scripts have it: Adam goes on as plain Adam does."""
    saved, plain = (loop_of(method, is_adam=True) for _ in range(2))
    for step in range(STEPS):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        plain.own_optimizer.zero_grad()
        plain.model(inputs).square().mean().backward()
        plain.own_optimizer.step()
    with saved:
        train(saved, 0, 3)
        state = (saved.model.state_dict(), saved.optimizer.state_dict()) if inside else None
        state = copy.deepcopy(state)
    if state is None:
        state = (saved.model.state_dict(), saved.optimizer.state_dict())
    again = loop_of(method, seed=1, is_adam=True)
    again.model.load_state_dict(state[0])
    again.optimizer.load_state_dict(state[1])
    with again:
        train(again, 3, STEPS)
    torch.testing.assert_close(parameters(again), parameters(plain))
    moments = [again.optimizer.state[p]["exp_avg_sq"] for p in again.model.parameters()]
    others = [plain.own_optimizer.state[p]["exp_avg_sq"] for p in plain.model.parameters()]
    torch.testing.assert_close(moments, others)


def test_a_state_that_is_taken_changes_nothing() -> None:
    """What `ssp` moves its own copy with between two reads is not the servers' afterwards."""
    loop = loop_of("ssp", is_adam=True)
    with loop:
        train(loop, 0, 3)
        parameter = next(loop.model.parameters())
        before = copy.deepcopy(loop.optimizer.state[parameter])
        loop.optimizer.state_dict()
        after = loop.optimizer.state[parameter]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
