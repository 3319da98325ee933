"""`DelayedOptimizer`: every gradient is applied exactly as late as asked, in any loop."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer import DelayedOptimizer, simulate
from gossamer.errors import ConfigurationError
from gossamer.optim.delayed import make_delay
from support import bowl, cluster_of

OPTIMISERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}
every_optimiser = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
delays = st.integers(0, 6)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def backward(model: nn.Module, step: int) -> None:
    inputs, targets = batch_of(step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def train(model: nn.Module, optimiser: Optimizer, steps: range) -> None:
    for step in steps:
        optimiser.zero_grad()
        backward(model, step)
        optimiser.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def by_hand(make: Callable[[Any], Optimizer], due: list[int], steps: int) -> Tensor:
    """Train with a list of all gradients; the one of step t is applied `due[t]` steps later."""
    model = network()
    optimiser = make(model.parameters())
    seen: list[list[Tensor]] = []
    for step in range(steps):
        model.zero_grad()
        backward(model, step)
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
        for computed, gradients in enumerate(seen):
            if computed + due[computed] == step:
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimiser.step()
    return flat(model)


# ---------------------------------------------------------------------- when gradients are applied


@every_optimiser
@given(delay=delays, steps=st.integers(1, 12))
@settings(max_examples=15)
def test_step_t_applies_the_gradient_of_step_t_minus_d(
    make: Callable[[Any], Optimizer], delay: int, steps: int
) -> None:
    """Bit for bit what a loop with a list of all gradients does; the first d steps do nothing."""
    model = network()
    optimiser = DelayedOptimizer(make(model.parameters()), delay)
    start = flat(model)
    train(model, optimiser, range(min(delay, steps)))
    assert torch.equal(flat(model), start)
    train(model, optimiser, range(delay, steps))
    assert torch.equal(flat(model), by_hand(make, [delay] * steps, steps))
    assert optimiser.waiting == min(delay, steps)


@every_optimiser
def test_no_delay_is_the_wrapped_optimiser_bit_for_bit(make: Callable[[Any], Optimizer]) -> None:
    """Parameters and state; nothing is copied and nothing waits."""
    plain, wrapped = network(), network()
    alone = make(plain.parameters())
    optimiser = DelayedOptimizer(make(wrapped.parameters()), 0)
    train(plain, alone, range(6))
    train(wrapped, optimiser, range(6))
    assert torch.equal(flat(plain), flat(wrapped))
    assert optimiser.waiting == 0
    for one, other in zip(alone.state.values(), optimiser.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)


@given(seed=st.integers(0, 99), high=st.integers(0, 5))
@settings(max_examples=20)
def test_drawn_delays_apply_what_is_due_in_order_of_computation(seed: int, high: int) -> None:
    """Each gradient d_t steps after its own, several in one step where several are due."""
    make, steps = OPTIMISERS["adam"], 15
    model = network()
    optimiser = DelayedOptimizer(make(model.parameters()), f"uniform:high={high}", seed=seed)
    due: list[int] = []
    usual = optimiser._draw

    def draw(rng: Any) -> int:
        due.append(usual(rng))
        return due[-1]

    optimiser._draw = draw
    train(model, optimiser, range(steps))
    assert torch.equal(flat(model), by_hand(make, due, steps))
    assert optimiser.waiting == sum(step + d >= steps for step, d in enumerate(due))


def test_parameters_without_gradients_are_left_alone() -> None:
    """A frozen layer, and one that has a gradient in some steps only."""
    model = network()
    model[0].weight.requires_grad_(False)
    optimiser = DelayedOptimizer(OPTIMISERS["sgd"](model.parameters()), 2)
    frozen, sometimes = model[0].weight.clone(), model[2].bias
    for step in range(5):
        optimiser.zero_grad()
        backward(model, step)
        if step != 1:
            sometimes.grad = None
        before = sometimes.clone()
        optimiser.step()
        # Only step 1 gave it a gradient, and that one is due in step 3.
        assert torch.equal(before, sometimes) == (step != 3)
        assert (sometimes.grad is None) == (step != 1)
    assert torch.equal(model[0].weight, frozen)


def test_the_fresh_gradients_stay_where_the_loop_left_them() -> None:
    """A loop that logs, accumulates or zeroes in place sees its own gradients, not late ones."""
    model = network()
    optimiser = DelayedOptimizer(OPTIMISERS["sgd"](model.parameters()), 1)
    kept: list[Tensor] = []
    for step in range(4):
        optimiser.zero_grad(set_to_none=False)
        backward(model, step)
        fresh = model[0].weight.grad
        value = fresh.clone()
        optimiser.step()
        assert model[0].weight.grad is fresh
        assert torch.equal(fresh, value)
        kept.append(value)
    assert not torch.equal(kept[2], kept[3])
    other = network()
    train(other, DelayedOptimizer(OPTIMISERS["sgd"](other.parameters()), 1), range(4))
    assert torch.equal(flat(model), flat(other))


def test_a_group_added_later_takes_part_from_then_on() -> None:
    """Gradients on their way know nothing of it."""
    model, extra = network(), nn.Parameter(torch.ones(2))
    optimiser = DelayedOptimizer(OPTIMISERS["sgd"](model.parameters()), 2)
    train(model, optimiser, range(2))
    optimiser.add_param_group({"params": [extra], "lr": 0.5})
    for step in range(2, 5):
        assert torch.equal(extra.detach(), torch.ones(2))
        optimiser.zero_grad()
        backward(model, step)
        extra.grad = torch.ones(2)
        optimiser.step()
    assert torch.equal(extra.detach(), torch.full((2,), 0.5))


# ---------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("spec", "mean", "least", "most"),
    [("uniform:low=2,high=6", 4.0, 2, 6), ("normal:mean=7,deviation=1.4", 7.0, 0, 14),
     ("geometric:mean=7", 7.0, 0, 200), ("geometric:mean=0", 0.0, 0, 0)],
)  # fmt: skip
def test_distributions_have_the_mean_they_name(
    spec: str, mean: float, least: int, most: int
) -> None:
    """Whole numbers inside their range, reproducible by seed."""
    draw, rng = make_delay(spec), random.Random(1)
    drawn = [draw(rng) for _ in range(20_000)]
    assert all(isinstance(one, int) for one in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(mean, abs=0.15)
    assert least <= min(drawn)
    assert max(drawn) <= most


def test_a_recorded_histogram_is_drawn_from() -> None:
    """The staleness of a simulated run, and the same from JSON, where keys are text."""
    run = simulate(bowl(), "downpour", cluster_of(4), epochs=1, engine="none")
    recorded = run.staleness
    text = {str(key): count for key, count in recorded.items()}
    counts, from_text = (
        Counter(draw(rng) for _ in range(5000))
        for draw, rng in ((make_delay(one), random.Random(0)) for one in (recorded, text))
    )
    assert counts == from_text
    assert set(counts) <= set(recorded)
    total = sum(recorded.values())
    for value, count in recorded.items():
        assert counts[value] / 5000 == pytest.approx(count / total, abs=0.03)


@pytest.mark.parametrize(
    ("delay", "sentence"),
    [
        (-1, "delay must be a whole number of steps of at least 0"),
        (True, "got True"),
        (2.5, "got 2.5"),
        (None, "got None"),
        ("normall", "unknown delay distribution 'normall'; did you mean 'normal'?"),
        ("normal:men=3", "unknown normal option 'men'; did you mean 'mean'?"),
        ("geometric:mean=-1", "geometric: mean must be at least 0"),
        ("uniform:low=4,high=2", "uniform: high must not be below low"),
        ({}, "or a staleness histogram such as"),
        ({3: 0}, "got {3: 0}"),
        ({-1: 3}, "got {-1: 3}"),
        ({"late": 3}, "got {'late': 3}"),
        ({1: -2}, "got {1: -2}"),
    ],
)
def test_a_delay_that_is_none_is_refused(delay: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DelayedOptimizer(OPTIMISERS["sgd"](network().parameters()), delay)
    assert sentence in str(caught.value)


def test_what_needs_a_closure_is_refused() -> None:
    """With a reason; and so is something that is no optimiser."""
    parameters = list(network().parameters())
    optimiser = DelayedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1)
    with pytest.raises(ConfigurationError, match="takes no closure"):
        optimiser.step(lambda: 0.0)
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the loss several times"):
        DelayedOptimizer(torch.optim.LBFGS(parameters), 1)
    with pytest.raises(ConfigurationError, match=r"wraps an optimiser of torch\.optim, got list"):
        DelayedOptimizer(parameters, 1)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- schedulers and state


def test_schedulers_change_the_rate_of_the_step_that_applies() -> None:
    """The same as setting the rates by hand; torch accepts the wrapper without a warning."""
    scheduled, by_rate = network(), network()
    optimiser = DelayedOptimizer(torch.optim.SGD(scheduled.parameters(), lr=0.4), 2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    other = DelayedOptimizer(torch.optim.SGD(by_rate.parameters(), lr=0.4), 2)
    for step in range(6):
        train(scheduled, optimiser, range(step, step + 1))
        scheduler.step()
        other.param_groups[0]["lr"] = 0.4 * 0.5**step
        train(by_rate, other, range(step, step + 1))
    assert torch.equal(flat(scheduled), flat(by_rate))
    torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.1, total_steps=10)


@every_optimiser
@pytest.mark.parametrize("delay", [3, "geometric:mean=2"])
def test_a_run_goes_on_from_a_state_dict_as_if_it_had_not_stopped(
    make: Callable[[Any], Optimizer], delay: Any
) -> None:
    """In the middle of a run, gradients on their way and generator included, through a file."""
    whole = network()
    train(whole, DelayedOptimizer(make(whole.parameters()), delay, seed=5), range(12))

    first = network()
    optimiser = DelayedOptimizer(make(first.parameters()), delay, seed=5)
    train(first, optimiser, range(5))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimiser": optimiser.state_dict()}, file)
    train(first, optimiser, range(5, 7))  # what happens later must not reach the saved state

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = network()
    second.load_state_dict(saved["model"])
    resumed = DelayedOptimizer(make(second.parameters()), delay, seed=99)
    resumed.load_state_dict(saved["optimiser"])
    train(second, resumed, range(5, 12))
    assert torch.equal(flat(second), flat(whole))


def test_a_state_dict_of_another_optimiser_is_refused() -> None:
    optimiser = DelayedOptimizer(OPTIMISERS["sgd"](network().parameters()), 1)
    with pytest.raises(ConfigurationError, match="has no entry 'delayed'"):
        optimiser.load_state_dict(OPTIMISERS["sgd"](network().parameters()).state_dict())


def test_a_copy_goes_its_own_way() -> None:
    """`copy.deepcopy` of a model and its optimiser together gives an independent pair."""
    model = network()
    optimiser = DelayedOptimizer(OPTIMISERS["sgd"](model.parameters()), 2)
    train(model, optimiser, range(4))
    other, its = copy.deepcopy((model, optimiser))
    train(model, optimiser, range(4, 8))
    assert not torch.equal(flat(other), flat(model))
    train(other, its, range(4, 8))
    assert torch.equal(flat(other), flat(model))
