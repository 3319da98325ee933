"""Replicas of several machines in virtual time: what changes is time, unless layers have ages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.func import functional_call

from gossamer.config.cluster import Cluster, Compute
from gossamer.config.faults import Fault
from gossamer.config.network import Wires
from gossamer.contract.small_worlds import build, digits
from gossamer.errors import ConfigurationError
from gossamer.runs.result import Result
from gossamer.sim.engine import make_engine
from gossamer.sim.pipelines.pipeline import Pipeline
from gossamer.sim.pipelines.split_point import SplitPointModel
from gossamer.sim.simulation import Simulation, simulate
from gossamer.tasks.flat_model import FlatModel
from tiers import only

QUIET = Compute(0.0, per_sample=0.001, distribution="constant", jitter=0.0)
FREE = Wires(bandwidth=1e18, latency=0.0)


def quiet(workers: int, *faults: Fault, network: Wires = FREE) -> Cluster:
    """Machines of one speed on links that cost nothing."""
    return Cluster(workers=workers, compute=QUIET, network=network, faults=faults)


def ran(method: str, cluster: Cluster, steps: int = 12, **choices: object) -> Result:
    return simulate(
        "digits-mlp", method, cluster, batch=16, evaluations=1, seed=3,
        epochs=steps * 16 * max(1, cluster.workers // shape_of(method)) / 1437, **choices,
    )  # fmt: skip


def shape_of(method: str) -> int:
    from gossamer.methods import parse_method

    return parse_method(method).shape.machines


METHODS = ["all_reduce", "d_psgd", "local_sgd:period=4", "push_sum"]
PIPELINES = ["1f1b", "gpipe", "interleaved,cut=1/2/3", "zbv,cut=1/2/3", "looped_bfs,cut=1/2/3"]


@pytest.mark.parametrize("method", only(METHODS[:1], METHODS))
def test_a_pipeline_changes_time_and_nothing_else(method: str) -> None:
    """Four pipelines of two end with the parameters of four workers: the sum over micro-batches is
    the whole batch's gradient, in another order."""
    comma = "," if ":" in method else ":"
    plain = ran(method, quiet(4))
    split = ran(f"{method}{comma}stages=2,microbatches=4", quiet(8))
    torch.testing.assert_close(plain.parameters, split.parameters, rtol=1e-5, atol=1e-5)
    assert split.virtual_seconds < plain.virtual_seconds


@pytest.mark.parametrize("pipeline", ["pipedream", "pipemare", "2bw", "gpipe"])
def test_one_stage_is_plain_training(pipeline: str) -> None:
    """Events and bits."""
    plain, one = ran("ad_psgd", quiet(4)), ran(f"ad_psgd:pipeline={pipeline}", quiet(4))
    assert (plain.digest, plain.parameters.tolist()) == (one.digest, one.parameters.tolist())


def bare(pipeline: str, stages: int = 2, **choices: object) -> Simulation:
    """One replica by plain SGD, whose gradients' points can be looked at. Two workers make one
    replica, which then has twice as many steps."""
    return build(
        digits(), f"all_reduce:stages={stages},pipeline={pipeline}", quiet(stages),
        steps=8, batch=8, evaluations=1, optimiser="sgd", learning_rate=0.1, **choices,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pipeline", "ages"), [("pipedream", (1, 0)), ("vertical_sync", (1, 1)), ("2bw", (1, 1))]
)
def test_layers_have_the_ages_that_the_pipeline_gives_them(
    pipeline: str, ages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of step t is taken at w_s(t - age of s), for every stage s."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    point = Pipeline.point

    def noted(self: Pipeline, now: torch.Tensor) -> torch.Tensor:
        found = point(self, now)
        seen.append((now.clone(), found.clone()))
        return found

    monkeypatch.setattr(Pipeline, "point", noted)
    run = bare(pipeline)
    cut = run.settings.stage_cut()
    run.run()
    assert len(seen) == 16
    for step, (_, found) in enumerate(seen):
        for stage, age in enumerate(ages):
            for part in cut.slices(stage):
                assert torch.equal(found[part], seen[max(0, step - age)][0][part])


@pytest.mark.parametrize("method", ["all_reduce", "d_psgd"])
def test_the_staleness_of_a_run_is_that_of_its_oldest_stage(method: str) -> None:
    """After the first steps, which have nothing older, with methods that say what they have read
    and with those that do not."""
    run = ran(f"{method}:stages=2,pipeline=pipedream", quiet(4), engine="none")
    assert run.staleness == {0: 2, 1: run.summary["steps"] - 2}


def stagewise(
    parts: list[nn.Module], inputs: torch.Tensor, targets: torch.Tensor,
    forward: list[dict[str, torch.Tensor]], backward: list[dict[str, torch.Tensor]],
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """Every stage on its own: its forward pass with some weights, and later its backward pass, at
    the input that it has kept, with others."""
    given, value = [], inputs
    for part, weights in zip(parts, forward, strict=True):
        given.append(value)
        value = functional_call(part, weights, (value,))
    output = value.detach().requires_grad_()
    (back,) = torch.autograd.grad(nn.functional.cross_entropy(output, targets), [output])
    found: list[dict[str, torch.Tensor]] = []
    for part, weights, kept in zip(
        reversed(parts), reversed(backward), reversed(given), strict=True
    ):
        own = {name: w.detach().requires_grad_() for name, w in weights.items()}
        kept = kept.detach().requires_grad_()
        result = functional_call(part, own, (kept,))
        *grads, back = torch.autograd.grad(result, [*own.values(), kept], back)
        found.insert(0, dict(zip(own, grads, strict=True)))
    return found


@pytest.mark.parametrize("is_stashed", [True, False])
@pytest.mark.parametrize("engine", ["vector", "loop"])
def test_a_composite_gradient_is_that_of_stages_on_their_own(is_stashed: bool, engine: str) -> None:
    """Four layers, each with weights of another age. With stashing both passes of a stage use the
    same; without it, the backward pass uses newer ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10)]
    task = dataclasses.replace(digits(), make_model=lambda: nn.Sequential(*layers))
    kind = FlatModel if is_stashed else SplitPointModel
    model = kind(task, torch.device("cpu"), seed=0)
    old, new = torch.randn(2, model.layout.total) / 3
    point = old if is_stashed else torch.cat([new, old])
    batch = torch.arange(16)
    found = make_engine(engine, model).evaluate(
        point[None], model.initial_buffers[None], batch[None], torch.tensor([0])
    ).gradients[0][: model.layout.total]  # fmt: skip
    inputs, targets = task.train.at(batch)

    def by_layer(flat: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        named = model.layout.unpack(flat)
        return [
            {n.split(".")[1]: w for n, w in named.items() if n.startswith(f"{number}.")}
            for number in range(len(layers))
        ]

    assert isinstance(inputs, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    expected = stagewise(
        layers, inputs, targets, by_layer(old), by_layer(old if is_stashed else new)
    )
    flat = torch.cat([g.reshape(-1) for stage in expected for g in stage.values()])
    torch.testing.assert_close(found, flat, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pipeline", ["ampnet", "pipemare", "pipedream"])
def test_a_pipeline_that_goes_on_trains(pipeline: str) -> None:
    """Digits, to 90 %, in spite of the ages of its layers."""
    run = simulate(
        "digits-mlp", f"all_reduce:stages=2,pipeline={pipeline}", quiet(4), epochs=6, seed=1,
        evaluations=1, learning_rate=0.05,
    )  # fmt: skip
    assert run.accuracy > 0.9


def test_a_pipeline_that_is_never_emptied_makes_a_step_in_the_time_of_its_slowest_stage() -> None:
    """PipeDream with stages of equal work has no bubbles but the first."""
    cluster, task = quiet(2), digits()
    ends = []
    for steps in (10, 30):
        run = build(
            task, "all_reduce:stages=2,pipeline=pipedream", cluster, steps=steps, batch=8,
            evaluations=1, engine="none",
        )  # fmt: skip
        slowest = max(run.settings.stage_cut().shares)
        ends.append(run.run().summary["virtual_seconds"])
    assert (ends[1] - ends[0]) / (2 * 20) == pytest.approx(slowest * 8 * 0.001, rel=1e-6)


def test_a_slow_machine_slows_its_pipeline_and_no_other() -> None:
    """Without communication between replicas the others go on at their pace."""
    slow = Fault("slow", worker=1, amount=5.0)
    even, uneven = (
        ran("ensemble:stages=2,microbatches=4", cluster, engine="none").summary
        for cluster in (quiet(4), quiet(4, slow))
    )
    per_step = [[busy / 12 for busy in run["computing_seconds"]] for run in (even, uneven)]
    assert per_step[1][1] >= per_step[0][1] * 0.9
    assert uneven["virtual_seconds"] > even["virtual_seconds"]


def test_a_dead_machine_stops_its_replica_and_the_others_go_on() -> None:
    """Worker 3 is the second stage of the second replica."""
    run = ran("ad_psgd:stages=2", quiet(8, Fault("kill", worker=3, at=0.02)), steps=20)
    assert run.summary["living"] == 3
    assert run.summary["samples"] >= 20 * 16 * 4


def test_what_stages_send_is_counted() -> None:
    """Activations forward and gradients back, of each sample and step, on the cards of both."""
    run = build(
        digits(), "ensemble:stages=2", quiet(2, network=Wires(bandwidth=1e9)), steps=5, batch=8,
        evaluations=1, engine="none",
    )  # fmt: skip
    size = run.settings.stage_cut().sends(0) * 8 * (2 * 5)
    cards = run.run().summary["cards"]
    assert [(card["sent"], card["received"]) for card in cards] == [(size, size), (size, size)]


def test_servers_are_divided_like_the_stages() -> None:
    """DistBelief: what server 1 sends goes to the second stages only, and digits are learnt."""
    run = simulate(
        "digits-mlp", "downpour:stages=2,servers=2,server_optimiser=adagrad",
        quiet(4, network=Wires(bandwidth=1e9)), epochs=6, seed=1, evaluations=1,
    )  # fmt: skip
    sent = {card["name"]: card for card in run.summary["cards"]}
    larger = sent["server 0"]["sent"] / sent["server 1"]["sent"]
    assert larger == pytest.approx(4160 / 650, rel=0.1)
    assert run.accuracy > 0.9


@pytest.mark.parametrize(
    ("method", "workers", "said"),
    [
        ("all_reduce:stages=3", 8, "do not divide the 8"),
        ("all_reduce:stages=2,microbatches=3", 8, "cannot be divided into 3"),
        ("all_reduce:stages=4", 8, "with 3 parts cannot be cut into 4"),
        ("all_reduce:stages=2,groups=2", 8, "has no groups"),
        ("all_reduce:stages=2,pipeline=2bw,microbatches=1", 8, "at least as many"),
        ("all_reduce:stages=2,pipeline=pipedream,microbatches=4", 8, "passes whole batches on"),
        ("all_reduce:stages=2,cut=x", 8, "numbers of parts"),
        ("all_reduce:tensor=0", 8, "tensor must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_one_sentence(method: str, workers: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        simulate("digits-mlp", method, dataclasses.replace(quiet(1), workers=workers), batch=16)
