"""What coupled loops hand out: of one moment, with statistics of its own, the same for all.

python tests/programs/output_groups.py '[["case_of_looking_after_every_step", 3, "local_sgd"]]'
"""

from __future__ import annotations

import random
import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.tasks import make_task
from join_cases import batch, digest, net, train
from join_groups import main

LOOKS = 40


def _look(worker: Any) -> str:
    with worker.consensus() as output:
        return digest(output)


def case_of_looking_after_every_step(rank: int) -> dict[str, object]:
    model = net(rank)
    seen: list[str] = []
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.05)) as worker:
        for step in range(LOOKS):
            train(worker, 1, step)
            own = digest(model)
            seen.append(_look(worker))
            if worker.method.name == "all_reduce":
                assert seen[-1] == own
    return {"seen": seen}


def case_of_one_who_looks(rank: int) -> dict[str, object]:
    """The others go on meanwhile."""
    model = net(rank)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.05)) as worker:
        for step in range(LOOKS):
            train(worker, 1, step)
            if rank == step % worker.size:
                assert _look(worker) == digest(model)
    return {"digest": digest(model)}


# ---------------------------------------------------------------------- statistics


class Normed(nn.Module):
    """Statistics that are known beforehand, those of its inputs; a layer whose are frozen; draws of
    its own; and a buffer that each pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5, momentum=0.3)
        self.frozen = nn.BatchNorm1d(5)
        self.layer = nn.Linear(5, 2)
        self.register_buffer("passes", torch.zeros(2))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs: Tensor, *, shift: Tensor) -> Tensor:
        if self.training:
            self.passes += torch.rand(2) + random.random()
            self.steps += 1
        hidden = self.frozen(self.norm(inputs + shift))
        inputs.zero_()  # whoever keeps a batch keeps it as it came
        return self.layer(hidden)


def _normed_step(worker: Any, model: nn.Module, step: int) -> None:
    inputs, targets = batch(worker.rank, step)
    worker.optimizer.zero_grad()
    output = model(inputs, shift=torch.ones(5))
    (output - targets).square().mean().backward()
    worker.step()


def case_of_own_statistics(rank: int) -> dict[str, object]:
    """Fewer steps on worker 0, which looks at the output on the way."""
    torch.manual_seed(0)
    model = Normed()
    model.frozen.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 3 + rank
    with gossamer.join(model, optimizer) as worker:
        for step in range(steps):
            _normed_step(worker, model, step)
        before, state = {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()
        numbers = random.getstate()
        model.eval()
        with worker.consensus() as output:
            assert not any(module.training for module in output.modules())
            mine = torch.stack([batch(rank, step)[0].mean(0) for step in range(steps)])
            torch.testing.assert_close(output.norm.running_mean, mine.mean(0) + 1)
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        model.train()
        model.frozen.eval()
    assert model.norm.training
    assert not model.frozen.training
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers
    assert model.norm.momentum == 0.3
    parts = [batch(other, s)[0] for other in range(worker.size) for s in range(3 + other)]
    mean = torch.stack([part.mean(0) for part in parts]).mean(0) + 1
    variance = torch.stack([part.var(0) for part in parts]).mean(0)
    torch.testing.assert_close(model.norm.running_mean, mean)
    torch.testing.assert_close(model.norm.running_var, variance)
    assert int(model.norm.num_batches_tracked) == len(parts)
    assert torch.equal(model.frozen.running_mean, torch.zeros(5))
    return {"digest": digest(model), "steps": int(model.steps)}


def case_of_layers_called_one_by_one(rank: int) -> dict[str, object]:
    """Nothing passes through the model as a whole; recalibrating is asked for, once."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.BatchNorm1d(5), nn.Linear(5, 2)])
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.05)) as worker:
            for step in range(3):
                inputs, targets = batch(rank, step)
                worker.optimizer.zero_grad()
                (model[1](model[0](inputs)) - targets).square().mean().backward()
                worker.step()
                if rank == 0:
                    _look(worker)
            said = [str(one.message) for one in caught]
            given = [batch(0, 9), batch(0, 8)]
            worker.recalibrate(given, forward=lambda one: model[1](model[0](one[0])))
        said += [str(one.message) for one in caught[len(said) :]]
    expected = torch.stack([inputs.mean(0) for inputs, _ in given]).mean(0)
    torch.testing.assert_close(model[0].running_mean, expected)
    return {"digest": digest(model), "said": said}


def case_of_a_weak_coupling(rank: int) -> dict[str, object]:
    """Digits by four images at a time, through a sharded loader."""
    task = make_task("digits-mlp")
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (64, 48, 48):
        layers += [nn.Linear(inputs, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(48, 10))
    data = TensorDataset(task.train.inputs, task.train.targets)
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def accuracy() -> float:
        with torch.no_grad():
            found = model.eval()(task.test.inputs).argmax(-1)
        model.train()
        return float((found == task.test.targets).float().mean())

    with gossamer.join(model, optimizer) as worker:
        for inputs, targets in chain(*(worker.shard(loader) for _ in range(3))):
            worker.optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            worker.step()
        with worker.consensus():
            inside = accuracy()
    return {"inside": inside, "after": accuracy(), "digest": digest(model)}


if __name__ == "__main__":
    main(globals())
