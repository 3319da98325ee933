"""The loss on the lines between models, which shows whether their weights may be averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gossamer
from command_line import gossamer as command
from gossamer.consolidate.models import TrainedModels
from gossamer.consolidate.path import ModelPath, paths_between, paths_between_workers
from gossamer.contract.small_worlds import cluster_of
from gossamer.errors import ConfigurationError
from support import bowl


def test_the_loss_on_a_line_through_a_quadratic_is_the_parabola_of_its_ends() -> None:
    """It lies below the straight line between the losses of the ends, so there is no barrier."""
    paths = paths_between_workers(bowl(), "ensemble", cluster_of(3), epochs=0.5, points=5)
    assert len(paths) == 2
    for one in paths:
        first, quarter, middle, *_, last = one.losses
        bend = (first + last) / 2 - middle  # a parabola's second difference decides all of it
        assert quarter == pytest.approx((3 * first + last) / 4 - 0.75 * bend, rel=1e-3)
        assert bend >= 0
        assert one.barrier == pytest.approx(0.0, abs=1e-6)
        assert one.may_be_averaged


def test_ends_and_middle_are_the_models_and_their_mean() -> None:
    """Measured as models, the same figures come out."""
    result = gossamer.simulate("digits-mlp", "ensemble", cluster_of(2), epochs=2, evaluations=1)
    models = TrainedModels.of(result)
    (one,) = paths_between(models, 3)
    first, last = models.members
    data = models.task.test
    assert one.losses[0] == models.score(first.value, first.buffers, data)[0]
    assert one.losses[2] == models.score(last.value, last.buffers, data)[0]
    middle = torch.lerp(first.value, last.value, 0.5)
    assert one.losses[1] == models.score(middle, first.buffers, data)[0]


def test_a_barrier_forbids_averaging() -> None:
    """A model and its mirror image have a mean that knows nothing."""
    barred = ModelPath(("a", "b"), (0.2, 1.9, 0.4), (0.9, 0.1, 0.9), 1.0)
    assert barred.barrier == pytest.approx(1.6)
    assert not barred.may_be_averaged


def test_few_points_and_single_models_are_refused() -> None:
    """In one sentence each."""
    result = gossamer.simulate("digits-mlp", "all_reduce", cluster_of(2), epochs=0.5)
    models = TrainedModels.of(result)
    with pytest.raises(ConfigurationError, match="a line needs two models"):
        paths_between(models, 3)
    with pytest.raises(ConfigurationError, match="points must be odd"):
        paths_between(models, 4)


def test_the_command_shows_strangers_and_siblings(tmp_path: Path) -> None:
    """Models of other initial weights cannot be averaged, workers that average often can."""
    said = command(
        "lab", "path", "--methods", "local_sgd", "--workers", "2", "--points", "3", "--json",
        "--runs", str(tmp_path),
    )  # fmt: skip
    assert said.status == 0, said.err
    paths = said.json["paths"]
    assert not any(one["may_be_averaged"] for one in paths["other initial weights"])
    assert all(one["may_be_averaged"] for one in paths["local_sgd"])
    (folder,) = tmp_path.iterdir()
    assert (folder / "summary.json").exists()
