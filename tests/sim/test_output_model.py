"""The model that a run hands out: whole, with statistics of its own, worth what was reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.train.worker_main import run_worker
from gossamer.real.transports.local import LocalTransport
from gossamer.runs.result import Result
from gossamer.sim.simulation import Simulation
from gossamer.tasks import Data, Task
from gossamer.tasks.evaluator import Evaluator
from support import cluster_of, digits


def deep() -> nn.Module:
    """Three layers with BatchNorm: one of centre and workers apart is at chance after that."""
    layers: list[nn.Module] = []
    for inputs in (64, 48, 48):
        layers += [nn.Linear(inputs, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(48, 10))


def own_averages() -> nn.Module:
    """Layers that average over batches each in its own way."""
    return nn.Sequential(
        nn.Linear(64, 12), nn.BatchNorm1d(12, momentum=0.5), nn.ReLU(),
        nn.Linear(12, 12), nn.BatchNorm1d(12, momentum=None), nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


class Noisy(nn.Module):
    """Draws from torch's own generator while it trains, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.2), own_averages())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs + torch.rand(()) if self.training else inputs)


class Tied(nn.Module):
    """A tied and a frozen parameter, a counter and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.middle = nn.Linear(16, 16, bias=False)
        self.again = nn.Linear(16, 16, bias=False)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 10)
        self.register_buffer("format", torch.tensor(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        return self.last(self.frozen(self.again(self.middle(hidden).relu()).relu()))


def task_with(make_model: Callable[[], nn.Module], samples: int | None = None) -> Task:
    known = digits()
    train = Data(known.train.inputs[:samples], known.train.targets[:samples])
    return dataclasses.replace(known, name="own", make_model=make_model, train=train)


def run(task: Task, method: str, workers: int = 4, **choices: object) -> Result:
    given = {"epochs": 0.5, "evaluations": 1, "learning_rate": 0.1, "engine": "loop", **choices}
    return simulate(task, method, cluster_of(workers), **given)


def accuracy_of(task: Task, state: dict[str, Tensor], members: int = 1) -> float:
    """Of a model of the task's own, made elsewhere and loaded with what the run gave."""
    made = [task.make_model() for _ in range(members)]
    model = made[0] if members == 1 else nn.ModuleList(made)
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        prediction = torch.stack([one(task.test.inputs).softmax(-1) for one in made]).mean(0)
    return float((prediction.argmax(-1) == task.test.targets).float().mean())


# ---------------------------------------------------------------------- statistics


def test_the_centre_has_statistics_of_its_own() -> None:
    """EASGD with a period of 10 and 16 workers of 4 images each: the workers are far apart, and
    with the average of their statistics the centre is hardly better than chance."""
    settings = make_settings(
        task_with(deep), "easgd:period=10", cluster_of(16), epochs=3, batch=4, learning_rate=0.03,
        evaluations=1,
    )  # fmt: skip
    simulation = Simulation(settings)
    result = simulation.run()
    averaged = Evaluator(simulation.model, "centre", "averaged").score(simulation.held())
    assert averaged.metric is not None
    assert averaged.metric < 0.3
    assert result.accuracy > 0.6


def test_recomputing_costs_no_virtual_time_and_no_samples() -> None:
    """Events, parameters, samples and the clock are those of a run with averaged statistics."""
    first, second = (
        run(task_with(deep), "easgd", epochs=0.2, buffers=buffers)
        for buffers in ("recomputed", "averaged")
    )
    assert first.loss != second.loss
    for what in ("digest", "parameters_digest", "samples", "virtual_seconds"):
        assert getattr(first, what) == getattr(second, what)


def test_recomputed_statistics_are_exact_whatever_momentum_a_layer_has() -> None:
    """Each layer's are those of the batch, also where layers average over batches differently."""
    task = task_with(own_averages, samples=128)
    expected = run(task, "d_psgd", batch=8, epochs=2, buffers="recomputed").state_dict()
    model = task.make_model()
    model.load_state_dict(expected)
    seen: dict[str, Tensor] = {}
    for name in ("1", "4"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: seen.update({name: given[0]})
        )
    with torch.no_grad():
        model(task.train.inputs)
    for name, given in seen.items():
        torch.testing.assert_close(expected[f"{name}.running_mean"], given.mean(0))
        torch.testing.assert_close(expected[f"{name}.running_var"], given.var(0))


def test_recomputing_leaves_torchs_generator_alone() -> None:
    """Whatever the model draws when its statistics are recomputed, the user's numbers follow."""
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    run(task_with(Noisy), "easgd", epochs=0.05)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("method", "workers"),
    [("all_reduce", 4), ("sync_server", 4), ("local_sgd", 1), ("ad_psgd", 1), ("downpour", 1)],
)
def test_statistics_of_the_model_that_is_trained_stay_as_they_are(
    method: str, workers: int
) -> None:
    """Where every gradient is taken at the output model its statistics are its own already."""
    first, second = (
        run(task_with(own_averages), method, workers, epochs=0.2, **choices)
        for choices in ({}, {"buffers": "averaged"})
    )
    assert [row["loss"] for row in first.history] == [row["loss"] for row in second.history]
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_more_batches_may_be_asked_for() -> None:
    """With batches enough for all training data; a number that is none is refused."""
    few, many = (
        run(task_with(deep), "d_psgd", buffers=policy).state_dict()["1.running_mean"]
        for policy in ("recomputed:1", "recomputed:99")
    )
    assert not torch.equal(few, many)
    for wrong in ("recomputed:", "recomputed:0", "recomputed:two", "averaged:3"):
        with pytest.raises(ConfigurationError, match=r"as in recomputed:16"):
            make_settings(digits(), "d_psgd", cluster_of(2), buffers=wrong)


# ---------------------------------------------------------------------- the whole model


@pytest.mark.parametrize("make_model", [deep, own_averages, Tied])
@pytest.mark.parametrize("method", ["easgd", "ad_psgd", "all_reduce", "ensemble"])
def test_the_state_dict_is_worth_what_was_reported(
    method: str, make_model: Callable[[], nn.Module]
) -> None:
    """Loaded into a model that the task makes, it classifies as the run said."""
    task = task_with(make_model)
    result = run(task, method, batch=16)
    found = accuracy_of(task, result.state_dict(), 4 if method == "ensemble" else 1)
    assert found == pytest.approx(result.accuracy, abs=0.003)


def test_a_result_is_shown_in_one_line() -> None:
    """Not as all of its tensors."""
    result = run(digits(), "push_sum")
    assert len(repr(result)) < 200
    assert repr(result).startswith("<Result: push_sum on digits-mlp, 4 workers, epochs 0.")
    assert f"accuracy {result.accuracy:.4g}" in repr(result)


def test_a_real_run_keeps_the_model_that_it_reports(tmp_path: Path) -> None:
    """`model.safetensors` in the folder of `gossamer train`, statistics included."""
    task = task_with(deep)
    settings = make_settings(task, "easgd", Cluster(workers=1), epochs=0.5, learning_rate=0.1)
    log = WorkerLog(tmp_path, 0)
    assert run_worker(TrainRequest(settings, tmp_path), LocalTransport(), log) == 0
    state = load_file(tmp_path / "model.safetensors")
    assert set(state) == set(task.make_model().state_dict())
    (last,) = [line for line in log.path.read_text().splitlines() if '"kind": "result"' in line]
    assert f'"accuracy": {accuracy_of(task, state)}' in last
