"""A user's loop saved between two steps and loaded again, alone with its servers."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from gossamer.methods import parse_method
from gossamer.real.binding import Binding
from gossamer.real.coupling import Coupling
from gossamer.real.join import JoinedWorker
from gossamer.real.lone import LoneTransport
from gossamer.replica import trainable

STEPS = 6
METHODS = [
    f"{method}:synchronous=true,alpha=0.3,period={period}"
    for method in ("easgd", "eamsgd")
    for period in (1, 2)
] + ["all_reduce", "sync_server", "local_sgd:period=2", "push_sum"]


def loop_of(method: str, seed: int = 0) -> JoinedWorker:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    spec = parse_method(method)
    coupling = Coupling(LoneTransport(), spec, model, Binding(trainable(model)), optimizer, 0, 1000)
    return JoinedWorker(model, optimizer, spec, coupling, 0)


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
