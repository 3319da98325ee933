"""The laboratory: a grid trained at once is many trainings, and theory meets measurement."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import DelayedOptimizer, make_task
from gossamer.commands.studies.batch import interruptible
from gossamer.config.cluster import DISTRIBUTIONS, Compute
from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.studies.lab.grid import Grid, GridPoint, named_optimisers, steps_of
from gossamer.studies.lab.results import GridResults
from gossamer.studies.lab.staleness import Histogram, monte_carlo, simulated
from gossamer.studies.lab.sweep import Sweep
from gossamer.studies.lab.theory import (
    edge_of,
    largest_curvature,
    numerical_edge,
    stability_edge,
)
from gossamer.studies.lab.training import GroupTraining, Models, RingBuffer
from gossamer.tasks import Order
from gossamer.tasks.flat_model import FlatModel
from support import bowl, digits
from tiers import every, only

# ---------------------------------------------------------------------- theory


@given(delay=st.integers(0, 300))
def test_the_numerical_edge_is_the_closed_form_without_momentum(delay: int) -> None:
    """2 sin(pi / (2 (2d + 1)))."""
    closed = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert stability_edge(delay) == pytest.approx(closed, rel=1e-12)
    assert numerical_edge(delay, 0.0) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize(
    ("delay", "edge"), [(0, 3.8), (1, 0.100), (2, 0.051), (4, 0.0265), (8, 0.0139)]
)
def test_momentum_and_delay_multiply(delay: int, edge: float) -> None:
    """With momentum 0.9 one step of delay costs a factor of 38."""
    assert stability_edge(delay, 0.9) == pytest.approx(edge, rel=6e-3)


def characteristic_roots(product: float, delay: int, momentum: float) -> Any:
    """The roots of the recurrence at eta h = `product`; stable where all are below 1 in modulus."""
    polynomial = np.zeros(delay + 3)
    polynomial[:3] = 1.0, -(1.0 + momentum), momentum
    # Multiplied by z, so that one form serves no delay too; the root at 0 that this adds is stable.
    polynomial[-2] += product
    return np.roots(polynomial).astype(np.complex128)


@given(delay=st.integers(0, 40), momentum=st.floats(0.0, 0.98))
def test_at_the_edge_a_root_of_the_recurrence_leaves_the_unit_circle(
    delay: int, momentum: float
) -> None:
    """Below it all roots lie inside, above it one lies outside; more delay allows less."""
    edge = numerical_edge(delay, momentum)
    assert abs(characteristic_roots(0.99 * edge, delay, momentum)).max() < 1.0
    assert abs(characteristic_roots(1.01 * edge, delay, momentum)).max() > 1.0
    assert numerical_edge(delay + 1, momentum) < edge


@pytest.mark.parametrize(("delay", "momentum"), every(3, [0, 1, 2, 4, 8], [0.0, 0.9]))
def test_the_edge_measured_on_a_quadratic_is_the_predicted_one(delay: int, momentum: float) -> None:
    """Two curvatures 1 % below and above it, trained with DelayedOptimizer: one shrinks, one
    grows."""
    curvatures = torch.tensor([0.99, 1.01], dtype=torch.float64)
    x = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    sgd = torch.optim.SGD([x], lr=stability_edge(delay, momentum), momentum=momentum)
    optimiser = DelayedOptimizer(sgd, delay)
    sizes: list[Tensor] = []
    for _ in range(2400):
        x.grad = curvatures * x.detach()
        optimiser.step()
        sizes.append(x.detach().abs())
    # Oscillations: compare the largest of late and of earlier steps.
    earlier, later = (torch.stack(sizes[at : at + 800]).amax(0) for at in (800, 1600))
    assert later[0] < earlier[0]
    assert later[1] > earlier[1]


def test_only_what_the_theory_covers_has_an_edge() -> None:
    assert edge_of(make_optimiser("sgd:momentum=0.9"), 1) == pytest.approx(0.1)
    for spec in ("adam", "sgd:momentum=0.9,nesterov=true", "sgd:momentum=0.9,dampening=0.5"):
        assert edge_of(make_optimiser(spec), 1) is None
    with pytest.raises(ConfigurationError, match="momentum must be at least 0 and below 1"):
        stability_edge(1, 1.0)
    with pytest.raises(ConfigurationError, match="delay must be at least 0"):
        stability_edge(-1)


def test_power_iteration_finds_the_largest_curvature() -> None:
    """1 for the quadratic; for logistic regression the one of the full Hessian."""
    device = torch.device("cpu")
    assert largest_curvature(FlatModel(bowl(), device, seed=0)) == pytest.approx(1.0, rel=0.01)
    model = FlatModel(make_task("digits-logistic"), device, seed=0)
    train = model.task.train

    def loss(flat: Tensor) -> Tensor:
        key = torch.zeros((), dtype=torch.int64)
        inputs, targets = train.inputs[:512], train.targets[:512]
        return model.flat_loss(flat, model.initial_buffers, inputs, targets, key)[0]

    hessian = torch.autograd.functional.hessian(loss, model.initial)
    exact = float(torch.linalg.eigvalsh(hessian)[-1])
    assert largest_curvature(model) == pytest.approx(exact, rel=0.01)


# ---------------------------------------------------------------------- a grid is many trainings

RATES = (0.003, 0.03)


def small_grid(**changes: Any) -> Grid:
    options: dict[str, Any] = {
        "optimisers": named_optimisers(("sgd", "adam")), "learning_rates": RATES,
        "batches": (16, 40), "delays": (0, 1, 3), "epochs": 0.4, "seeds": (0, 1),
    }  # fmt: skip
    return Grid(**{**options, **changes})


def make_torch(spec: str, parameters: Any, rate: float) -> torch.optim.Optimizer:
    if spec == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    assert spec == "sgd:momentum=0.9"
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def alone(point: GridPoint, grid: Grid) -> Tensor:
    """One point trained by itself: a module, torch.optim, DelayedOptimizer, the same batches."""
    task = digits()
    torch.manual_seed(point.seed)
    module = task.make_model()
    optimiser = DelayedOptimizer(
        make_torch(point.optimiser, module.parameters(), point.used_rate), point.delay
    )
    order = Order(len(task.train), point.seed, point.used_batch)
    schedule = grid.schedule()
    for step in range(steps_of(grid.epochs, len(task.train), point.used_batch)):
        epoch = step * point.used_batch / len(task.train)
        optimiser.param_groups[0]["lr"] = point.used_rate * schedule.factor(epoch)
        batch = torch.from_numpy(order.next_batch())
        optimiser.zero_grad()
        output = module(task.train.inputs[batch])
        torch.nn.functional.cross_entropy(output, task.train.targets[batch]).backward()
        optimiser.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def trained(grid: Grid) -> dict[GridPoint, Tensor]:
    """The final parameters of every point, trained together."""
    models = Models(digits(), torch.device("cpu"), grid.seeds)
    found: dict[GridPoint, Tensor] = {}
    for group in grid.groups():
        training = GroupTraining(models, group, grid)
        while not training.is_over:
            training.advance()
        found |= dict(zip(group.points, training.parameters, strict=True))
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"warmup": 0.2, "seeds": (5,)}, {"halve": True, "batches": (64,), "seeds": (0,)}],
    ids=["plain", "warm-up", "halved"],
)
def test_every_point_of_a_grid_is_what_it_would_be_alone(changes: dict[str, Any]) -> None:
    """To rounding: other rows, delays, rates and seeds in the same matrix change nothing."""
    grid = small_grid(**changes)
    found = trained(grid)
    assert len(found) == len(grid.points())
    for point, parameters in found.items():
        expected = alone(point, grid)
        # Relative to the whole: Adam turns the rounding of a gradient near zero into a step.
        assert float((parameters - expected).norm()) <= 1e-4 * float(expected.norm()), point
    distinct = {tuple(parameters[:5].tolist()) for parameters in found.values()}
    assert len(distinct) == len(found)


@given(delays=st.lists(st.integers(0, 5), min_size=1, max_size=5), steps=st.integers(1, 15))
@settings(max_examples=30)
def test_the_ring_buffer_gives_each_row_what_it_wrote_d_steps_ago(
    delays: list[int], steps: int
) -> None:
    """Whatever the mix of delays; zeros before anything is due."""
    ring = RingBuffer(delays, 1, torch.device("cpu"))
    for step in range(steps):
        fresh = torch.tensor([[1000.0 * row + step + 1] for row in range(len(delays))])
        due = ring.exchange(step, fresh)
        for row, delay in enumerate(delays):
            expected = 1000.0 * row + step - delay + 1 if step >= delay else 0.0
            assert float(due[row]) == expected


def test_halving_divides_rate_and_batch_by_the_number_of_workers() -> None:
    """A delay of d is that of d + 1 workers; the grid keeps the rates and batches asked for."""
    grid = small_grid(halve=True, batches=(64,), delays=(0, 1, 3, 100))
    used = {(p.delay, p.learning_rate): (p.used_rate, p.used_batch) for p in grid.points()}
    assert used[0, 0.03] == (0.03, 64)
    assert used[1, 0.03] == (0.015, 32)
    assert used[3, 0.03] == (0.0075, 16)
    assert used[100, 0.03] == (pytest.approx(0.03 / 101), 1)
    assert {point.batch for point in grid.points()} == {64}
    assert {group.batch for group in grid.groups()} == {64, 32, 16, 1}


def test_a_grid_survives_json() -> None:
    grid = small_grid(warmup=0.1, halve=True)
    assert Grid.from_dict(json.loads(json.dumps(grid.as_dict()))) == grid


# ---------------------------------------------------------------------- stop and go on


def after(checks: int) -> Callable[[], bool]:
    """Says stop at the n-th question."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > checks

    return should_stop


@cache
def whole() -> Sweep:
    sweep = Sweep(digits(), small_grid())
    assert sweep.run()
    return sweep


@pytest.mark.parametrize("checks", only([17], [0, 1, 17, 15 + 36 + 20]))
def test_a_stopped_sweep_goes_on_to_the_same_result(checks: int, tmp_path: Path) -> None:
    """Bit for bit, before the first step, inside a group and in another one; through the disk."""
    first = Sweep(digits(), small_grid(), folder=tmp_path)
    assert not first.run(after(checks))
    second = Sweep(digits(), small_grid())
    second.resume(tmp_path)
    assert second.scores() == first.scores()
    assert second.run()
    assert second.scores() == whole().scores()
    assert second.curvature == whole().curvature
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_a_sweep_goes_on_in_the_same_process_too(tmp_path: Path) -> None:
    sweep = Sweep(digits(), small_grid(), folder=tmp_path)
    assert not sweep.run(after(20))
    assert sweep.run()
    assert sweep.scores() == whole().scores()


def test_a_checkpoint_without_pickle_and_never_half_written(tmp_path: Path) -> None:
    """What a crash leaves behind is ignored, damage is a sentence."""
    sweep = Sweep(digits(), small_grid(), folder=tmp_path)
    sweep.run(after(5))
    (state,) = tmp_path.glob("group-*.npz")
    with np.load(state, allow_pickle=False) as arrays:
        assert {"step", "history", "parameters", "ring"} <= set(arrays)
    (tmp_path / ".group-1.npz").write_bytes(b"half")
    Sweep(digits(), small_grid()).resume(tmp_path)
    state.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ConfigurationError, match="its checkpoint is damaged"):
        Sweep(digits(), small_grid()).resume(tmp_path)
    (tmp_path / "progress.json").unlink()
    with pytest.raises(ConfigurationError, match=r"it has no progress\.json"):
        Sweep(digits(), small_grid()).resume(tmp_path)


def test_the_first_interrupt_asks_and_the_second_ends() -> None:
    """So that no step is cut in half; afterwards Ctrl-C is what it was before."""
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as is_interrupted:
        assert not is_interrupted()
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------------- what is found


def test_a_delay_moves_the_cliff_as_predicted() -> None:
    """The quadratic with momentum: rates under the edge train, rates over it do not."""
    grid = Grid(
        named_optimisers(("sgd",)), tuple(10.0 ** (k / 4) for k in range(-8, 3)), (64,),
        (0, 1, 2, 4, 8), epochs=40.0,
    )  # fmt: skip
    sweep = Sweep(bowl(), grid)
    sweep.run()
    results = sweep.results()
    assert results.yardstick.key == "loss"
    largest = [best.largest_rate for best in results.best()]
    for best in results.best():
        assert best.largest_rate is not None
        assert best.predicted_edge is not None
        # The largest rate that trains is the last one of the grid under the edge.
        under = [rate for rate in grid.learning_rates if rate < best.predicted_edge]
        assert best.largest_rate == pytest.approx(max(under))
    assert largest == sorted(largest, reverse=True)
    assert len(set(largest)) >= 4


def test_chance_level_and_not_a_number_count_as_failed() -> None:
    """A rate that destroys the model does not pass as one that trains badly."""
    grid = small_grid(
        learning_rates=(0.03, 1e6), seeds=(0,), epochs=2.0, batches=(40,), delays=(0, 3)
    )
    sweep = Sweep(digits(), grid)
    sweep.run()
    results: GridResults = sweep.results()
    by_rate = {rate: [c.fails for c in results.cells.values() if c.place[3] == rate]
               for rate in (0.03, 1e6)}  # fmt: skip
    assert not any(by_rate[0.03])
    assert all(by_rate[1e6])
    assert all(best.largest_rate == 0.03 for best in results.best())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("workers", [1, 2, 8, 33])
def test_the_mean_staleness_is_one_less_than_the_workers(distribution: str, workers: int) -> None:
    """Whatever the distribution of compute times; exactly so up to the first gradients."""
    found = monte_carlo(Compute(distribution=distribution, jitter=0.3), workers, 20_000, seed=1)
    assert found.total == 20_000
    assert found.mean == pytest.approx(workers - 1, abs=workers**2 / 10_000)


@pytest.mark.parametrize("distribution", ["normal", "constant", "exponential"])
def test_the_monte_carlo_and_the_simulated_run_have_one_histogram(distribution: str) -> None:
    """Equal times included, where everything depends on who is drawn to come first."""
    compute = Compute(distribution=distribution, jitter=0.2)
    counted, played = (of(compute, 4, 2000, 0) for of in (monte_carlo, simulated))
    assert counted.distance(played) < 0.1
    assert played.total == counted.total
    assert counted.deviation == pytest.approx(played.deviation, rel=0.1)


def test_histograms_know_their_numbers() -> None:
    one, other = Histogram({0: 1, 2: 1}), Histogram({2: 4})
    assert (one.mean, one.deviation, one.share(2), one.share(7)) == (1.0, 1.0, 0.5, 0.0)
    assert one.distance(other) == other.distance(one) == 0.5
    assert one.distance(one) == 0.0
