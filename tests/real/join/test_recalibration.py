"""What a worker keeps of the batches that pass through its model, and what it does not touch."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

from gossamer.real.join.recalibration import Recalibration


def net() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_layers_that_the_loop_keeps_in_evaluation_mode_keep_their_statistics() -> None:
    """Also where the batches are given by hand and nothing has passed through the model before."""
    model = net()
    frozen, moved = model[0].eval(), model[2]
    frozen.running_mean.fill_(7.0)
    recalibration = Recalibration(model, 4, is_needed=True)
    recalibration.take([torch.randn(8, 4) for _ in range(3)], None)
    assert recalibration.recompute(warns=True) == 3
    assert frozen.running_mean.tolist() == [7.0] * 4
    assert not frozen.training
    assert moved.running_mean.abs().max() > 0.0


def test_a_copy_or_a_file_of_the_model_takes_no_batches_along() -> None:
    """An average of models, or `torch.save(model)`, would hold the training data."""
    model = net()
    recalibration = Recalibration(model, 8, is_needed=True)
    before = io.BytesIO()
    torch.save(net(), before)
    for _ in range(8):
        model(torch.randn(512, 4))
    another = copy.deepcopy(model)
    another(torch.randn(512, 4))
    after = io.BytesIO()
    torch.save(model, after)
    assert after.tell() < before.tell() + 1000
    assert recalibration.recompute(warns=True) == 8


def test_what_is_kept_is_bounded_when_batches_grow() -> None:
    """However many small ones there were before."""
    model = net()
    recalibration = Recalibration(model, 32, is_needed=True)
    for _ in range(40):
        model(torch.randn(2, 4))
    large = torch.randn(1 << 18, 4)
    for _ in range(8 * 6):
        model(large)
    kept = sum(size for _, size in recalibration._passes)  # pyright: ignore[reportPrivateUsage]
    assert kept <= (64 << 20) + large.nbytes
