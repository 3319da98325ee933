"""With one worker there is nobody to talk to: a method is then plain PyTorch training, bit for bit,
or the p = 1 form of its paper, which is written out here in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gossamer.contract import laws
from gossamer.methods import METHODS, parse_method
from gossamer.runs.result import Result
from gossamer.sim.simulation import Simulation
from gossamer.tasks import make_sampler
from support import build, cluster_of, digits

SEED = 11
BATCH = 16
STEPS = 25
RATE = 0.05
MOMENTUM = 0.9
DECAY = 1e-3
HEAVY_BALL = f"sgd:momentum={MOMENTUM},weight_decay={DECAY}"


def run_alone(method: str, schedule: str = "constant") -> tuple[Simulation, Result]:
    simulation = build(
        digits(), method, cluster_of(1), steps=STEPS, batch=BATCH, seed=SEED, engine="loop",
        learning_rate=RATE, optimiser=HEAVY_BALL, schedule=schedule, evaluations=1,
    )  # fmt: skip
    return simulation, simulation.run()


class Plain:
    """An ordinary training loop over the same batches from the same start."""

    def __init__(self, momentum: float = MOMENTUM, decay: float = DECAY) -> None:
        self.task = digits()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.model: nn.Module = self.task.make_model()
        self.optimiser = torch.optim.SGD(
            self.model.parameters(), lr=RATE, momentum=momentum, weight_decay=decay
        )

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        sampler = make_sampler(self.task.train.targets, 1, BATCH, "shuffled", SEED, True)
        for step in range(STEPS):
            yield step, torch.from_numpy(sampler.next(0))

    @property
    def flat(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    @flat.setter
    def flat(self, value: Tensor) -> None:
        nn.utils.vector_to_parameters(value.clone(), self.model.parameters())

    def gradient(self, batch: Tensor) -> None:
        """Leave the batch's gradient with the parameters."""
        self.optimiser.zero_grad()
        train = self.task.train
        loss = self.task.loss(self.model(train.inputs[batch]), train.targets[batch])
        loss.backward()

    def step(self, batch: Tensor) -> None:
        self.gradient(batch)
        self.optimiser.step()

    def flat_gradient(self, at: Tensor, batch: Tensor) -> Tensor:
        """The gradient at another point than the model's own."""
        own, self.flat = self.flat, at
        self.gradient(batch)
        flat = torch.cat(
            [p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]
        )
        self.flat = own
        return flat

    def descend(self, gradient: Tensor) -> None:
        """One step of the optimiser along a gradient that was taken elsewhere."""
        parts = gradient.split([p.numel() for p in self.model.parameters()])
        for parameter, part in zip(self.model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimiser.step()


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.promises.is_plain_alone])
def test_alone_it_is_plain_training_bit_for_bit(name: str) -> None:
    """Same seed, same batches, same bits as torch.optim.SGD with momentum and weight decay."""
    laws.is_plain_alone(parse_method(name))


@pytest.mark.parametrize("schedule", ["cosine", "step:at=0.1/0.2", "linear:warmup=0.1"])
@pytest.mark.parametrize("name", ["all_reduce", "pull_gossip"])
def test_alone_it_follows_the_schedule_bit_for_bit(name: str, schedule: str) -> None:
    """The rate of a step is the base rate times the schedule's factor at the epoch it begins."""
    simulation, result = run_alone(name, schedule=schedule)
    plain = Plain()
    rates = set[float]()
    for step, batch in plain.batches():
        epoch = step * BATCH / len(plain.task.train)
        rate = RATE * simulation.world.schedule.factor(epoch)
        plain.optimiser.param_groups[0]["lr"] = rate
        plain.step(batch)
        rates.add(rate)
    assert len(rates) > 2
    assert torch.equal(result.parameters, plain.flat)


@dataclass(frozen=True)
class Alone:
    """A method's p = 1 form: options to run it with, and the output model in plain PyTorch."""

    options: str
    output: Callable[[], Tensor]


def easgd() -> Tensor:
    """The penalty's gradient is taken where that of the loss is, before the pull."""
    plain = Plain(decay=0.0)
    centre = plain.flat
    for step, batch in plain.batches():
        point = plain.flat
        if step % 3 == 0:
            pull = 0.4 * (point - centre)
            plain.flat = point - pull
            centre = centre + pull
        plain.descend(plain.flat_gradient(point, batch) + DECAY * point)
    return centre


def eamsgd() -> Tensor:
    plain = Plain()
    x = centre = plain.flat
    velocity = torch.zeros_like(x)
    for step, batch in plain.batches():
        point = x
        if step % 3 == 0:
            pull = 0.4 * (x - centre)
            x, centre = x - pull, centre + pull
        ahead = point + 0.8 * velocity
        gradient = plain.flat_gradient(ahead, batch) + DECAY * ahead
        velocity = 0.8 * velocity - RATE * gradient
        x = x + velocity
    return centre


def serial() -> Tensor:
    """Such a server has the run's own optimiser, but for the momentum."""
    plain = Plain(momentum=0.0)
    for _, batch in plain.batches():
        plain.step(batch)
    return plain.flat


def heavy_ball() -> Tensor:
    """A server that waits has the run's own optimiser."""
    plain = Plain()
    for _, batch in plain.batches():
        plain.step(batch)
    return plain.flat


def moving_average() -> Tensor:
    plain = Plain()
    average = plain.flat
    for _, batch in plain.batches():
        plain.step(batch)
        average = 0.9 * average + 0.1 * plain.flat
    return average


def compensated() -> Tensor:
    """Nothing has moved since the gradient's point, so that there is nothing to compensate."""
    plain = Plain(momentum=0.0)
    backup = plain.flat
    mean_square = torch.zeros_like(backup)
    for _, batch in plain.batches():
        gradient = plain.flat_gradient(backup, batch)
        mean_square = 0.8 * mean_square + 0.2 * gradient.square()
        strength = 2.0 / (mean_square + 1e-7).sqrt()
        plain.descend(gradient + strength * gradient.square() * (plain.flat - backup))
        backup = plain.flat
    return plain.flat


def adam() -> Tensor:
    """Nobody is there to be sent anything in fewer bits before the end of the warm-up."""
    plain = Plain()
    plain.optimiser = torch.optim.Adam(plain.model.parameters(), lr=RATE, weight_decay=DECAY)
    for _, batch in plain.batches():
        plain.step(batch)
    return plain.flat


def quasi_global() -> Tensor:
    """The momentum is that of the models, which nobody else changes."""
    plain = Plain()
    x = plain.flat
    velocity = torch.zeros_like(x)
    for _, batch in plain.batches():
        direction = plain.flat_gradient(x, batch) + DECAY * x + 0.8 * velocity
        x = x - RATE * direction
        velocity = 0.7 * velocity + 0.3 * direction
    return x


def bmuf() -> Tensor:
    """The published recursion, with its own names: x is the global model, start looks ahead."""
    plain = Plain()
    x = start = plain.flat
    delta = torch.zeros_like(x)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3:
            delta = 0.6 * delta + 0.9 * (plain.flat - start)
            x = x + delta
            start = x + 0.6 * delta
            plain.flat = start
            plain.optimiser.state.clear()
    return plain.flat


def slowmo() -> Tensor:
    plain = Plain()
    start = plain.flat
    slow = torch.zeros_like(start)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3:
            slow = 0.5 * slow + (start - plain.flat) / RATE
            start = start - 0.8 * RATE * slow
            plain.flat = start
    return plain.flat


def diloco() -> Tensor:
    """The outer step by torch's own Nesterov SGD."""
    plain = Plain()
    outer = nn.Parameter(plain.flat)
    optimiser = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3:
            outer.grad = outer.detach() - plain.flat
            optimiser.step()
            plain.flat = outer.detach()
    return plain.flat


def async_diloco() -> Tensor:
    """Each displacement is applied when it arrives: with one worker DiLoCo's step, also for the
    steps after the last period."""
    plain = Plain()
    outer = nn.Parameter(plain.flat)
    optimiser = torch.optim.SGD([outer], lr=0.6, momentum=0.8, nesterov=True)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3 or step == STEPS - 1:
            outer.grad = outer.detach() - plain.flat
            optimiser.step()
            plain.flat = outer.detach()
    return outer.detach()


def decoupled_diloco() -> Tensor:
    """The merged model arrives during the next step, and the learner takes it after that step."""
    plain = Plain()
    outer = nn.Parameter(plain.flat)
    optimiser = torch.optim.SGD([outer], lr=0.6, momentum=0.8, nesterov=True)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3:
            outer.grad = outer.detach() - plain.flat
            optimiser.step()
        elif step > 3 and step % 4 == 0:
            plain.flat = outer.detach()
    return outer.detach()


def noloco() -> Tensor:
    """Without a partner: v <- a v + b (x - phi), phi <- phi + v."""
    plain = Plain()
    phi = plain.flat
    velocity = torch.zeros_like(phi)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3:
            velocity = 0.5 * velocity + 0.7 * (plain.flat - phi)
            phi = phi + velocity
            plain.flat = phi
    return plain.flat


def sparse_loco() -> Tensor:
    """A tenth of the displacement is applied; the rest, a little less of it, is kept for later."""
    plain = Plain()
    start = plain.flat
    kept = torch.zeros_like(start)
    for step, batch in plain.batches():
        plain.step(batch)
        if step % 4 == 3:
            kept = 0.9 * kept + plain.flat - start
            largest = kept.abs().topk(round(0.1 * len(kept))).indices
            sent = torch.zeros_like(kept).index_copy(0, largest, kept[largest])
            kept = kept - sent
            start = start + 0.7 * sent
            plain.flat = start
    return plain.flat


FORMS = {
    "async_diloco": Alone("period=4,outer_rate=0.6,outer_momentum=0.8", async_diloco),
    "decoupled_diloco": Alone(
        "period=4,fragments=1,outer_rate=0.6,outer_momentum=0.8", decoupled_diloco
    ),
    "noloco": Alone("period=4,outer_rate=0.7,outer_momentum=0.5", noloco),
    "sparse_loco": Alone(
        "period=4,outer_rate=0.7+topk:share=0.1,scope=global,decay=0.9", sparse_loco
    ),
    "one_bit_adam": Alone("warmup=1", adam),
    "qg_dsgdm": Alone("beta=0.8,mu=0.7", quasi_global),
    "easgd": Alone("alpha=0.4,period=3", easgd),
    "eamsgd": Alone("alpha=0.4,period=3,delta=0.8", eamsgd),
    "sync_server": Alone("servers=2", heavy_ball),
    "backup_workers": Alone("decay=0.9", moving_average),
    "ssp": Alone("bound=3", serial),
    "bounded_delay": Alone("bound=3", serial),
    "softsync": Alone("n=1", heavy_ball),
    "staleness_aware": Alone("damping=exponential", serial),
    "dc_asgd": Alone("compensation=2,adaptive=true,mean_square=0.8", compensated),
    "hogwild": Alone("pieces=3,keep_momentum=true", heavy_ball),
    "downpour": Alone("n_push=1", serial),
    "bmuf": Alone("period=4,block_momentum=0.6,zeta=0.9", bmuf),
    "slowmo": Alone("period=4,alpha=0.8,beta=0.5", slowmo),
    "diloco": Alone("period=4,outer_rate=0.7,outer_momentum=0.9", diloco),
}


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if not m.promises.is_plain_alone])
def test_alone_it_is_the_form_of_its_paper(name: str) -> None:
    """The output model equals the paper's recursion for one worker, to rounding."""
    form = FORMS[name]
    ours = run_alone(f"{name}:{form.options}")[1].parameters
    theirs = form.output()
    assert (theirs - Plain().flat).norm() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimiser", ["sgd:momentum=0.9", "adam"])
def test_downpour_alone_runs_the_servers_optimiser(optimiser: str) -> None:
    """Serial training by whatever optimiser the server is given."""
    plain = Plain(decay=0.0)
    if optimiser == "adam":
        plain.optimiser = torch.optim.Adam(plain.model.parameters(), lr=RATE)
    for _, batch in plain.batches():
        plain.step(batch)
    ours = run_alone(f"downpour:server_optimiser={optimiser}")[1].parameters
    torch.testing.assert_close(ours, plain.flat, rtol=1e-4, atol=1e-6)
