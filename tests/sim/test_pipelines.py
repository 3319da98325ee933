"""Replicas of several machines in virtual time: what changes is time, unless layers have ages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gossamer.config.cluster import Cluster, Compute
from gossamer.config.faults import Fault
from gossamer.config.network import Wires
from gossamer.contract.small_worlds import build, digits
from gossamer.errors import ConfigurationError
from gossamer.runs.result import Result
from gossamer.sim.pipelines.pipeline import Pipeline
from gossamer.sim.simulation import Simulation, simulate
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
    """Four pipelines of two end with the bits of four workers."""
    comma = "," if ":" in method else ":"
    plain = ran(method, quiet(4))
    split = ran(f"{method}{comma}stages=2,microbatches=4", quiet(8))
    assert torch.equal(plain.parameters, split.parameters)
    assert split.virtual_seconds < plain.virtual_seconds


@pytest.mark.parametrize("pipeline", ["pipedream", "vertical_sync", "2bw", "gpipe"])
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
