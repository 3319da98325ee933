"""Loops with several optimisers and several models; for `test_several_optimizers`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gossamer
from gossamer.errors import ConfigurationError
from join_cases import assert_close, batch, digest, loss_of, net, plain

ROUNDS = 3
Optimizers = list[torch.optim.Optimizer]


def pair_of(model: nn.Module) -> Optimizers:
    """Muon for the matrices and AdamW for the rest, as language models are trained."""
    parameters = list(model.parameters())
    return [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02),
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.05),
    ]


class Both:
    """A plain loop's stand-in for two optimisers."""

    def __init__(self, parts: Optimizers) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def case_of_muon_and_adamw(rank: int) -> dict[str, object]:
    """Two optimisers over one model are what they are in one process on all batches."""
    model = net(rank)
    own = pair_of(model)
    with gossamer.join(model, own) as worker:
        for step in range(4):
            worker.optimizer.zero_grad()
            loss_of(model, *batch(rank, step)).backward()
            worker.step()
        saved = [len(part.state_dict()["state"]) for part in own]
    if worker.method.name in ("all_reduce", "sync_server"):
        alone = net(0)
        plain(alone, Both(pair_of(alone)), worker.size)
        assert_close(model, alone, 1e-3)
    return {"digest": digest(model), "saved": saved}


UNSCALED: dict[str, Callable[[gossamer.JoinedWorker, Optimizers], Optimizers]] = {
    "nothing": lambda worker, own: [],
    "the user's own": lambda worker, own: own,
    "one of the user's own": lambda worker, own: own[:1],
    "what stands for all": lambda worker, own: [worker.optimizer],
    "what stands for each": lambda worker, own: list(worker.optimizers),
}
"""By which optimisers a loop unscales, to clip."""


def halves_of(model: nn.Module) -> Optimizers:
    """Descent by SGD, to which it matters how long a gradient is."""
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[at::2], lr=0.1, momentum=0.5) for at in (0, 1)]


def step_by_scaler(
    worker: gossamer.JoinedWorker, model: nn.Module, own: Optimizers, rank: int
) -> int:
    """As many steps as there are ways; how many."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ways = [(name, is_driven) for name in UNSCALED for is_driven in (False, True)]
    for step, (name, is_driven) in enumerate(ways):
        worker.optimizer.zero_grad()
        scaler.scale(loss_of(model, *batch(rank, step))).backward()
        for one in UNSCALED[name](worker, own):
            scaler.unscale_(one)
        if is_driven:
            scaler.step(worker.optimizer)
        else:
            worker.step(scaler)
        scaler.update()
    return len(ways)


def case_of_a_scaler(rank: int) -> dict[str, object]:
    """Gradients are unscaled once, whatever the loop has unscaled and by which name."""
    model = net(rank)
    own = halves_of(model)
    with gossamer.join(model, own) as worker:
        steps = step_by_scaler(worker, model, own, rank)
    alone = net(0)
    plain(alone, Both(halves_of(alone)), worker.size, steps=steps)
    assert_close(model, alone, 1e-4)
    return {"digest": digest(model)}


# ---------------------------------------------------------------------- a generator and its judge


def models(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    return generator, nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))


def optimizers_of(generator: nn.Module, judge: nn.Module) -> Optimizers:
    return [
        torch.optim.Adam(generator.parameters(), lr=0.05, weight_decay=0.01),
        torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    ]


def play(
    generator: nn.Module, judge: nn.Module, parts: Optimizers, steps: list[Callable[[], object]],
    data: Callable[[int], tuple[Tensor, Tensor]],
) -> None:  # fmt: skip
    """Two steps of the judge to one of the generator, whose loss leaves gradients on the judge."""
    for number in range(ROUNDS):
        noise, real = data(number)
        for _ in range(2):
            parts[1].zero_grad()
            (judge(generator(noise).detach()).mean() - judge(real).mean()).backward()
            steps[1]()
        parts[0].zero_grad()
        (-judge(generator(noise)).mean()).backward()
        steps[0]()


def case_of_two_models(rank: int) -> dict[str, object]:
    """Each step moves one model; synchronous workers equal one process on all batches."""
    both = models(rank)
    own = optimizers_of(*both)
    with gossamer.join(list(both), own) as worker:
        if worker.method.name == "downpour":
            steps: list[Callable[[], object]] = [one.step for one in worker.optimizers]
        else:
            steps = [lambda one=one: worker.step(optimizer=one) for one in own]
        play(*both, own, steps, lambda number: batch(rank, number))
        with worker.consensus() as output:
            assert list(output) == list(both)
        made = worker.coupling.session.metrics.steps
    if worker.method.name in ("all_reduce", "sync_server"):
        alone = models(0)
        parts = optimizers_of(*alone)

        def everybody(number: int) -> tuple[Tensor, Tensor]:
            found = [batch(other, number) for other in range(worker.size)]
            noise, real = (torch.cat(one) for one in zip(*found, strict=True))
            return noise, real

        play(*alone, parts, [part.step for part in parts], everybody)
        for mine, other in zip(both, alone, strict=True):
            assert_close(mine, other, 1e-4)
    return {"digest": digest(nn.ModuleList(both)), "made": made}


def case_of_methods_that_move_all(rank: int) -> dict[str, object]:
    """Momentum of a method's own would move the other model, too."""
    both = models(rank)
    own = [torch.optim.SGD(model.parameters(), lr=0.1) for model in both]
    said = ""
    with gossamer.join(list(both), own) as worker:
        try:
            worker.step(optimizer=own[0])
        except ConfigurationError as error:
            said = str(error)
        both[1](both[0](batch(rank, 0)[0])).mean().backward()
        worker.step()
    return {"said": said}
