"""What else moves a coupled model than `worker.step()`: it is carried over or refused."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import gossamer
from join_cases import batch, digest, loss_of, net, train
from join_habits import refusal


def case_of_a_step_beside(rank: int) -> dict[str, object]:
    """`optimizer.step()` left in, and the same by a scaler; then the loop goes on without it."""
    model, scaler = net(0), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        train(worker, 1)
        before = digest(model)
        scaler.scale(loss_of(model, *batch(rank, 1))).backward()
        said = [refusal(optimizer.step), refusal(lambda: scaler.step(optimizer))]
        assert digest(model) == before
        train(worker, 1, 1)
    optimizer.step()  # afterwards it is the loop's own again
    return {"said": said}


class Nested(torch.optim.SGD):
    """An optimiser that steps by another one of the same parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=lr)

    def step(self, closure: object = None) -> None:
        self.inner.step()


def case_of_two_optimisers(rank: int) -> dict[str, object]:
    """One for each half of a model, stepped or forgotten; and two that are one."""
    model, other = net(0), net(1)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    said = [refusal(lambda: gossamer.join(model, first))]
    second.param_groups.clear()
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = Nested(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        train(worker, 1)
        loss_of(other, *batch(rank, 1)).backward()
        elsewhere.step()  # of another model: none of ours
        second.add_param_group({"params": list(model[2].parameters())})
        said.append(refusal(second.step))
        train(worker, 1, 1)
    return {"said": said, "digest": digest(model)}


def case_of_wrapping_afterwards(rank: int) -> dict[str, object]:
    """In DDP, behind the back of join; a process group alone does no harm."""
    place = f"file://{os.environ['JOIN_FOLDER']}/ddp {os.environ['GOSSAMER_STORE']}"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=2)
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with gossamer.join(model, optimizer) as worker:
            wrapped = nn.parallel.DistributedDataParallel(model)
            loss_of(wrapped, *batch(rank, 0)).backward()
            worker.step()

    said = refusal(run)
    torch.distributed.destroy_process_group()
    return {"said": said}


def case_of_an_old_graph(rank: int) -> dict[str, object]:
    """A backward pass through the graph of a step before; and, as in a GAN, through that of a part
    that had no gradient in it."""
    model = nn.ModuleList([net(0), net(1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(rank, 0)
    said: dict[str, list[str]] = {"moved": [], "kept": []}
    with gossamer.join(model, optimizer) as worker:
        for part in (0, 1):
            optimizer.zero_grad()
            found = {"moved": model[part](inputs), "kept": model[1 - part](inputs)}
            (found["moved"] - targets).square().mean().backward(retain_graph=True)
            worker.step()
            optimizer.zero_grad()
            for name, outputs in found.items():
                try:
                    outputs.sum().backward()
                    said[name].append("")
                except RuntimeError as error:
                    said[name].append(str(error))
    return {**said, "digest": digest(model)}


def case_of_clamping(rank: int, *, is_counted: bool = True) -> dict[str, object]:
    """As for a critic: after every step all weights are put into a small box, the last time before
    the last step, at a rate of nothing."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with gossamer.join(model, optimizer) as worker:
        for step in range(6):
            if step == 5:
                optimizer.param_groups[0]["lr"] = 0.0
            train(worker, 1, step)
            if step < 5:
                with torch.no_grad():
                    for parameter in model.parameters():
                        (parameter if is_counted else parameter.data).clamp_(-0.01, 0.01)
        own = worker.coupling.replica.snapshot()
    largest = max(float(parameter.detach().abs().max()) for parameter in model.parameters())
    return {"largest": max(largest, float(own.abs().max())), "digest": digest(model)}


def case_of_clamping_data(rank: int) -> dict[str, object]:
    return case_of_clamping(rank, is_counted=False)


def case_of_touching_a_shared_replica(rank: int) -> dict[str, object]:
    """The first step moves each by its rank, and every step clamps without changing anything."""
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with gossamer.join(model, optimizer) as worker:
        for step in range(60):
            optimizer.zero_grad()
            (-float(rank if step == 0 else 0) * model.weight.sum()).backward()
            with torch.no_grad():
                model.weight.clamp_(-10.0, 10.0)
            worker.step()
    return {"mean": float(model.weight.detach().mean()), "digest": digest(model)}


def case_of_loading_inside(rank: int) -> dict[str, object]:
    """Another model's parameters in the middle of the loop."""
    model, other = net(0), net(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        train(worker, 2)
        optimizer.param_groups[0]["lr"] = 0.0
        model.load_state_dict(other.state_dict())
        train(worker, 1, 2)
        own = worker.coupling.replica.snapshot()
    wanted = torch.cat([parameter.detach().reshape(-1) for parameter in other.parameters()])
    torch.testing.assert_close(own, wanted)
    return {"digest": digest(model)}


def case_of_changes_that_servers_undo(rank: int) -> dict[str, object]:
    """Clamping is refused; a norm that every forward pass restores is not."""
    model = nn.Sequential(nn.Embedding(12, 3, max_norm=0.5), nn.Flatten(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []

    def step() -> None:
        optimizer.zero_grad()
        model(torch.arange(12).view(3, 4)).square().mean().backward()
        worker.step()

    with gossamer.join(model, optimizer) as worker:
        for _ in range(4):
            step()
        with torch.no_grad():
            model[2].weight.clamp_(-0.01, 0.01)
        said.append(refusal(step))
        worker.coupling._watch.given(None)  # forgiven
        for _ in model.parameters():
            model[2].weight.data.add_(0.01)
            if answer := refusal(step):
                break
        said.append(answer)
    return {"said": said}
