"""Every method descends with the optimiser that was asked for, in virtual time, on real workers and
in a user's own loop. On a quadratic whose gradient no batch changes, one worker of any method, or
several of one that waits for everybody, must go the way of torch.optim."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from gossamer.optim.optimisers import make_optimiser
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.joined_worker import JoinedWorker, coupled
from gossamer.real.join.replica import LoopReplica
from gossamer.real.replicas import Place, WindowReplica
from gossamer.real.train.progress import TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.training import Training
from gossamer.real.transports.local import LocalTransport
from gossamer.replica import Replica, trainable
from gossamer.sim.replica_matrix import ReplicaStore, SimulatedReplica
from gossamer.tasks import Data, Task
from gossamer.tasks.flat_model import FlatModel
from support import Ones, bowl, build, centre, cluster_of, pieces, rows, scatter, unequal
from tiers import only

RATE, STEPS, SEED, PERIOD = 0.05, 12, 3, 5
Make = Callable[..., torch.optim.Optimizer]
OPTIMISERS: dict[str, Make] = {
    "sgd": torch.optim.SGD,
    "sgd:momentum=0.9,weight_decay=0.1": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "adam:weight_decay=0.1": partial(torch.optim.Adam, weight_decay=0.1),
    "adamw:weight_decay=0.1": partial(torch.optim.AdamW, weight_decay=0.1),
    "adagrad": torch.optim.Adagrad,
}
MOMENTUM = "sgd:momentum=0.9,weight_decay=0.1"
DECAY_ALONE = partial(torch.optim.SGD, weight_decay=0.1)
# What takes nothing but the optimiser's own steps.
ALONE = {
    "easgd": "alpha=0", "eamsgd": "alpha=0,delta=0", "backup_workers": "backups=0,decay=0",
    "local_sgd": f"period={PERIOD}", "bmuf": f"period={PERIOD},block_momentum=0,state=local",
    "slowmo": f"period={PERIOD},beta=0", "diloco": f"period={PERIOD},outer_rate=1,outer_momentum=0",
    "qg_dsgdm": "beta=0", "sparse_loco": f"period={PERIOD}+topk:share=1",
    "async_diloco": f"period={PERIOD},outer_rate=1,outer_momentum=0",
    "decoupled_diloco": f"period={STEPS + 1},fragments=1,outer_rate=1,outer_momentum=0",
}  # fmt: skip
# One-bit Adam descends by its own rule, whatever it is given: tests/sim/test_one_worker.py.
DESCENDING = [name for name in METHODS if name != "one_bit_adam"]
KEPT = [f"{name}:keep_momentum=true" for name, row in METHODS.items() if row.leaves_out_momentum]
SPECS = [f"{name}:{ALONE[name]}" if name in ALONE else name for name in DESCENDING] + KEPT
RESET = [f"{name}:{ALONE[name]},state=reset" for name in ("local_sgd", "slowmo")]
RESET.append(f"bmuf:period={PERIOD},block_momentum=0")
IN_STEP = [
    "all_reduce", "all_reduce:overlap=false", "d_psgd", "d_psgd:adapt=before", "push_sum",
    "sync_server:servers=2", "backup_workers:backups=0,decay=0", "ssp:bound=0,divide=true",
    "bounded_delay:bound=0,divide=true", "easgd:alpha=0,synchronous=true",
    f"local_sgd:period={PERIOD}", f"local_sgd:period={PERIOD},state=averaged", *RESET,
]  # fmt: skip


@cache
def still() -> Task:
    """All samples are one point, so that the gradient is the same whatever the batch."""
    task = pieces(3, 4)
    train = Data(task.train.inputs[:1].repeat(64, 1), task.train.targets[:64])
    return dataclasses.replace(task, train=train, test=train)


def gradients(model: nn.Module) -> Iterator[None]:
    """An ordinary loop, up to each step."""
    task = still()
    for _ in range(STEPS):
        model.zero_grad()
        task.loss(model(task.train.inputs[:4]), task.train.targets[:4]).backward()
        yield


def by_torch(make: Make, *, is_reset: bool = False) -> Tensor:
    model = FlatModel(still(), torch.device("cpu"), seed=SEED).module
    optimiser = make(model.parameters(), lr=RATE)
    for step, _ in enumerate(gradients(model)):
        optimiser.step()
        if is_reset and (step + 1) % PERIOD == 0:
            optimiser.state.clear()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def has_moved_server(spec: str) -> bool:
    """Whether it is a server that descends, or what a worker would have it add."""
    method = parse_method(spec).method
    return method.server is not None or method.name == "hogwild"


def in_virtual_time(spec: str, optimiser: str, folder: Path, workers: int = 1) -> Tensor:
    simulation = build(
        still(), spec, cluster_of(workers), steps=STEPS, seed=SEED, engine="loop",
        learning_rate=RATE, optimiser=optimiser, evaluations=1,
    )  # fmt: skip
    simulation.run()
    return (centre(simulation) if has_moved_server(spec) else rows(simulation)[-1]).float()


def on_a_real_worker(spec: str, optimiser: str, folder: Path) -> Tensor:
    epochs = STEPS * 4 / len(still().train)
    settings = make_settings(
        still(), spec, Cluster(workers=1), seed=SEED, batch=4, epochs=epochs, learning_rate=RATE,
        optimiser=optimiser, evaluations=1,
    )  # fmt: skip
    training = Training(TrainRequest(settings, folder), LocalTransport())
    training.open()
    training.start()
    training.session.driver.drive(training.main, "main", training.end)
    if has_moved_server(spec):
        return torch.cat([server.snapshot() for server in training.session.servers.values()])
    return training.replica.snapshot()


def loop_of(spec: str, make: Make) -> JoinedWorker:
    """A loop that is coupled, be it with itself alone."""
    model = FlatModel(still(), torch.device("cpu"), seed=SEED).module
    optimizer = make(model.parameters(), lr=RATE)
    return coupled(
        LocalTransport(), model, optimizer, parse_method(spec), seed=SEED, steps=STEPS
    )  # fmt: skip


def in_a_loop(spec: str, optimiser: str, folder: Path) -> Tensor:
    worker = loop_of(spec, OPTIMISERS[optimiser])
    (group,) = worker.optimizer.param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    with worker:
        for _ in gradients(worker.model):
            worker.step()
    assert options.items() <= group.items()  # what is left out is left out for the step alone
    coupling: Any = worker.coupling
    if has_moved_server(spec):
        return torch.cat([server.snapshot() for server in coupling.session.servers.values()])
    return coupling.replica.snapshot()


WORLDS = [in_virtual_time, on_a_real_worker, in_a_loop]
each_world = pytest.mark.parametrize(
    "world", only(WORLDS[:1], WORLDS), ids=lambda world: world.__name__
)
each_optimiser = pytest.mark.parametrize("optimiser", OPTIMISERS)


@each_world
@each_optimiser
@pytest.mark.parametrize("spec", SPECS)
def test_a_method_goes_the_way_of_torchs_optimiser(
    spec: str, optimiser: str, world: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Moments, weight decay and all; where nobody waits for anybody, SGD's momentum alone is left
    out, unless it was put back. What has a momentum of its own refuses all but SGD."""
    row = parse_method(spec).method
    if row.own_momentum and not optimiser.startswith("sgd"):
        with pytest.raises(ConfigurationError, match="momentum of its own"):
            world(spec, optimiser, tmp_path)
        return
    is_left_out = row.own_momentum or (row.leaves_out_momentum and spec not in KEPT)
    make = DECAY_ALONE if is_left_out and optimiser == MOMENTUM else OPTIMISERS[optimiser]
    found = world(spec, optimiser, tmp_path)
    torch.testing.assert_close(found, by_torch(make), rtol=1e-4, atol=1e-5)


@each_world
@pytest.mark.parametrize("method", ["ssp", "downpour", "sync_server"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_optimiser_that_is_named_for_the_server_is_the_one_that_descends(
    method: str, optimiser: str, world: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Whatever the workers were given: what `ssp` adds between two reads obeys it as well."""
    found = world(f"{method}:server_optimiser=({optimiser})", "sgd", tmp_path)
    torch.testing.assert_close(found, by_torch(OPTIMISERS[optimiser]), rtol=1e-4, atol=1e-5)


@each_world
@each_optimiser
@pytest.mark.parametrize("spec", RESET)
def test_an_optimiser_that_is_reset_begins_anew(
    spec: str, optimiser: str, world: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Moments are zero and their bias is that of a first step, as after `optimizer.state.clear()`:
    Adam's next step is as long as the rate."""
    found = world(spec, optimiser, tmp_path)
    expected = by_torch(OPTIMISERS[optimiser], is_reset=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each_optimiser
@pytest.mark.parametrize("spec", IN_STEP)
def test_workers_in_step_go_the_way_of_torchs_optimiser(
    spec: str, optimiser: str, tmp_path: Path
) -> None:
    """Three workers with one gradient are one worker; a server that waits for all of them has the
    whole optimiser, momentum included."""
    expected = by_torch(OPTIMISERS[optimiser], is_reset=spec in RESET)
    found = in_virtual_time(spec, optimiser, tmp_path, workers=3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimiser", ["adam:epsilon=0.0", "adagrad:epsilon=0.0"])
@pytest.mark.parametrize("method", ["ssp", "ssp:divide=true", "downpour:n_fetch=3", "hogwild"])
def test_what_a_worker_adds_between_two_reads_obeys_the_optimisers_rule(
    method: str, optimiser: str
) -> None:
    """Adam and Adagrad do not care how large a loss is. Nor does a worker that has them: were its
    own writes a gradient times the rate, a loss that is summed instead of averaged would throw it
    far from where the server is."""

    def end(factor: float) -> Tensor:
        task = bowl()
        scaled = dataclasses.replace(task, loss=lambda *given: factor * task.loss(*given))
        simulation = build(
            scaled, method, unequal(4, 3), steps=12, engine="loop", optimiser=optimiser,
            learning_rate=0.05, evaluations=1,
        )  # fmt: skip
        simulation.run()
        return centre(simulation)

    torch.testing.assert_close(end(1000.0), end(1.0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["ssp", "bounded_delay"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam:epsilon=0.0"])
def test_an_update_that_counts_its_share_is_so_much_shorter(method: str, optimiser: str) -> None:
    """Along gradients of one, SGD and Adam alike make steps as long as the rate; with `divide` each
    is 1/p of that, on the server and in a worker's own copy."""
    for divide, share in (("true", 0.25), ("false", 1.0)):
        simulation = build(
            bowl(), f"{method}:bound=2,divide={divide}", cluster_of(4), steps=6, own_engine=Ones(),
            engine="none", optimiser=optimiser, learning_rate=RATE,
        )  # fmt: skip
        start = centre(simulation)
        steps = simulation.run().steps
        expected = start - RATE * share * steps
        torch.testing.assert_close(centre(simulation), expected, rtol=1e-4, atol=1e-5)
        if method == "ssp":
            copies = (start - rows(simulation)) / (RATE * share)
            torch.testing.assert_close(copies, copies.round(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("optimiser", ["sgd", "adam:epsilon=0.0"])
@pytest.mark.parametrize(
    ("method", "shares"),
    [
        ("downpour:n_fetch=4", 0.25), ("downpour:n_fetch=4,divide=false", 1.0),
        ("softsync:n=4", 0.25), ("softsync:n=4,divide=false", 1.0),
        ("staleness_aware:cap=0", 1.0), ("staleness_aware:damping=polynomial,strength=0", 1.0),
    ],
)  # fmt: skip
def test_what_divides_an_update_shortens_it(method: str, shares: float, optimiser: str) -> None:
    """For Adam as for SGD: along gradients of one each update goes the rate times the share."""
    simulation = build(
        bowl(), method, cluster_of(4), steps=8, own_engine=Ones(), engine="none",
        optimiser=optimiser, learning_rate=RATE,
    )  # fmt: skip
    start = centre(simulation)
    simulation.run()
    moved = RATE * shares * simulation.world.replicas[-1].version
    torch.testing.assert_close(centre(simulation), start - moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimiser", ["sgd", "adam:epsilon=0.0"])
def test_a_damped_gradient_makes_a_shorter_step(optimiser: str) -> None:
    """Of four workers in turn each gradient misses three updates: a third of the rate."""
    simulation = build(
        bowl(), "staleness_aware", cluster_of(4, jitter=0.01), steps=20, own_engine=Ones(),
        engine="none", optimiser=optimiser, learning_rate=RATE,
    )  # fmt: skip
    start = centre(simulation)
    missed = simulation.run().staleness.items()
    moved = RATE * sum(count / max(1, staleness) for staleness, count in missed)
    torch.testing.assert_close(centre(simulation), start - moved, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- where the decay is taken


def stored(optimiser: str, start: Tensor) -> Replica:
    store = ReplicaStore(2, start, make_optimiser(optimiser))
    return SimulatedReplica(store, 1, lambda pace: RATE, lambda replica, read: None)


def in_a_window(optimiser: str, start: Tensor) -> Replica:
    return WindowReplica(Place(start.clone()), make_optimiser(optimiser), lambda pace: RATE)


def of_a_loop(optimiser: str, start: Tensor) -> Replica:
    model = nn.ParameterList([start[:3].clone(), start[3:].clone()])
    binding = ModuleBinding(trainable(model))
    window = start.clone()
    binding.attach(window, is_private=False)
    return cast(
        Replica,
        LoopReplica(binding, Place(window), OPTIMISERS[optimiser](model.parameters(), lr=RATE)),
    )


@each_optimiser
@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("make", [stored, in_a_window, of_a_loop])
def test_weight_decay_is_taken_where_the_gradient_was(
    make: Callable[[str, Tensor], Replica], share: float, optimiser: str
) -> None:
    """Along a gradient of another point a replica moves as torch's optimiser moves that point, at
    that share of the rate."""
    draws = torch.Generator().manual_seed(0)
    start, *rest = torch.randn(7, 7, generator=draws)
    replica, there = make(optimiser, start), nn.Parameter(torch.zeros(7))
    theirs = OPTIMISERS[optimiser]([there], lr=RATE * share)
    expected = start.clone()
    for point, gradient in zip(rest[::2], rest[1::2], strict=True):
        there.data, there.grad = point.clone(), gradient
        theirs.step()
        expected += there.detach() - point
        replica.descend_(gradient, at=point, share=share)
        torch.testing.assert_close(replica.snapshot(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "weight"), [("d_psgd", 1.0), ("d_psgd:overlap=false", 1.0), ("push_sum", 0.5)]
)
@pytest.mark.parametrize("optimiser", ["sgd:weight_decay=0.1", "adamw:weight_decay=0.1"])
def test_a_workers_penalty_is_that_of_the_point_of_its_gradient(
    spec: str, weight: float, optimiser: str
) -> None:
    """D-PSGD's is the un-mixed x_i, push-sum's the unbiased z_i = x_i / w_i, so that one step takes
    rate times (one + decay times that point) from each: for a gradient of ones, Adam's as well."""
    simulation = build(
        bowl(), spec, cluster_of(3), steps=1, own_engine=Ones(), engine="none",
        optimiser=optimiser, learning_rate=RATE,
    )  # fmt: skip
    scatter(simulation)
    for replica in simulation.world.replicas:
        replica.weight = weight
    before = rows(simulation).clone()
    mixed = before if spec == "push_sum" else before.mean(0).expand_as(before)
    simulation.run()
    expected = mixed - RATE * (1 + 0.1 * before / weight)
    if spec == "push_sum":
        expected, found = expected.sum(0), rows(simulation).sum(0)
    else:
        found = rows(simulation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- what the user is told


@pytest.mark.parametrize("name", METHODS)
def test_who_loses_momentum_is_told(name: str) -> None:
    """Nobody else is, nor who has no momentum, put it back, or chose the server's optimiser."""
    row = METHODS[name]
    momentum = OPTIMISERS[MOMENTUM]

    def told(spec: str, optimiser: str = MOMENTUM, make: Make = momentum) -> list[str]:
        joined = list(loop_of(spec, make).notices)
        run = build(still(), spec, cluster_of(2), steps=1, optimiser=optimiser, engine="none").run()
        assert run.notices == joined
        assert TrainingProgress(Path(), []).result(run.settings, 0).summary["notices"] == joined
        return joined

    said = told(name)
    assert len(said) == (row.leaves_out_momentum or bool(row.own_momentum))
    assert all("momentum of 0.9 is left out" in sentence for sentence in said)
    assert told(name, "sgd", torch.optim.SGD) == []
    if row.leaves_out_momentum:
        assert "keep_momentum=true" in said[0]
        assert told(f"{name}:keep_momentum=true") == []
        assert told(f"{name}:lower_momentum=true") == []
    if row.server is not None:
        assert told(f"{name}:server_optimiser=sgd:momentum=0.9") == []
    if name in ("ssp", "bounded_delay"):
        assert told(f"{name}:bound=0") == []


def test_worker_0_says_it_when_its_loop_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, once."""
    with loop_of("downpour", OPTIMISERS[MOMENTUM]) as worker:
        assert worker.notices
    said = capsys.readouterr().err.splitlines()
    assert said == [f"gossamer: {worker.notices[0]}"]


def test_the_choice_prints_and_parses_back() -> None:
    """And is refused where there is nothing to choose."""
    assert str(parse_method("downpour:keep_momentum")) == "downpour:keep_momentum=true"
    assert str(parse_method("hogwild:keep_momentum=true")) == "hogwild:keep_momentum=true"
    for spec in ("easgd:keep_momentum", "eamsgd:lower_momentum", "hogwild:server_optimiser=adam"):
        with pytest.raises(ConfigurationError, match="no optimiser on its server"):
            parse_method(spec)
    with pytest.raises(ConfigurationError, match="has no server"):
        parse_method("all_reduce:keep_momentum")
