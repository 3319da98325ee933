"""A run says what it needs, computes as many gradients at once as fit, and refuses what cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer import Data, Task
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError
from gossamer.sim.memory import forecast as module
from gossamer.sim.memory.forecast import activation_bytes, forecast
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel
from support import cluster_of, digits


def settings_of(workers: int, **choices: Any) -> Settings:
    return make_settings(
        digits(), "all_reduce", cluster_of(workers), batch=16, epochs=0.2, **choices
    )


def with_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def memory_of(device: torch.device) -> int:
        return size

    monkeypatch.setattr(module, "memory_of", memory_of)


def test_the_width_is_halved_until_the_run_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows from the settings and the total memory alone, and the run records it."""
    settings = settings_of(64)
    model = FlatModel(settings.task, torch.device("cpu"), seed=0)
    whole = forecast(settings, model)
    assert (whole.width, whole.notices()) == (128, [])
    with_memory(monkeypatch, int((whole.bytes - whole.row_bytes * 40) / 0.85))
    simulation = Simulation(settings)
    assert simulation.settings.width == 16
    result = simulation.run()
    assert any("16 at a time" in notice for notice in result.notices)
    assert result.mean_width == 64  # the engine cuts it, and the batch of the run stays


def test_what_cannot_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence before anything runs."""
    with_memory(monkeypatch, 3_000_000)
    with pytest.raises(
        ConfigurationError, match=r"cannot fit into memory: 200 workers need .*at most \d+ workers"
    ):
        Simulation(settings_of(200))
    assert Simulation(settings_of(200, engine="none")).run().epochs >= 0.2


def test_activations_are_what_backward_needs_of_a_sample() -> None:
    """Counted from the tensors that autograd saves, without the parameters."""
    model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 1))
    data = Data(torch.zeros(8, 10), torch.zeros(8, 1))
    task = Task.of(model, nn.functional.mse_loss, (data.inputs, data.targets), metric=None)
    found = activation_bytes(FlatModel(task, torch.device("cpu"), seed=0))
    # The inputs, the 100 numbers behind the rectifier, and the output and target for the loss.
    assert 4 * (10 + 100) <= found <= 4 * (10 + 100 + 4)
