"""Options of all tasks: smoothed labels, ghost batches, normalised weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.tasks import make_task
from gossamer.tasks.published.variants import smoothed, with_ghost_batches, with_weight_norm


def test_smoothed_labels_are_those_of_torch():
    """The same loss as torch's cross-entropy with label smoothing."""
    scores, targets = torch.randn(6, 5), torch.randint(5, (6,))
    theirs = functional.cross_entropy(scores, targets, label_smoothing=0.2)
    torch.testing.assert_close(smoothed(0.2)(scores, targets), theirs)


def test_a_model_trained_on_smoothed_labels_is_judged_by_the_plain_loss():
    """With nine tenths of a label spread the best answer gives the right class 0.19, so the plain
    loss comes to -log 0.19 = 1.66 and no lower; plain training gets below 1."""
    plain, even = (
        gossamer.simulate(f"digits-mlp{option}", "all_reduce", "equal-8", epochs=4)
        for option in ("", ":label_smoothing=0.9")
    )
    assert plain.loss < 1.0
    assert even.loss > 1.5


def test_ghost_batches_are_normalised_part_by_part():
    """Two halves of a batch come out as each alone; running statistics follow one after the other;
    in evaluation there are no parts."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 3, 4, 4)
    ghost, plain = nn.Sequential(nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
    assert with_ghost_batches(ghost, 4) == 1
    expected = torch.cat([plain(inputs[:4]), plain(inputs[4:])])
    torch.testing.assert_close(ghost(inputs), expected)
    torch.testing.assert_close(ghost[0].running_var, plain.running_var)
    torch.testing.assert_close(ghost.eval()(inputs), plain.eval()(inputs))


def test_weight_norm_keeps_the_function_and_splits_length_from_direction():
    """The model computes what it did, and the gradient of a direction is at right angles to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    inputs = torch.randn(5, 4)
    before = model(inputs)
    with_weight_norm(model)
    torch.testing.assert_close(model(inputs), before)
    model(inputs).square().sum().backward()
    direction = model[0].parametrizations.weight.original1
    along = (direction * direction.grad).sum(1)
    torch.testing.assert_close(along, torch.zeros(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ["vector", "loop"])
def test_a_task_with_normalised_weights_trains(engine):
    """Together and one after the other, with the same result to rounding."""
    run = gossamer.simulate(
        "digits-mlp:weight_norm=true", "all_reduce", "equal-8", epochs=3, engine=engine, seed=1
    )
    assert run.accuracy > 0.8
    assert not run.notices


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("digits-mlp:ghost=8", "does not have; leave out ghost"),
        ("quadratic:label_smoothing=0.1", "the cross-entropy of classes, which quadratic is not"),
        ("digits-mlp:label_smoothing=2", "label_smoothing must be at least 0 and below 1, got 2"),
    ],
)
def test_changes_that_make_no_sense_are_refused(spec, says):
    """One sentence."""
    with pytest.raises(ConfigurationError, match=says):
        make_task(spec).make_model()
