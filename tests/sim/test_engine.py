"""Many gradients at once equal the same gradients one after the other, whoever shares the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer import simulate
from gossamer.optim.optimisers import make_optimiser
from gossamer.sim.engine import Engine, LoopEngine, NullEngine, VectorEngine, make_engine
from gossamer.sim.gradients import GradientBatcher, SimulatedGradient
from gossamer.sim.replica_matrix import Point, ReplicaStore
from gossamer.tasks import Task
from gossamer.tasks.evaluator import BUFFER_POLICIES
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of
from gossamer.tasks.task import Data
from gossamer.tasks.vision import crop_and_flip
from support import build, cluster_of, digits, rows
from tiers import every

Requests = tuple[Tensor, Tensor, Tensor, Tensor]


def task_with(make_model: Callable[[], nn.Module], **changes: object) -> Task:
    """The digits with another model."""
    return dataclasses.replace(digits(), name="own", make_model=make_model, **changes)


def flat(task: Task) -> FlatModel:
    return FlatModel(task, torch.device("cpu"), seed=0)


def requests(model: FlatModel, count: int, batch: int = 8) -> Requests:
    """Points, statistics, batches and keys that differ from row to row."""
    generator = torch.Generator().manual_seed(1)
    points = model.initial + 0.1 * torch.randn(count, model.layout.total, generator=generator)
    buffers = model.initial_buffers.repeat(count, 1)
    buffers += 0.1 * torch.rand(buffers.shape, generator=generator)
    batches = torch.randint(len(model.task.train), (count, batch), generator=generator)
    return points, buffers, batches, torch.tensor([key_of(5, row, 3) for row in range(count)])


def assert_equal_to_rounding(engine: Engine, reference: Engine, given: Requests) -> None:
    ours, theirs = engine.evaluate(*given), reference.evaluate(*given)
    for name in ("gradients", "losses", "buffers"):
        # Relative to the whole row: single numbers near zero are rounded otherwise on other CPUs.
        one, other = getattr(ours, name), getattr(theirs, name)
        assert float((one - other).norm()) <= 2e-6 * float(other.norm()), name


# ---------------------------------------------------------------------- models


class Tied(nn.Module):
    """One weight in two places, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)
        self.second.weight = self.first.weight
        self.last = nn.Linear(10, 10)
        self.last.weight.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs) + torch.relu(self.second(inputs)))


class Undecided(nn.Module):
    """Control flow that depends on data: no batch of workers can share one path."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layer(inputs)
        return output if inputs.sum().item() > 0 else -output


class Noisy(Undecided):
    """Draws from torch's own generator, past every key."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(nn.functional.dropout(inputs, 0.3, self.training))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, 10), nn.Dropout(0.2)
    )


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 10))


def as_images(data: Data) -> Data:
    return Data(data.inputs.view(-1, 1, 8, 8), data.targets)


def augmented() -> Task:
    return task_with(
        convolving,
        train=as_images(digits().train),
        test=as_images(digits().test),
        augment=crop_and_flip,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "perceptron": digits,
    "batch norm": lambda: task_with(normed),
    "dropout": lambda: task_with(dropping),
    "augmentation": augmented,
    "tied and frozen": lambda: task_with(Tied),
}
every_task = pytest.mark.parametrize("kind", TASKS)
as_given_or_traced = pytest.mark.parametrize(
    "trace_after", every(2, [99, 0]), ids=["plain", "traced"]
)


@every_task
@as_given_or_traced
def test_together_equals_one_after_the_other(kind: str, trace_after: int) -> None:
    """`vmap(grad)` over stacked workers gives each worker's own gradient, loss and statistics."""
    model = flat(TASKS[kind]())
    engine = VectorEngine(model, trace_after=trace_after)
    assert_equal_to_rounding(engine, LoopEngine(model), requests(model, 6))
    assert engine.notices == []


@every_task
def test_a_trace_gives_the_same_bits(kind: str) -> None:
    """From which use on a width is traced must not be seen in a run; a trace made with one set of
    points, batches and keys serves all others."""
    model = flat(TASKS[kind]())
    plain, traced = VectorEngine(model, trace_after=99), VectorEngine(model, trace_after=0)
    for given in (requests(model, 2), tuple(part.flip(0) for part in requests(model, 2))):
        ours, theirs = traced.evaluate(*given), plain.evaluate(*given)
        assert torch.equal(ours.gradients, theirs.gradients)
        assert torch.equal(ours.losses, theirs.losses)
        assert torch.equal(ours.buffers, theirs.buffers)


@every_task
@as_given_or_traced
def test_a_result_does_not_depend_on_who_shares_the_batch(kind: str, trace_after: int) -> None:
    """The same request alone, among others and in another place gives the same gradient."""
    model = flat(TASKS[kind]())
    engine = VectorEngine(model, trace_after=trace_after)
    given = requests(model, 4)
    together = engine.evaluate(*given).gradients[2]
    alone = engine.evaluate(*(part[2:3] for part in given)).gradients[0]
    reversed_ = engine.evaluate(*(part.flip(0) for part in given)).gradients[1]
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(reversed_, together, rtol=1e-4, atol=1e-6)


def test_dropout_masks_are_the_same_bits_alone_and_together() -> None:
    """Where dropout zeroes a unit, its weights have no gradient: the zeros must coincide."""
    model = flat(task_with(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))))
    given = requests(model, 5, batch=1)
    together = VectorEngine(model).evaluate(*given).gradients == 0
    alone = [
        LoopEngine(model).evaluate(*(part[row : row + 1] for part in given)) for row in range(5)
    ]
    assert torch.equal(together, torch.cat([one.gradients == 0 for one in alone]))
    assert 0.3 < float(together.float().mean()) < 0.9
    assert not torch.equal(together[0], together[1])


def test_another_key_is_another_mask() -> None:
    """The same point and batch with another key gives another gradient, so keys are in use."""
    model = flat(task_with(dropping))
    points, buffers, batches, keys = (
        part[:1].repeat_interleave(2, 0) for part in requests(model, 1)
    )
    keys[1] += 1
    gradients = VectorEngine(model).evaluate(points, buffers, batches, keys).gradients
    assert not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("width", [1, 5, 7, 9])
def test_padding_to_a_few_widths_changes_nothing(width: int) -> None:
    """Widths between the traced ones are filled up; nobody sees the surplus rows."""
    model = flat(task_with(normed))
    engine = VectorEngine(model, trace_after=1)
    given = requests(model, width)
    assert engine.evaluate(*given).gradients.shape == (width, model.layout.total)
    assert_equal_to_rounding(engine, LoopEngine(model), given)


def test_more_rows_than_fit_are_cut_into_pieces() -> None:
    """A batch wider than the widest call is evaluated in several, with the same results."""
    model = flat(digits())
    given = requests(model, 10)
    narrow, wide = VectorEngine(model, most_rows=4), VectorEngine(model)
    assert_equal_to_rounding(narrow, wide, given)


def test_no_gradients_at_all_are_zeros() -> None:
    """The engine for questions about time leaves statistics alone and gives zeros."""
    model = flat(task_with(normed))
    given = requests(model, 3)
    result = make_engine("none", model).evaluate(*given)
    assert isinstance(make_engine("none", model), NullEngine)
    assert not result.gradients.any()
    assert torch.equal(result.buffers, given[1])


# ---------------------------------------------------------------------- what cannot be vectorised


@as_given_or_traced
def test_a_model_that_cannot_be_batched_falls_back_to_the_loop(trace_after: int) -> None:
    """Data-dependent control flow: the gradients are right all the same, and a notice says so."""
    model = flat(task_with(Undecided))
    engine = VectorEngine(model, trace_after=trace_after)
    assert_equal_to_rounding(engine, LoopEngine(model), requests(model, 3))
    assert len(engine.notices) == 1
    assert "own cannot be vectorised" in engine.notices[0]
    assert "\n" not in engine.notices[0]


def test_the_fall_back_reaches_the_user() -> None:
    """The notice stands in the result's summary, once."""
    result = simulate(task_with(Undecided), "all_reduce", cluster_of(2), epochs=0.1, evaluations=1)
    assert len(result.notices) == 1
    assert "one worker after the other" in result.notices[0]


def test_randomness_of_a_models_own_follows_the_seed() -> None:
    """A model that draws from torch's generator falls back and draws from the worker's key."""
    task = task_with(Noisy)
    runs = [
        simulate(task, "ad_psgd", cluster_of(3), epochs=0.1, seed=seed, evaluations=1)
        for seed in (1, 1, 2)
    ]
    assert runs[0].parameters_digest == runs[1].parameters_digest
    assert runs[0].parameters_digest != runs[2].parameters_digest


@pytest.mark.parametrize("kind", [*TASKS, "noisy"])
def test_torchs_own_generator_is_left_alone(kind: str) -> None:
    """A library must not reseed its host: the next random number is what it would have been."""
    task = task_with(Noisy) if kind == "noisy" else TASKS[kind]()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    simulate(task, "ad_psgd", cluster_of(2), epochs=0.05, evaluations=2)
    assert torch.equal(torch.rand(3), expected)


# ---------------------------------------------------------------------- gradients in batches


def batcher_for(model: FlatModel, workers: int, engine: Engine | None = None) -> GradientBatcher:
    store = ReplicaStore(workers, model.initial, make_optimiser("sgd"))
    buffers = model.initial_buffers.repeat(workers, 1)
    return GradientBatcher(engine or VectorEngine(model), store, buffers)


def gradient_of(model: FlatModel, worker: int, size: int) -> SimulatedGradient:
    batch = np.arange(worker, worker + size, dtype=np.int64)
    return SimulatedGradient(
        worker, Point(-1, model.initial + 0.1 * worker), batch, key_of(0, worker, 0)
    )


def test_batches_of_unequal_sizes_are_grouped() -> None:
    """Gradients of several batch sizes in one go each get the gradient they get alone."""
    model = flat(task_with(normed))
    mixed, one_by_one = batcher_for(model, 4), batcher_for(model, 4, LoopEngine(model))
    outstanding = [gradient_of(model, worker, size) for worker, size in enumerate((8, 3, 8, 5))]
    for waiting in outstanding:
        mixed.start(waiting)
    for worker, size in enumerate((8, 3, 8, 5)):
        alone = gradient_of(model, worker, size)
        one_by_one.start(alone)
        torch.testing.assert_close(
            mixed.value_of(outstanding[worker]), one_by_one.value_of(alone), rtol=1e-4, atol=1e-6
        )
    assert mixed.evaluations == 3


def test_statistics_take_effect_at_delivery() -> None:
    """Evaluating for one worker must not move the BatchNorm statistics of another."""
    model = flat(task_with(normed))
    batcher = batcher_for(model, 2)
    first, second = gradient_of(model, 0, 8), gradient_of(model, 1, 8)
    batcher.start(first)
    batcher.start(second)
    batcher.value_of(first)
    assert second.value is not None, "both were evaluated together"
    assert not torch.equal(batcher.buffers[0], model.initial_buffers)
    assert torch.equal(batcher.buffers[1], model.initial_buffers)
    batcher.value_of(second)
    assert not torch.equal(batcher.buffers[1], model.initial_buffers)


def test_an_aborted_gradient_leaves_no_trace() -> None:
    """Neither statistics nor the batch of the others know of one that was given up."""
    model = flat(task_with(normed))
    batcher = batcher_for(model, 2)
    given_up, wanted = gradient_of(model, 0, 8), gradient_of(model, 1, 8)
    batcher.start(given_up)
    batcher.start(wanted)
    batcher.abort(0)
    batcher.value_of(wanted)
    assert given_up.value is None
    assert batcher.rows_evaluated == 1
    assert torch.equal(batcher.buffers[0], model.initial_buffers)


# ---------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("kind", ["batch norm", "dropout", "tied and frozen"])
def test_whole_runs_agree_between_the_engines(kind: str) -> None:
    """Every event is the same and the parameters agree to rounding."""
    task = TASKS[kind]()
    vector, loop = (
        simulate(task, "ad_psgd", cluster_of(4), epochs=0.2, seed=2, engine=engine, evaluations=1)
        for engine in ("vector", "loop")
    )
    assert vector.digest == loop.digest
    torch.testing.assert_close(vector.parameters, loop.parameters, rtol=1e-3, atol=1e-4)


def test_clipping_is_per_worker() -> None:
    """With a bound below every gradient, each worker's first step has exactly that length."""
    rate, bound = 0.5, 1e-3
    simulation = build(
        digits(), "ensemble", cluster_of(3, distribution="constant"), steps=1,
        learning_rate=rate, optimiser="sgd", clip=bound, evaluations=1,
    )  # fmt: skip
    start = rows(simulation).clone()
    assert simulation.run().steps == 3
    moved = (rows(simulation) - start).norm(dim=1)
    assert moved.tolist() == pytest.approx([rate * bound] * 3, rel=1e-3)


@pytest.mark.parametrize(
    ("policy", "method"), every(3, list(BUFFER_POLICIES), ["all_reduce", "ensemble", "easgd"])
)
def test_every_policy_for_statistics_gives_a_working_model(policy: str, method: str) -> None:
    """With averaged, recomputed and local statistics the output model classifies digits."""
    result = simulate(
        task_with(normed), method, cluster_of(4), epochs=3, learning_rate=0.1, buffers=policy,
        evaluations=1,
    )  # fmt: skip
    assert result.accuracy > (0.15 if method == "easgd" else 0.6)


def test_runs_in_one_process_do_not_disturb_each_other() -> None:
    """A run's bits are the same before and after a run of another seed and model."""

    def bits(seed: int) -> tuple[str, str]:
        result = simulate(digits(), "push_sum", cluster_of(3), epochs=0.2, seed=seed, evaluations=1)
        return result.digest, result.parameters_digest

    before = bits(4)
    simulate(task_with(normed), "easgd", cluster_of(2), epochs=0.1, seed=9, evaluations=1)
    assert bits(5) != before
    assert bits(4) == before
