"""LARS and LAMB equal references that are written down from the papers, in rows and in loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gossamer
from gossamer.optim.optimisers import make_optimiser

SHAPES = ((5, 7), (7,), (3, 2, 2, 2), (3,))
STEPS = 12


def lars_by_hand(weights, gradients, *, rate, momentum=0.9, trust=0.001, decay=0.0):
    """The recursion of You, Gitman and Ginsburg (2017), in double precision, tensor by tensor."""
    velocity = torch.zeros_like(weights)
    for gradient in gradients:
        local, direction = 1.0, gradient
        if weights.dim() > 1:
            local = trust * weights.norm() / (gradient.norm() + decay * weights.norm())
            direction = gradient + decay * weights
        velocity = momentum * velocity + rate * local * direction
        weights = weights - velocity
    return weights


def lamb_by_hand(weights, gradients, *, rate, decay=0.01, epsilon=1e-6):
    """Algorithm 2 of You et al. (2020), in double precision, tensor by tensor."""
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        ratio = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + epsilon)
        if weights.dim() > 1:
            ratio = ratio + decay * weights
            ratio = ratio * weights.norm() / ratio.norm()
        weights = weights - rate * ratio
    return weights


CASES = [
    ("lars:trust=0.02,weight_decay=0.1", gossamer.Lars, {"trust": 0.02, "weight_decay": 0.1}),
    ("lars", gossamer.Lars, {}),
    ("lamb", gossamer.Lamb, {}),
    ("lamb:weight_decay=0.2", gossamer.Lamb, {"weight_decay": 0.2}),
]


def by_hand(spec, options, start, gradients, rate):
    renamed = {{"weight_decay": "decay"}.get(name, name): value for name, value in options.items()}
    made = lars_by_hand if spec.startswith("lars") else lamb_by_hand
    return made(start, gradients, rate=rate, **renamed)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


@pytest.mark.parametrize(("spec", "made", "options"), CASES)
def test_rows_equal_the_papers_recursion(spec, made, options):
    """Three workers in one matrix, each with gradients of its own: to 1e-6 of the reference."""
    optimiser = make_optimiser(spec).suited(SHAPES)
    starts = [tensors(row) for row in range(3)]
    gradients = [[tensors(100 * row + step) for step in range(STEPS)] for row in range(3)]
    flat = torch.stack([torch.cat([one.flatten() for one in start]) for start in starts])
    state = {slot: torch.zeros_like(flat) for slot in optimiser.slots}
    for step in range(STEPS):
        rows = [torch.cat([one.flatten() for one in own[step]]) for own in gradients]
        optimiser.descend_(flat, torch.stack(rows), state, [step] * 3, 0.05)
    for row in range(3):
        ours = flat[row].split([one.numel() for one in starts[row]])
        for number, start in enumerate(starts[row]):
            past = [gradient[number] for gradient in gradients[row]]
            theirs = by_hand(spec, options, start, past, 0.05)
            torch.testing.assert_close(ours[number].view_as(theirs), theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("spec", "made", "options"), CASES)
def test_a_loop_equals_the_papers_recursion(spec, made, options):
    """The torch optimiser, one parameter of which is not contiguous, and one without gradient."""
    starts = tensors(0)
    parameters = [nn.Parameter(start.clone()) for start in starts]
    parameters[0] = nn.Parameter(starts[0].t().clone().t())
    idle = nn.Parameter(torch.ones(2, 2))
    optimiser = made([{"params": parameters[:2]}, {"params": [*parameters[2:], idle]}], **options)
    for group in optimiser.param_groups:
        group["lr"] = 0.05
    gradients = [tensors(step + 1) for step in range(STEPS)]
    for own in gradients:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient.clone()
        optimiser.step()
    for number, start in enumerate(starts):
        theirs = by_hand(spec, options, start, [own[number] for own in gradients], 0.05)
        torch.testing.assert_close(parameters[number].detach(), theirs, rtol=1e-6, atol=1e-9)
    assert torch.equal(idle.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("spec", ["lars:momentum=0", "lamb:weight_decay=0"])
def test_a_layer_ten_times_as_large_moves_ten_times_as_far(spec):
    """That is the point of both: the update follows the norm of the weights, not the gradient's."""
    start, gradient = torch.randn(2, 1, 35, dtype=torch.float64)
    moves = []
    for weights, slope in ((start, gradient), (10 * start, gradient / 7)):
        optimiser = make_optimiser(spec).suited([(5, 7)])
        state = {slot: torch.zeros_like(start) for slot in optimiser.slots}
        ours = weights.clone()
        optimiser.descend_(ours, slope, state, [0], 0.1)
        moves.append(ours - weights)
    torch.testing.assert_close(moves[1], 10 * moves[0], rtol=1e-2, atol=0.0)


def test_a_checkpoint_of_a_loop_goes_on_where_it_was():
    """`state_dict` holds all that the optimiser remembers."""
    gradients = [torch.randn(4, 3) for _ in range(6)]

    def trained(parts):
        parameter, kept = nn.Parameter(torch.ones(4, 3)), None
        for part in parts:
            optimiser = gossamer.Lamb([parameter])
            if kept is not None:
                optimiser.load_state_dict(kept)
            for gradient in part:
                parameter.grad = gradient
                optimiser.step()
            kept = optimiser.state_dict()
        return parameter.detach()

    assert torch.equal(trained([gradients]), trained([gradients[:2], gradients[2:]]))


def test_weights_of_zero_begin_to_move():
    """A layer that starts at zero has no norm to follow."""
    for spec in ("lars", "lamb"):
        optimiser = make_optimiser(spec).suited([(2, 2)])
        ours = torch.zeros(1, 4)
        state = {slot: torch.zeros_like(ours) for slot in optimiser.slots}
        optimiser.descend_(ours, torch.ones(1, 4), state, [0], 0.1)
        assert ours.isfinite().all()
        assert (ours < 0).all()


def test_lars_and_lamb_train_in_the_simulator():
    """All optimisers of the table train a task from one spec."""
    for optimiser in ("lars:trust=0.001", "lamb"):
        result = gossamer.simulate("digits-mlp", "all_reduce", optimiser=optimiser, epochs=4.0)
        assert result.accuracy > 0.85, optimiser
