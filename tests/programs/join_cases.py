"""What one worker does and checks in its own loop; `test_join.py` compares the workers' answers."""

from __future__ import annotations

import copy
import hashlib
import random
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer

STEPS = 4
ROWS = 6


def batch(rank: int, step: int, features: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(ROWS, features, generator=generator)
    return inputs, inputs[:, :2] * 3 - 1


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def digest(model: nn.Module) -> str:
    state = model.state_dict().values()
    return hashlib.sha256(b"".join(bytes(t.numpy().tobytes()) for t in state)).hexdigest()[:16]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Parameters in two groups with rates of their own."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.02}]
    if name == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, lr=0.1)


def train(
    worker: gossamer.JoinedWorker, steps: int = STEPS, begin: int = 0,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:  # fmt: skip
    for step in range(begin, begin + steps):
        worker.optimizer.zero_grad()
        loss_of(worker.model, *batch(worker.rank, step)).backward()
        worker.step()
        if schedule is not None:
            schedule.step()


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, size: int, *, steps: int = STEPS,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:  # fmt: skip
    """One process on everybody's batches at once."""
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(rank, step) for rank in range(size)]
        inputs, targets = (torch.cat(both) for both in zip(*parts, strict=True))
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def assert_close(model: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    others = other.state_dict()
    for name, mine in model.state_dict().items():
        torch.testing.assert_close(
            mine,
            others[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, at=name: f"{at}: {text}",
        )


# ---------------------------------------------------------------------- equal to one process


def case_of_optimisers(rank: int, name: str = "momentum") -> dict[str, object]:
    """A mean gradient, a schedule, groups; parameters keep identity and end in memory of theirs."""
    model = net(rank)  # worker 0's counts
    optimizer = optimizer_of(name, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    objects = list(model.parameters())
    memory = [p.data_ptr() for p in objects]
    with gossamer.join(model, optimizer) as worker:
        train(worker, schedule=schedule)
        kept = model.state_dict()
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    assert [p.data_ptr() for p in model.parameters()] == memory
    assert all(bool(t.isfinite().all()) for t in kept.values())  # lent memory stays readable
    alone = net(0)
    other = optimizer_of(name, alone)
    plain(alone, other, worker.size, schedule=torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.1))
    assert_close(model, alone, 1e-4 if name != "momentum" else 1e-5)
    return {"digest": digest(model)}


def case_of_adam(rank: int) -> dict[str, object]:
    return case_of_optimisers(rank, "adam")


def case_of_adamw(rank: int) -> dict[str, object]:
    return case_of_optimisers(rank, "adamw")


class Odd(nn.Module):
    """Tied, frozen, unused, of several types, channels last, with BatchNorm."""

    def __init__(self, seed: int, *, is_mixed: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.tied.weight
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2, dtype=torch.float64 if is_mixed else torch.float32)
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs[:, :4].reshape(-1, 1, 2, 2).expand(-1, 2, 2, 2)
        hidden = self.norm(self.convolution(images)).mean((2, 3))
        hidden = self.again(self.tied(self.frozen(hidden)).tanh())
        return self.head(hidden.to(self.head.weight.dtype)).float()


def case_of_odd_models(rank: int, *, is_mixed: bool = False) -> dict[str, object]:
    model = Odd(rank, is_mixed=is_mixed)
    frozen = Odd(0, is_mixed=is_mixed).frozen.weight
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    unused = Odd(0, is_mixed=is_mixed).unused.weight
    strides = model.convolution.weight.stride()
    with gossamer.join(model, optimizer) as worker:
        train(worker)
        own = model.norm.running_mean.clone()
    assert model.again.weight is model.tied.weight
    assert model.convolution.weight.stride() == strides
    assert torch.equal(model.frozen.weight, frozen)
    assert model.seen.item() == 0
    if worker.method.name == "all_reduce":
        assert torch.equal(model.unused.weight, unused)  # weight decay spares what has no gradient
    return {
        "digest": digest(model), "own": own.tolist(), "mean": model.norm.running_mean.tolist(),
    }  # fmt: skip


def case_of_mixed_types(rank: int) -> dict[str, object]:
    return case_of_odd_models(rank, is_mixed=True)


def case_of_half_precision(rank: int) -> dict[str, object]:
    """All parameters bfloat16: the window is, too."""
    model = net(rank).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            loss_of(model, inputs.bfloat16(), targets.bfloat16()).backward()
            worker.step()
    moved = (model[0].weight.float() - net(0)[0].weight).abs().max().item()
    assert 0 < moved < 5
    return {"digest": digest(model.float())}


def case_of_compiling_afterwards(rank: int) -> dict[str, object]:
    """The compiled module computes at the points that the plain one is given."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        compiled = torch.compile(model, backend="eager")
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            assert torch.equal(compiled(inputs), model(inputs))
            loss_of(compiled, inputs, targets).backward()
            worker.step()
    assert torch.equal(compiled(inputs), model(inputs))
    return {"digest": digest(model)}


# ---------------------------------------------------------------------- what loops do


def case_of_accumulation(rank: int) -> dict[str, object]:
    """Two batches to a step equal one of twice the size."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gossamer.join(model, optimizer) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            with worker.accumulate():
                (loss_of(model, inputs[:3], targets[:3]) / 2).backward()
                worker.step()
            (loss_of(model, inputs[3:], targets[3:]) / 2).backward()
            worker.step()
    alone = net(0)
    plain(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), worker.size)
    assert_close(model, alone)
    return {"digest": digest(model)}


def case_of_clipping(rank: int, scope: str = "global") -> dict[str, object]:
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        optimizer.zero_grad()
        loss_of(model, *batch(rank, 0)).backward()
        worker.clip_grad_norm_(0.01, scope)
        worker.step()
        once = net(0)
        norm = _distance(model, once) / 0.1
        optimizer.zero_grad()
        before = copy.deepcopy(model)
        loss_of(model, *batch(rank, 1)).backward()
        worker.step()
        assert _distance(model, before) / 0.1 > 0.1  # clipping is for one step
    return {"norm": norm, "digest": digest(model)}


def case_of_local_clipping(rank: int) -> dict[str, object]:
    return case_of_clipping(rank, "local")


def _distance(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5


def case_of_scaling(rank: int) -> dict[str, object]:
    """AMP: worker 1's second gradient is infinite."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    moved: list[bool] = []
    with gossamer.join(model, optimizer) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, *batch(rank, step))
            scaler.scale(loss * (float("inf") if (rank, step) == (1, 1) else 1.0)).backward()
            before = copy.deepcopy(model)
            if step == 2:
                scaler.unscale_(optimizer)
                worker.clip_grad_norm_(1.0)
            worker.step(scaler)
            scaler.update()
            moved.append(_distance(model, before) > 0)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return {"moved": moved, "scale": scaler.get_scale(), "digest": digest(model)}


def case_of_consensus(rank: int) -> dict[str, object]:
    """Worker 0 looks at the output in between; nobody else does, and training is as before."""
    model = Odd(0, is_mixed=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        assert worker.is_main == (rank == 0)
        assert worker.device == torch.device("cpu")
        train(worker, 2)
        here = digest(model)
        if worker.is_main:
            with worker.consensus() as seen:
                assert seen is model
                seen.eval()
                assert bool(seen(batch(0, 9)[0]).isfinite().all())
                seen.train()
                inside = digest(seen)
            if worker.method.name == "pull_gossip":
                assert inside != here
            assert digest(model) == here
        train(worker, 2, 2)
    with worker.consensus():
        last = digest(model)
    return {"digest": last}


# ---------------------------------------------------------------------- data


def case_of_shards(rank: int) -> dict[str, object]:
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(26.0))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    state = random.getstate()
    with gossamer.join(model, optimizer) as worker:
        mine = worker.shard(loader)
        epochs = [_numbers(worker, mine) for _ in range(2)]
        # A loop that calls it anew in every epoch gets a new order as well.
        epochs += [_numbers(worker, worker.shard(loader)) for _ in range(2)]
        listed = _numbers(worker, worker.shard([torch.tensor([i]) for i in range(13)]))
        streamed = _numbers(worker, worker.shard(torch.tensor([i]) for i in range(13)))
        lengths = [len(mine), len(worker.shard([torch.zeros(1)] * 13))]
    assert random.getstate() == state  # the loop's own numbers are not touched
    return {"epochs": epochs, "listed": listed, "streamed": streamed, "lengths": lengths}


def _numbers(worker: gossamer.JoinedWorker, batches: object) -> list[list[float]]:
    found = []
    for one in batches:
        values = one[0] if isinstance(one, list) else one
        found.append([float(value) for value in values])
        if not worker.coupling.session.is_synchronous:
            time.sleep(0.002)  # computing; or the first worker to come would take all
    return found


def case_of_a_steady_point(rank: int) -> dict[str, object]:
    """Whatever others do, a model stays what it is from the forward to the backward pass."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moved = 0
    with gossamer.join(model, optimizer) as worker:
        coupling = worker.coupling
        assert coupling is not None
        for step in range(40):
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            loss = loss_of(model, *batch(rank, step))
            time.sleep(1e-3)
            loss.backward()
            moved += not all(map(torch.equal, before, model.parameters()))
            worker.step()
        window = coupling.session.transport.window(rank)
        is_in_window = next(model.parameters()).data_ptr() == window.data_ptr()
        exchanges = coupling.session.metrics.exchanges
    return {
        "digest": digest(model), "moved": moved, "is_in_window": is_in_window,
        "exchanges": exchanges,
    }  # fmt: skip
