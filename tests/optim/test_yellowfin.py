"""YellowFin: its arithmetic, its two forms, and its closed loop under delay."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import YellowFin, simulate
from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import YellowFinRows, make_optimiser
from gossamer.optim.yellowfin import Tuner, _median, root_momentum
from support import cluster_of, digits
from tiers import every

SHAPES = [(5, 4), (5,), (3, 5), (3,)]  # 43 parameters
SIZES = [math.prod(shape) for shape in SHAPES]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def split(flat: Tensor) -> list[Tensor]:
    """The pieces of a flat vector in the shapes of a small network."""
    return [part.view(shape) for part, shape in zip(flat.split(SIZES), SHAPES, strict=True)]


def train(optimiser: YellowFin, parameters: list[Tensor], gradients: Tensor) -> Tensor:
    """The parameters, flat, after one step along each gradient."""
    for gradient in gradients:
        for parameter, part in zip(parameters, split(gradient), strict=True):
            parameter.grad = part.clone()
        optimiser.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


# ---------------------------------------------------------------------- the arithmetic

magnitudes = st.floats(-4, 4).map(lambda exponent: 10.0**exponent)


@given(magnitudes, magnitudes, magnitudes)
def test_the_cubic_solution_minimises_the_expected_distance(distance, variance, curvature):
    """No x of a dense scan gives a smaller x^2 D^2 + (1 - x)^4 C / h^2. Where noise or distance
    outweighs the other by more than 10^9, the answer is that of the edge."""

    def objective(x: Tensor) -> Tensor:
        return x**2 * distance**2 + (1 - x) ** 4 * variance / curvature**2

    given_row = [torch.tensor([v], dtype=torch.float64) for v in (distance, variance, curvature)]
    best = root_momentum(*given_row)
    assert 0 <= float(best) < 1
    ratio = (distance * curvature) ** 2 / (2 * variance)
    if 1e-9 < ratio < 1e9:
        scan = torch.linspace(0, 1, 20_001, dtype=torch.float64)
        least = objective(scan).min()
        assert float(objective(best)) <= float(least) * (1 + 1e-6)


def radius(momentum: float, step: float) -> float:
    """How fast heavy ball goes on a quadratic, given its rate times curvature."""
    operator = torch.tensor([[1 - step + momentum, -momentum], [1.0, 0.0]], dtype=torch.float64)
    return float(torch.linalg.eigvals(operator).abs().max())


@pytest.mark.parametrize(
    ("low", "high"), every(3, [(1.0, 1.0), (1.0, 1.2), (1.0, 10.0), (0.02, 5.0)])
)
def test_momentum_and_rate_settle_inside_the_robust_region(low, high):
    """On a noiseless quadratic at unit energy (h x^2 = 1) the squared norm of the gradient is the
    curvature. Fed with gradients of all curvatures of a range, the tuner settles where heavy ball
    converges at the rate sqrt(mu) for every one of them. In a narrow range the range itself asks
    for the momentum, in a wide one the scatter of the gradients asks for more."""
    cycle = [low, (low * high) ** 0.5, high]
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = YellowFin([x], lr=0.0, beta=0.95, window=5)  # the point stays where it is
    for step in range(600):
        x.grad = torch.tensor([cycle[step % 3] ** 0.5], dtype=torch.float64)
        optimiser.step()
    momentum, rate = optimiser.tuned
    root = momentum**0.5
    condition = (high / low) ** 0.5
    least = (condition - 1) / (condition + 1)
    assert root == pytest.approx(least, abs=1e-4) if condition < 2 else root > least
    assert rate * low == pytest.approx((1 - root) ** 2, rel=1e-3)
    assert rate * high <= (1 + root) ** 2 * (1 + 1e-6)
    for curvature in cycle:
        assert radius(momentum, rate * curvature) == pytest.approx(root, abs=1e-3)
    assert float(x.detach()) == 0


def test_more_noise_means_more_momentum_and_a_lower_rate():
    """The same mean gradient under growing noise: the tuner trusts the single gradient less."""
    tuned = []
    for noise in (0.05, 0.5, 5.0):
        x = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        optimiser = YellowFin([x], lr=0.0, beta=0.99)
        for gradient in 0.5 + noise * random(400, 40):
            x.grad = gradient
            optimiser.step()
        tuned.append(optimiser.tuned)
    momenta, rates = zip(*tuned, strict=True)
    assert momenta[0] < momenta[1] < momenta[2]
    assert rates[0] > rates[1] > rates[2]


def test_the_rate_starts_slowly():
    """The first of 10 windows of steps takes at most a tenth of the rate that it would have."""
    gradient = torch.ones(40, dtype=torch.float64)
    x = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimiser = YellowFin([x], window=20)
    rates = []
    for _ in range(250):
        x.grad = gradient.clone()
        optimiser.step()
        rates.append(optimiser.tuned[1])
    full = 1 / 40  # of a gradient without noise or range, whose squared norm is 40
    assert rates[0] == pytest.approx(full / 200)
    assert max(rates[:20]) <= full / 10
    assert rates == sorted(rates)
    assert rates[-1] < full


def test_a_gradient_that_explodes_is_clipped_and_does_not_spoil_the_averages():
    """It moves the parameters by no more than the rate times the largest usual norm, and the
    averages see at most ten times that norm, so that later steps are nearly what they were."""
    steps, usual = 300, random(400, 40)

    def run(outlier: float) -> tuple[float, tuple[float, float]]:
        x = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        optimiser = YellowFin([x])
        for gradient in usual[:steps]:
            x.grad = gradient.clone()
            optimiser.step()
        momentum, _ = optimiser.tuned
        before = x.detach().clone()
        velocity = optimiser.state[x]["displacement"].clone()
        x.grad = usual[steps] * outlier
        optimiser.step()
        pull = x.detach() - before - momentum * velocity
        for gradient in usual[steps + 1 :]:
            x.grad = gradient.clone()
            optimiser.step()
        return float(pull.norm()), optimiser.tuned

    largest = float(usual[:steps].norm(dim=1).max())
    usual_pull, usual_tuned = run(1.0)
    pull, tuned = run(1e8)
    assert pull <= 1.2 * tuned[1] * largest
    assert pull < 5 * usual_pull
    assert tuned == pytest.approx(usual_tuned, rel=0.1)


# ---------------------------------------------------------------------- the two forms


@pytest.mark.parametrize(
    "spec",
    [
        "yellowfin",
        "yellowfin:weight_decay=0.1,beta=0.9,window=4",
        "yellowfin:closed_loop,workers=1,momentum=0.5",
        "yellowfin:closed_loop,workers=3",
    ],
)
def test_each_row_gets_what_the_torch_optimiser_gives_it_alone(spec):
    """Row r is updated in every (r + 1)-th round only and at its own rate, so that step counts
    differ within a batch; to rounding, because norms are summed parameter by parameter in one."""
    rows, rates = make_optimiser(spec), random(3, 1, seed=2).abs()
    assert isinstance(rows, YellowFinRows)
    options = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    start, gradients = random(3, sum(SIZES)), random(60, 3, sum(SIZES), seed=1)
    ours = start.clone()
    state = {slot: torch.full_like(ours, rows.initial(slot)) for slot in rows.slots}
    history: list[list[Tensor]] = [[], [], []]
    for turn in range(60):
        now = [row for row in range(3) if turn % (row + 1) == row]
        part, part_state = ours[now], {slot: matrix[now] for slot, matrix in state.items()}
        steps = [len(history[row]) for row in now]
        rows.descend_(part, gradients[turn, now], part_state, steps, rates[now])
        ours[now] = part
        for slot, matrix in state.items():
            matrix[now] = part_state[slot]
        for row in now:
            history[row].append(gradients[turn, row])
    for row, past in enumerate(history):
        parameters = [nn.Parameter(part.clone()) for part in split(start[row])]
        alone = YellowFin(parameters, lr=float(rates[row]), **options)
        theirs = train(alone, parameters, torch.stack(past))
        torch.testing.assert_close(ours[row], theirs, rtol=1e-9, atol=1e-9)
        assert (theirs - start[row]).abs().max() > 1e-3


@pytest.mark.parametrize("closed_loop", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 25])
def test_a_run_goes_on_from_its_state_as_if_nothing_had_happened(closed_loop, taken):
    """What `state_dict` keeps is everything: the rest of the run is the same bit for bit, even
    where the new optimiser was made with other options."""
    gradients = random(60, sum(SIZES), seed=1)
    parameters = [nn.Parameter(part.clone()) for part in split(random(sum(SIZES)))]
    optimiser = YellowFin(parameters, lr=0.5, closed_loop=closed_loop, workers=3, window=5)
    train(optimiser, parameters, gradients[:taken])
    kept = copy.deepcopy((parameters, optimiser.state_dict()))
    expected = train(optimiser, parameters, gradients[taken:])
    again, state = kept
    resumed = YellowFin(again)
    resumed.load_state_dict(state)
    assert torch.equal(train(resumed, again, gradients[taken:]), expected)
    assert resumed.tuned == optimiser.tuned


def test_parameter_groups_are_tuned_together_but_keep_their_factors():
    """A group with half the factor moves half as far; a parameter without a gradient not at all."""
    fast, slow, idle = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    groups = [{"params": [idle]}, {"params": [fast]}, {"params": [slow], "lr": 0.5}]
    optimiser = YellowFin(groups, lr=1.0)

    def closure() -> float:
        fast.grad, slow.grad = torch.ones(3), torch.ones(3)
        return 2.5

    for _ in range(30):
        assert optimiser.step(closure) == 2.5
    assert fast[0] < 0
    torch.testing.assert_close(fast.detach(), 2 * slow.detach())
    assert torch.equal(idle.detach(), torch.zeros(3))


def test_a_row_that_is_reset_starts_again():
    """All of its state is 0 again, its count of steps too, whatever the caller goes on counting."""
    rows, gradients = make_optimiser("yellowfin"), random(10, 1, sum(SIZES))
    start, ends = random(1, sum(SIZES), seed=1), []
    state = {slot: torch.zeros_like(start) for slot in rows.slots}
    for first in (0, 10):
        x = start.clone()
        for matrix in state.values():
            matrix.zero_()
        for step, gradient in enumerate(gradients, first):
            rows.descend_(x, gradient, state, [step], 1.0)
        ends.append(x)
    assert torch.equal(*ends)


# ---------------------------------------------------------------------- training


def test_it_trains_the_digits_without_being_told_a_rate():
    """A plain loop with the factor 1 reaches more than 93 % on the test digits."""
    task = digits()
    torch.manual_seed(0)
    model = task.make_model()
    optimiser = YellowFin(model.parameters())
    for _ in range(8):
        for batch in torch.randperm(len(task.train)).split(32):
            optimiser.zero_grad()
            task.loss(model(task.train.inputs[batch]), task.train.targets[batch]).backward()
            optimiser.step()
    assert task.metric is not None
    with torch.no_grad():
        assert float(task.metric.score(model(task.test.inputs), task.test.targets).mean()) > 0.93


def test_workers_of_a_simulation_may_use_it():
    """By its name, like every optimiser; the learning rate is the factor."""
    result = simulate(
        digits(), "all_reduce", cluster_of(2), epochs=4, batch=32,
        optimiser="yellowfin", learning_rate=1.0,
    )  # fmt: skip
    assert result.accuracy > 0.85


# ---------------------------------------------------------------------- the closed loop


def under_delay(delay: int, closed_loop: bool) -> tuple[float, float, float]:
    """Explicit momentum, its target, and the mean distance from the optimum of a noisy quadratic
    whose gradients come so many steps late; of the second half of the run."""
    x = nn.Parameter(torch.full((40,), 0.5, dtype=torch.float64))
    optimiser = YellowFin([x], beta=0.99, closed_loop=closed_loop, workers=delay + 1)
    late: deque[Tensor] = deque()
    seen: list[Tensor] = []
    for step, noise in enumerate(0.2 * random(1200 + delay, 40)):
        late.append(x.detach() + noise)
        if len(late) > delay:
            x.grad = late.popleft()
            optimiser.step()
        if step > 600:
            target = Tuner(beta=0.99).tuned(optimiser.state[x]["tuner"])[0]
            explicit = torch.tensor(optimiser.tuned[0])
            seen.append(torch.stack([explicit, target[0], x.detach().norm()]))
    explicit, target, distance = torch.stack(seen).mean(0).tolist()
    return explicit, target, distance


def test_without_delay_the_closed_loop_sets_what_it_wants():
    """The measured total is then the explicit momentum itself, so it goes to its target."""
    explicit, target, _ = under_delay(0, closed_loop=True)
    assert explicit == pytest.approx(target, abs=0.01)
    assert target > 0.2


def test_the_loop_waits_until_it_has_three_points_around_a_read():
    """With two steps of delay, the fourth step is the first that can be measured."""
    x = nn.Parameter(random(40))
    optimiser = YellowFin([x], closed_loop=True, workers=3, momentum=0.5)
    set_to = []
    for gradient in random(5, 40, seed=1):
        x.grad = gradient
        optimiser.step()
        set_to.append(optimiser.tuned[0])
    assert set_to[:3] == [0.5, 0.5, 0.5]
    assert 0 < abs(set_to[3] - 0.5) <= 0.01 + 1e-12


def test_the_measured_momentum_is_a_median_without_bias():
    """Of an even number of parameters it lies between the middle two; those that say nothing are
    left out."""
    assert float(_median(torch.tensor([3.0, -1.0, math.nan, 0.0, 1.0]))) == 0.5
    assert math.isnan(float(_median(torch.tensor([math.nan]))))


@pytest.mark.parametrize("delay", every(2, [1, 3]))
def test_the_closed_loop_lowers_explicit_momentum_when_gradients_are_late(delay):
    """Delay adds momentum of its own: the loop takes it off again, the open loop does not."""
    explicit, target, distance = under_delay(delay, closed_loop=True)
    assert explicit < target - 0.08
    explicit, target, open_distance = under_delay(delay, closed_loop=False)
    assert explicit == pytest.approx(target)
    assert distance < open_distance


# ---------------------------------------------------------------------- refusals


def two_groups(**options: float) -> list[dict[str, object]]:
    return [{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2)], **options}]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: YellowFin([torch.zeros(2)], beta=1.0),
            "yellowfin: beta must be at least 0 and below 1, got 1.0",
        ),
        (
            lambda: YellowFin([torch.zeros(2)], lr=-1.0),
            "yellowfin: lr must be at least 0, got -1.0",
        ),
        (
            lambda: YellowFin(two_groups(beta=0.5)),
            "yellowfin tunes all parameter groups together, got beta=0.5 for one and 0.999 for "
            "another; give it once, beside the groups",
        ),
        (
            lambda: YellowFin([torch.zeros(2, dtype=torch.bfloat16)]),
            "yellowfin needs parameters of float32 or float64, got torch.bfloat16; keep a float32 "
            "copy of them to optimise",
        ),
        (
            lambda: make_optimiser("yellowfin:window=0"),
            "yellowfin: window must be at least 1, got 0",
        ),
        (
            lambda: simulate("quadratic", "all_reduce", cluster_of(2), optimiser="yellowfin"),
            "yellowfin: a window of 20 needs a model of at least 29 parameters, got 10; use a "
            "smaller window or a larger model",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(call, sentence):
    """One sentence with what was got and what was expected."""
    with pytest.raises(ConfigurationError) as failure:
        call()
    assert str(failure.value) == sentence
