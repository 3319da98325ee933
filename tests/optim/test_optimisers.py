"""Many rows at once get what torch.optim gives to each of them alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import (
    OPTIMISERS,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
    Sgd,
    clip_rows,
    make_optimiser,
)

STEPS, WIDTH = 20, 37

# The spec, and torch's class and options for the same optimiser.
CASES = [
    ("sgd", torch.optim.SGD, {}),
    ("sgd:weight_decay=0.01", torch.optim.SGD, {"weight_decay": 0.01}),
    ("sgd:momentum=0.9", torch.optim.SGD, {"momentum": 0.9}),
    (
        "sgd:momentum=0.9,dampening=0.3,weight_decay=0.01",
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    (
        "sgd:momentum=0.9,nesterov,weight_decay=0.01",
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    ("adam", torch.optim.Adam, {}),
    (
        "adam:beta1=0.8,beta2=0.95,epsilon=0.001,weight_decay=0.1",
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 0.001, "weight_decay": 0.1},
    ),
    ("adamw", torch.optim.AdamW, {}),
    (
        "adamw:beta1=0.0,weight_decay=0.2",
        torch.optim.AdamW,
        {"betas": (0.0, 0.999), "weight_decay": 0.2},
    ),
    ("adagrad", torch.optim.Adagrad, {}),
    (
        "adagrad:initial_accumulator_value=0.1,epsilon=0.001,weight_decay=0.1",
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.1, "eps": 0.001, "weight_decay": 0.1},
    ),
    ("rmsprop", torch.optim.RMSprop, {}),
    (
        "rmsprop:alpha=0.9,epsilon=0.001,centered,weight_decay=0.1",
        torch.optim.RMSprop,
        {"alpha": 0.9, "eps": 0.001, "centered": True, "weight_decay": 0.1},
    ),
    ("rmsprop:momentum=0.9", torch.optim.RMSprop, {"momentum": 0.9}),
    (
        "rmsprop:momentum=0.9,centered",
        torch.optim.RMSprop,
        {"momentum": 0.9, "centered": True},
    ),
]
every_case = pytest.mark.parametrize(("spec", "torch_class", "options"), CASES)


def matrices(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=generator, dtype=dtype)


def new_state(optimiser, parameters):
    return {slot: torch.full_like(parameters, optimiser.initial(slot)) for slot in optimiser.slots}


def torch_alone(torch_class, options, start, gradients, rates):
    """The parameters of one row, a vector, after torch.optim has applied all its gradients."""
    parameter = start.clone().requires_grad_()
    optimiser = torch_class([parameter], lr=0.1, foreach=False, **options)
    for gradient, rate in zip(gradients, rates, strict=True):
        optimiser.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        optimiser.step()
    return parameter.detach()


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_row_is_bit_for_bit_torch(spec, torch_class, options, dtype):
    """With one number as the rate, even a changing one, a row equals torch.optim exactly."""
    optimiser = make_optimiser(spec)
    start, gradients = matrices(1, dtype=dtype), matrices(STEPS, 1, dtype=dtype, seed=1)
    rates = [0.05 / (1 + step // 5) for step in range(STEPS)]
    ours, state = start.clone(), new_state(optimiser, start)
    for step in range(STEPS):
        optimiser.descend_(ours, gradients[step], state, [step], rates[step])
    theirs = torch_alone(torch_class, options, start[0], gradients[:, 0], rates)
    assert torch.equal(ours[0], theirs)


@every_case
def test_rows_with_different_histories_each_get_what_torch_gives_them(spec, torch_class, options):
    """Row r is updated in every (r + 1)-th round only, so that step counts differ in a batch."""
    optimiser = make_optimiser(spec)
    start, gradients = matrices(4), matrices(STEPS, 4, seed=1)
    ours, state, history = start.clone(), new_state(optimiser, start), [[], [], [], []]
    for turn in range(STEPS):
        rows = [row for row in range(4) if turn % (row + 1) == row]
        part, part_state = ours[rows], {slot: matrix[rows] for slot, matrix in state.items()}
        steps = [len(history[row]) for row in rows]
        optimiser.descend_(part, gradients[turn, rows], part_state, steps, 0.05)
        ours[rows] = part
        for slot, matrix in state.items():
            matrix[rows] = part_state[slot]
        for row in rows:
            history[row].append(gradients[turn, row])
    assert [len(past) for past in history] == [20, 10, 6, 5]
    for row, past in enumerate(history):
        theirs = torch_alone(torch_class, options, start[row], past, [0.05] * len(past))
        torch.testing.assert_close(ours[row], theirs)


@every_case
@pytest.mark.parametrize("head_start", [0, 3])
def test_each_row_moves_at_its_own_rate(spec, torch_class, options, head_start):
    """A [rows, 1] rate is each row's own, whether or not the rows have taken the same steps."""
    optimiser = make_optimiser(spec)
    start, gradients = matrices(3), matrices(STEPS + head_start, 3, seed=1)
    rates = torch.tensor([[0.05], [0.02], [0.1]], dtype=torch.float64)
    ours, state = start.clone(), new_state(optimiser, start)
    first = {slot: matrix[:1] for slot, matrix in state.items()}
    for step in range(head_start):
        optimiser.descend_(ours[:1], gradients[step, :1], first, [step], 0.05)
    for step in range(STEPS):
        steps = [step + head_start, step, step]
        optimiser.descend_(ours, gradients[step + head_start], state, steps, rates)
    for row in range(3):
        past = gradients[0 if row == 0 else head_start :, row]
        theirs = torch_alone(
            torch_class, options, start[row], past, [rates[row].item()] * len(past)
        )
        torch.testing.assert_close(ours[row], theirs)


@every_case
@pytest.mark.parametrize("rate", [0.1, torch.tensor([[0.1], [0.2]])])
def test_gradients_are_only_read(spec, torch_class, options, rate):
    """Others may hold the same gradients, so no update writes to them."""
    optimiser = make_optimiser(spec)
    parameters, gradients = matrices(2), matrices(2, seed=1)
    before, start = gradients.clone(), parameters.clone()
    state = new_state(optimiser, parameters)
    for steps in ([0, 0], [1, 0]):
        optimiser.descend_(parameters, gradients, state, steps, rate)
    assert torch.equal(gradients, before)
    assert not torch.equal(parameters, start)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_no_rows_are_no_work(name):
    """An empty batch is allowed and leaves no trace."""
    optimiser = make_optimiser(name)
    parameters = matrices(0)
    optimiser.descend_(parameters, matrices(0), new_state(optimiser, parameters), [], 0.1)
    assert parameters.shape == (0, WIDTH)


def test_parameters_that_require_gradients_may_be_updated():
    """An update is no part of what autograd records."""
    parameters = torch.ones(1, 2, requires_grad=True)
    Sgd().descend_(parameters, torch.ones(1, 2), {}, [0], 0.5)
    assert torch.equal(parameters.detach(), torch.full((1, 2), 0.5))


def test_only_what_an_optimiser_remembers_has_a_slot():
    """Options that need no memory cost none."""
    assert Sgd().slots == ()
    assert Sgd(momentum=0.9).slots == ("momentum",)
    assert Adam().slots == AdamW().slots == ("first", "second")
    assert Adagrad().slots == ("sum_of_squares",)
    assert RMSprop().slots == ("second",)
    assert RMSprop(momentum=0.9, centered=True).slots == ("second", "first", "momentum")
    assert Adagrad(initial_accumulator_value=0.5).initial("sum_of_squares") == 0.5
    assert Adam().initial("second") == 0.0


@given(
    st.builds(
        Sgd,
        momentum=st.floats(0.1, 1, exclude_max=True),
        nesterov=st.booleans(),
        weight_decay=st.floats(0, 1),
    )
    | st.builds(Adam, beta1=st.floats(0, 0.99), epsilon=st.floats(0, 1))
    | st.builds(AdamW, weight_decay=st.floats(0, 1))
    | st.builds(Adagrad, initial_accumulator_value=st.floats(0, 1))
    | st.builds(RMSprop, alpha=st.floats(0, 0.99), centered=st.booleans())
)
def test_an_optimiser_prints_the_spec_that_makes_it(optimiser):
    """make_optimiser(str(x)) == x, and an optimiser passes through as it is."""
    assert make_optimiser(str(optimiser)) == optimiser
    assert make_optimiser(optimiser) is optimiser


def test_defaults_are_not_printed():
    """A spec says what is special."""
    assert str(make_optimiser("sgd:nesterov=true,momentum=0.9")) == "sgd:momentum=0.9,nesterov=true"
    assert [str(make_optimiser(name)) for name in OPTIMISERS] == list(OPTIMISERS)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("sdg", "unknown optimiser 'sdg'; did you mean 'sgd'?"),
        ("sgd:momentun=0.9", "unknown sgd option 'momentun'; did you mean 'momentum'?"),
        ("sgd:momentum=big", "sgd: momentum must be a number, got 'big'"),
        ("sgd:momentum=2", "sgd: momentum must be at least 0 and below 1, got 2.0"),
        ("sgd:momentum=-1", "sgd: momentum must be at least 0 and below 1, got -1.0"),
        (
            "sgd:nesterov",
            "sgd: nesterov needs momentum above 0 and dampening 0, got momentum=0.0, "
            "dampening=0.0; try momentum=0.9",
        ),
        ("adam:beta2=1", "adam: beta2 must be at least 0 and below 1, got 1.0"),
        ("adamw:epsilon=inf", "adamw: epsilon must be a finite number of at least 0, got inf"),
        (
            "adagrad:weight_decay=-1",
            "adagrad: weight_decay must be at least 0, got -1.0",
        ),
        ("rmsprop:alpha=-0.1", "rmsprop: alpha must be at least 0 and below 1, got -0.1"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused(spec, sentence):
    """One sentence with what was got and what was expected."""
    with pytest.raises(ConfigurationError) as failure:
        make_optimiser(spec)
    assert str(failure.value) == sentence


@settings(max_examples=30)
@given(st.integers(1, 200), st.floats(0.01, 100), st.integers(0, 1000))
def test_one_row_is_clipped_as_torch_clips_one_gradient(width, max_norm, seed):
    """Bit for bit, whether or not the gradient is too long."""
    gradients = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    parameter = torch.zeros(width, requires_grad=True)
    parameter.grad = gradients[0].clone()
    torch.nn.utils.clip_grad_norm_(parameter, max_norm)
    assert torch.equal(clip_rows(gradients, max_norm)[0], parameter.grad)


def test_rows_are_clipped_one_by_one():
    """A long row does not shorten its neighbours, a short row stays, and the input is kept."""
    gradients = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    before = gradients.clone()
    clipped = clip_rows(gradients, 1.0)
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]])
    torch.testing.assert_close(clipped, expected)
    assert torch.equal(clipped[1:3], gradients[1:3])
    assert torch.equal(gradients, before)
