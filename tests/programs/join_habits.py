"""What users do inside a coupled loop: each habit works or is refused in a sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import gossamer
from gossamer.real.join import loader as sharding
from join_cases import assert_close, batch, digest, loss_of, net, train


def refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except gossamer.ConfigurationError as error:
        return str(error)
    return ""


def refusal_of_a_run(model: nn.Module, habit: Callable[[], object]) -> dict[str, object]:
    """After two steps the habit, then steps until they are refused, or until the server has gone
    with a worker whose step was."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with gossamer.join(model, optimizer) as worker:
            train(worker, 2)
            habit()
            train(worker, 8, 2)

    try:
        return {"said": refusal(run)}
    except gossamer.PeerLost:
        assert os.environ["GOSSAMER_METHOD"] == "sync_server"
        return {"said": None}


def case_of_unfreezing(rank: int) -> dict[str, object]:
    model = net(0)
    model[0].requires_grad_(False)
    return refusal_of_a_run(model, lambda: model[0].requires_grad_(True))


def case_of_replacing_data(rank: int) -> dict[str, object]:
    model = net(0)

    def replace() -> None:
        model[2].weight.data = model[2].weight.data.clamp(-1, 1)

    return refusal_of_a_run(model, replace)


def case_of_other_models(rank: int) -> dict[str, object]:
    model = nn.Linear(5, 2 + rank)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        raise AssertionError("models of different shapes were coupled")


def case_of_a_visit_in_a_visit(rank: int) -> dict[str, object]:
    """A helper that evaluates the output is called where the output is looked at already."""
    model = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
        train(worker, 2)
        before = digest(model)
        with worker.consensus():
            outer = digest(model)
            with worker.consensus():
                pass  # as of now: the other may have gone on by a forward pass
            assert digest(model) == outer
            said = refusal(worker.step)
        assert digest(model) == before
        train(worker, 2, 2)
    return {"said": said, "digest": digest(model)}


def case_of_a_scaler_without_update(rank: int) -> dict[str, object]:
    model, scaler = net(0), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    with gossamer.join(model, optimizer) as worker:
        for step, is_updated in enumerate((True, True, False, True)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, *batch(rank, step))).backward()
            said.append(refusal(lambda: worker.step(scaler)))
            if is_updated:
                scaler.update()
        said.append(refusal(lambda: worker.step(lambda: None)))
    return {"said": said, "digest": digest(model)}


# ---------------------------------------------------------------------- loaders


class OwnDraws(BatchSampler):
    """Batches shuffled by a generator that the sampler has of its own."""

    def __init__(self, count: int) -> None:
        self.generator = torch.Generator()
        self.generator.seed()
        self._count = count

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._count, generator=self.generator).tolist()
        yield from (order[first : first + 4] for first in range(0, self._count, 4))

    def __len__(self) -> int:
        return self._count // 4


class Endless(BatchSampler):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0]

    def __len__(self) -> int:
        raise TypeError("there is no end")


class Halves(DataLoader[Any]):
    """A loader of the user's own, which does something to every batch."""

    def __iter__(self) -> Iterator[Any]:
        for (values,) in super().__iter__():
            yield (values + 0.5,)


class HandingOver:
    """As those of Accelerate: it says that it is a loader, and has nothing but another one."""

    def __init__(self, base: DataLoader) -> None:
        self.base = base

    @property
    def __class__(self) -> type:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base)


def case_of_loaders(rank: int) -> dict[str, object]:
    data = TensorDataset(torch.arange(40.0))
    model = net(0)
    sharding._MOST_UNCOUNTED = 100

    def values(loader: Any) -> list[float]:
        shard = worker.shard(loader)
        assert isinstance(shard, type(loader))
        return [float(value) for (part,) in shard for value in part.reshape(-1)]

    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
        found = {
            "single": values(DataLoader(data, batch_size=None, shuffle=True)),
            "own draws": values(DataLoader(data, batch_sampler=OwnDraws(40))),
            "handing over": values(HandingOver(DataLoader(data, batch_size=4, shuffle=True))),
            "own class": values(Halves(data, batch_size=4, sampler=RandomSampler(data))),
        }
        plain = DistributedSampler(data, num_replicas=2, rank=rank)
        twice = DataLoader(data, batch_sampler=BatchSampler(plain, 4, drop_last=False))
        endless = DataLoader(data, batch_sampler=Endless())
        said = [refusal(lambda: worker.shard(twice)), refusal(lambda: values(endless))]
        counted = BatchSampler(SequentialSampler(range(1000)), 1, drop_last=False)
        many = DataLoader(TensorDataset(torch.zeros(1000)), batch_sampler=counted)
        found["many"] = values(many)
        train(worker, 1)
    return {"found": found, "said": said}


# ---------------------------------------------------------------------- optimisers


def case_of_climbing(rank: int) -> dict[str, object]:
    """A score that is to grow, and a layer that the optimiser does not hold."""
    model = net(0)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05, weight_decay=0.01, maximize=True)
    inputs, targets = batch(0, 0)
    scores: list[float] = []
    left = model[0].weight.detach().clone()
    with gossamer.join(model, optimizer) as worker:
        for _ in range(20):
            optimizer.zero_grad()
            score = -loss_of(model, inputs, targets)
            score.backward()
            scores.append(float(score.detach()))
            worker.step()
    assert torch.equal(model[0].weight, left)
    return {"first": scores[0], "last": scores[-1]}


def case_of_an_added_group(rank: int) -> dict[str, object]:
    """As fine-tuning does: first the head, later the body, with plain training beside it."""

    def halves(model: nn.Sequential) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        group = {"params": list(model[0].parameters()), "lr": 0.02}
        return optimizer, lambda: optimizer.add_param_group(group)

    model, alone = net(0), net(0)
    optimizer, add = halves(model)
    other, add_there = halves(alone)
    with gossamer.join(model, optimizer) as worker:
        for step in range(6):
            if step == 3:
                add(), add_there()
            train(worker, 1, step)
            other.zero_grad()
            parts = [batch(member, step) for member in range(worker.size)]
            loss_of(alone, *(torch.cat(both) for both in zip(*parts, strict=True))).backward()
            other.step()
    assert_close(model, alone)
    return {"digest": digest(model)}


def case_of_a_fused_optimiser(rank: int) -> dict[str, object]:
    """It has a state, of weights that lie in memory with their channels last."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, how: Callable[[], None]) -> None:
        generator = torch.Generator().manual_seed(5)
        optimizer.zero_grad()
        model(torch.randn(3, 4, 6, 6, generator=generator)).square().mean().backward()
        how()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 5, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

    (model, optimizer), (alone, other) = made(), made()
    for _ in range(3):
        step(model, optimizer, optimizer.step)
    with gossamer.join(model, optimizer) as worker:
        for _ in range(3):
            step(model, optimizer, worker.step)
    for _ in range(3):
        step(model, optimizer, optimizer.step)
    for _ in range(9):
        step(alone, other, other.step)
    assert_close(model, alone)
    return {"digest": digest(model)}


def case_of_sparse_adam(rank: int) -> dict[str, object]:
    """Rows that any worker has used move; the others' moments stay."""

    def loss(model: nn.Module, member: int, step: int) -> Tensor:
        return model(torch.arange(4) + member + step).square().sum()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Embedding(12, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    (model, optimizer), (alone, other) = made(), made()
    with gossamer.join(model, optimizer) as worker:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            worker.step()
            other.zero_grad()
            (sum(loss(alone, member, step) for member in range(worker.size)) / 2).backward()
            other.step()
    assert_close(model, alone)
    return {"digest": digest(model)}


# ---------------------------------------------------------------------- the rest


def case_of_expanded_buffers(rank: int) -> dict[str, object]:
    model = net(0)
    model.register_buffer("ids", torch.arange(4).expand(2, 4), persistent=False)
    model.register_buffer("ones", torch.ones(1).expand(3))
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
        train(worker, 2)
        with worker.consensus():
            pass
    return {"ids": model.ids.tolist(), "digest": digest(model)}


def case_of_own_signals(rank: int) -> dict[str, object]:
    """A handler of the script's own, as for a batch system that warns before the end."""
    heard: list[str] = []
    place = "inside"
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(place))
    model = net(0)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
        train(worker, 1)
        os.kill(os.getpid(), signal.SIGUSR1)
    place = "after"
    os.kill(os.getpid(), signal.SIGUSR1)
    return {"heard": heard}
