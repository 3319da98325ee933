"""Workers that train apart and look at each other: codistillation and population based training."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gossamer
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.observe.lineage import ancestry
from gossamer.optim.optimisers import Sgd
from gossamer.optim.tuning import tuned_value
from gossamer.sim.replica_matrix import ReplicaStore, SimulatedReplica
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel
from gossamer.worker import Lesson
from support import build, cluster_of, digits, rows

EQUAL = cluster_of(4, distribution="constant")


def ran(method: str, **choices: Any) -> Simulation:
    simulation = build(digits(), method, EQUAL, steps=40, split="sharded", seed=2, **choices)
    simulation.run()
    return simulation


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_codistillation_of_weight_0_is_independent_training(engine: str) -> None:
    """Teachers are read and predict, and nothing of it moves any worker."""
    apart = ran("ensemble", engine=engine)
    taught = ran("codistill:weight=0,burn_in=0", engine=engine)
    torch.testing.assert_close(rows(taught), rows(apart), rtol=1e-5, atol=1e-6)
    assert taught.world.metrics.exchanges > 0


def test_codistillation_moves_whom_it_teaches() -> None:
    """The law above could hold of a lesson that nobody hears."""
    assert not torch.allclose(rows(ran("codistill:burn_in=0")), rows(ran("ensemble")), atol=1e-3)


def test_a_lesson_is_the_cross_entropy_against_the_mean_prediction() -> None:
    """The gradient of loss + weight * psi (Anil et al. 2018), by an independent computation; no
    gradient passes through a teacher."""
    task, weight = digits(), 0.7
    model = FlatModel(task, torch.device("cpu"), seed=0)
    torch.manual_seed(1)
    teachers = [model.initial + 0.1 * torch.randn_like(model.initial) for _ in range(2)]
    batch = torch.arange(16)
    lesson = Lesson(teachers, weight)
    found, loss, _ = model.gradient(model.initial, model.initial_buffers, batch, 5, lesson)
    beside, _, _ = model.gradient(
        lesson.beside(model.initial), model.initial_buffers, batch, 5
    )  # fmt: skip
    assert torch.equal(found, beside)
    inputs, labels = task.train.at(batch)
    module = task.make_model()

    def output_at(flat: torch.Tensor) -> torch.Tensor:
        vector_to_parameters(flat, module.parameters())
        return module(inputs)

    with torch.no_grad():
        mean = torch.stack([output_at(one).softmax(-1) for one in teachers]).mean(0)
    output = output_at(model.initial)
    expected = (
        functional.cross_entropy(output, labels)
        - weight * (mean * output.log_softmax(-1)).sum(-1).mean()
    )
    expected.backward()
    gradients = parameters_to_vector([p.grad for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-6)


def test_both_engines_teach_models_with_statistics_and_dropout_alike() -> None:
    """Teachers normalise by the batch and drop nothing out, traced as well as one by one."""

    def made() -> nn.Module:
        hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        return nn.Sequential(hidden, nn.Dropout(0.2), nn.Linear(16, 10))

    task = dataclasses.replace(digits(), name="normalised", make_model=made)
    found = []
    for engine in ("vector", "loop"):
        simulation = build(task, "codistill:burn_in=0,teachers=2", EQUAL, steps=40,
                           split="sharded", engine=engine)  # fmt: skip
        assert simulation.run().notices == []
        found.append(rows(simulation))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_teachers_cost_their_forward_passes() -> None:
    """A step with T teachers takes 1 + T f times as long, f being the share of the forward pass."""
    cluster = cluster_of(4, distribution="constant", latency=0.0)
    share = cluster.compute.forward_share

    def seconds(method: str) -> float:
        return build(digits(), method, cluster, steps=20, engine="none").run().virtual_seconds

    ratio = seconds("codistill:burn_in=0,period=20,teachers=3") / seconds("ensemble")
    assert ratio == pytest.approx(1 + 3 * share, rel=0.01)


def test_stages_have_no_teachers() -> None:
    """No machine holds a whole model that could predict."""
    settings = make_settings("digits-mlp", "codistill:stages=2", "equal-8", epochs=0.5)
    with pytest.raises(ConfigurationError, match="teachers predict with whole models"):
        Simulation(settings).run()


# ---------------------------------------------------------------------- populations


@pytest.fixture(scope="module")
def population() -> gossamer.Result:
    return gossamer.simulate(
        "digits-mlp", "pbt", "equal-8", epochs=8, seed=3, optimiser="sgd:momentum=0.9",
        schedule="cosine", evaluations=1,
    )  # fmt: skip


def test_a_lineage_is_consistent(population: gossamer.Result) -> None:
    """Every life but the first begins as a copy of a life that was there, and has its settings,
    each a fifth larger or smaller."""
    entries = population.summary["lineage"]
    lives = {(one["worker"], one["life"]): one for one in entries}
    assert len(lives) == len(entries)
    assert {who for who, life in lives if life == 0} == set(range(8))
    copies = [one for one in entries if one["parent"] is not None]
    assert len(copies) > 8
    for one in copies:
        parent = lives[one["parent"], one["parent_life"]]
        assert parent["worker"] != one["worker"]
        assert parent["seconds"] < one["seconds"]
        assert set(one["factors"]) == {"learning_rate", "momentum", "schedule"}
        for name, factor in one["factors"].items():
            ratio = factor / parent["factors"][name]
            assert min(abs(ratio - 1.2), abs(ratio - 0.8)) < 1e-5
    for worker in range(8):
        line = ancestry(entries, worker)
        assert line[0]["parent"] is None
        assert line[-1]["worker"] == worker


def test_the_first_worker_has_what_was_asked_for(population: gossamer.Result) -> None:
    """And the others' beginnings are within the spread."""
    firsts = [one for one in population.summary["lineage"] if one["life"] == 0]
    for one in firsts:
        for factor in one["factors"].values():
            assert factor == 1.0 if one["worker"] == 0 else 1 / 3 <= factor <= 3


def test_a_copy_is_exact() -> None:
    """What a worker goes on with is bit for bit what the better one had when it answered."""
    simulation = build(digits(), "pbt:period=4", EQUAL, steps=40, seed=1)
    seen: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []
    for replica in simulation.world.replicas:
        usual = replica.snapshot, replica.assign_

        def snapshot(usual: Any = usual) -> torch.Tensor:
            seen.append(usual[0]())
            return seen[-1]

        def assign_(value: torch.Tensor, usual: Any = usual) -> None:
            copied.append(value.clone())
            usual[1](value)

        _Watched.watch(replica, snapshot, assign_)
    simulation.run()
    assert copied
    assert all(any(torch.equal(one, held) for held in seen) for one in copied)


class _Watched(SimulatedReplica):
    """A replica that tells of its copies."""

    __slots__ = ("told",)
    told: Any

    @staticmethod
    def watch(replica: SimulatedReplica, snapshot: Any, assign_: Any) -> None:
        # Replicas have slots, so the methods are put into a class of its own.
        own = type("Own", (SimulatedReplica,), {
            "__slots__": (), "snapshot": lambda self: snapshot(),
            "assign_": lambda self, value: assign_(value),
        })  # fmt: skip
        replica.__class__ = own


def test_one_member_is_plain_training_with_one_life() -> None:
    """That the bits are those of plain training is a law of the contract."""
    result = gossamer.simulate("digits-mlp", "pbt", cluster_of(1), epochs=1, evaluations=1)
    (only,) = result.summary["lineage"]
    assert only["parent"] is None
    assert set(only["factors"].values()) == {1.0}


def test_what_is_tuned_is_named() -> None:
    """A name that the optimiser does not have is refused with those that it has."""
    with pytest.raises(ConfigurationError, match=r"beta1.*learning_rate"):
        gossamer.simulate("digits-mlp", "pbt:tune=beta1", cluster_of(2), epochs=0.5)
    result = gossamer.simulate(
        "digits-mlp", "pbt:tune=learning_rate", cluster_of(2), epochs=0.5, evaluations=1
    )
    assert all(set(one["factors"]) == {"learning_rate"} for one in result.summary["lineage"])


def test_a_tuned_row_descends_as_torch_does_with_these_numbers() -> None:
    """Rate, momentum and weight decay of one row are its own, and those of another row are not."""
    torch.manual_seed(0)
    start, gradients = torch.randn(6), torch.randn(5, 6)
    optimiser = Sgd(momentum=0.9, weight_decay=0.01)
    store = ReplicaStore(2, start, optimiser)
    rows = [SimulatedReplica(store, row, lambda pace: 0.1, lambda *_: None) for row in (0, 1)]
    factors = {"learning_rate": 2.0, "momentum": 3.0, "weight_decay": 0.5}
    rows[1].tune_(factors)
    own = [
        (0.1, 0.9, 0.01),
        (0.2, tuned_value("momentum", 0.9, 3.0), 0.005),
    ]
    for row, (rate, momentum, decay) in zip(rows, own, strict=True):
        parameter = torch.nn.Parameter(start.clone())
        theirs = torch.optim.SGD([parameter], lr=rate, momentum=momentum, weight_decay=decay)
        for gradient in gradients:
            row.descend_(gradient)
            parameter.grad = gradient.clone()
            theirs.step()
        torch.testing.assert_close(row.snapshot(), parameter.detach(), rtol=1e-6, atol=1e-7)
    assert tuned_value("momentum", 0.9, 3.0) == pytest.approx(0.7)
