"""Workers that come during a run: they begin with what the others hold, and every sample counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Failures, read_fault
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.methods import METHODS
from gossamer.sim.simulation import Simulation
from support import bowl, build, rows
from tiers import only

STEPS = 60
SECONDS = 0.01
FAULTS = ("kill 2@0.105s", "return 2@0.2s", "arrive 4@0.15s")


def cluster_with(faults: Sequence[str] = FAULTS, workers: int = 6, **more: Any) -> Cluster:
    return Cluster(
        workers=workers,
        compute=Compute(seconds=SECONDS, jitter=0.2),
        network=Wires(bandwidth=1e9, latency=2e-4),
        failure_detection=0.005,
        faults=tuple(map(read_fault, faults)),
        **more,
    )


def run(method: str, cluster: Cluster, **choices: Any) -> Simulation:
    chosen: dict[str, Any] = {
        "engine": "loop", "optimiser": "sgd:momentum=0.9", "model_bytes": 100_000, "seed": 1,
    }  # fmt: skip
    simulation = build(bowl(4), method, cluster, steps=STEPS, batch=1, **chosen | choices)
    simulation.run()
    return simulation


FAST = ("all_reduce", "d_psgd", "ad_psgd", "push_sum", "easgd", "ssp", "sync_server", "diloco")


@pytest.mark.parametrize("method", only(FAST, METHODS))
def test_who_comes_takes_part_until_the_end_and_exactly_the_samples_are_trained(
    method: str,
) -> None:
    """One worker has died and comes back, another arrives late; nobody else notices."""
    world = run(method, cluster_with()).world
    assert set(world.newcomers.first_step) == {2, 4}
    assert world.alive == set(range(6))
    steps = [world.steps_of(rank) for rank in range(6)]
    usual = min(steps[rank] for rank in (0, 1, 3, 5))
    assert all(usual - 20 < steps[rank] < usual for rank in (2, 4))
    together = 6 if world.budget.is_synchronous else 1
    assert 0 <= world.budget.processed - world.budget.samples < together
    assert world.samples_read == world.budget.processed + world.samples_aborted


@pytest.mark.parametrize(
    "method",
    only(
        ("all_reduce", "all_reduce+powersgd:rank=1"),
        ("all_reduce", "all_reduce:overlap=false", "all_reduce+topk:share=0.5",
         "all_reduce+powersgd:rank=1", "all_reduce+onebit", "one_bit_adam"),
    ),
)  # fmt: skip
def test_replicas_that_are_equal_stay_equal(method: str) -> None:
    """Also the state of the optimiser, what the method remembers and what a compressor shares."""
    simulation = run(method, cluster_with())
    first, *others = rows(simulation)
    assert all(torch.equal(first, other) for other in others)
    states = [replica.optimiser_state() for replica in simulation.world.replicas]
    assert all(torch.equal(states[0], other) for other in states)


@pytest.mark.parametrize(
    "method",
    only(
        ("diloco:period=4",),
        ("diloco:period=4", "diloco:period=4,fragments=2,delay=1", "slowmo:period=4",
         "bmuf:period=4", "sparse_loco:period=4", "diloco:period=4+topk:share=0.5"),
    ),
)  # fmt: skip
def test_outer_models_stay_equal(method: str) -> None:
    """What was agreed on at the last meeting, and the outer velocity, are the same for all."""
    world = run(method, cluster_with()).world
    for name in {"start", "velocity"} & world.replicas[0].memory.keys():
        kept = [replica.memory[name] for replica in world.replicas]
        assert all(torch.equal(kept[0], other) for other in kept)


def test_a_late_worker_costs_only_its_absence() -> None:
    """The state travels beside the others' steps: nobody waits for it."""
    with_it = run("ad_psgd", cluster_with(["arrive 4@0.15s"]))
    assert with_it.world.metrics.workers[4].absent_ns / 1e9 == pytest.approx(0.15, abs=0.003)
    assert all(own.waited_ns == 0 for own in with_it.world.metrics.workers.values())


def test_what_is_always_on_its_way_admits_nobody_and_is_told() -> None:
    simulation = build(
        bowl(4), "all_reduce:stale=1", cluster_with(), steps=STEPS, batch=1, engine="none",
        model_bytes=100_000,
    )  # fmt: skip
    result = simulation.run()
    assert simulation.world.newcomers.first_step == {}
    assert any("workers 2, 4 came and took no part" in line for line in result.notices)


def test_the_giver_may_die_while_it_gives() -> None:
    """The newcomer asks another one. The state takes 0.1 s on its way."""
    faults = ["arrive 2@0.1s", "kill 0@0.15s", "kill 1@0.4s"]
    cluster = cluster_with(faults, workers=3)
    world = run("ensemble", cluster, model_bytes=100_000_000, optimiser="sgd").world
    assert world.alive == {2}
    assert world.steps_of(2) > 0


def test_where_nobody_is_left_a_worker_goes_on_from_what_it_had() -> None:
    faults = ["kill 0@0.1s", "return 0@0.2s"]
    world = run("all_reduce", cluster_with(faults, workers=1)).world
    assert world.steps_of(0) == STEPS
    (first,) = world.newcomers.first_step.values()
    assert 0 < first < 12


@pytest.mark.parametrize("method", ["ensemble", pytest.param("ad_psgd", marks=pytest.mark.wide)])
def test_the_goodput_of_workers_that_fail_at_random_is_its_closed_form(method: str) -> None:
    """Of each mtbf + repair a worker loses the repair and about half a step. With 180 deaths the
    standard error is 1.2 points."""
    cluster = cluster_with(
        [], workers=6, failures=Failures(mtbf=200 * SECONDS, repair=50 * SECONDS)
    )
    simulation = build(bowl(4), method, cluster, steps=6000, batch=1, engine="none")
    shares = simulation.run().summary["time_shares"]
    assert shares["useful"] == pytest.approx(199.5 / 250, abs=0.04)
    assert shares["absent"] == pytest.approx(50 / 250, abs=0.04)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_every_sample_and_every_recovery_is_in_the_summary() -> None:
    """Of each epoch what was read is trained or given again, and the moments are in order."""
    simulation = build(
        bowl(4), "ad_psgd", cluster_with(), steps=700, batch=1, engine="none", seed=1,
        model_bytes=1_000_000,
    )  # fmt: skip
    found = simulation.run().summary
    epochs = found["samples_by_epoch"]
    assert [row["epoch"] for row in epochs] == list(range(len(epochs)))
    assert len(epochs) > 1
    assert all(row["read"] == row["trained"] + row["given_again"] for row in epochs)
    assert sum(row["trained"] for row in epochs) == found["samples"]
    assert sum(row["lost"] for row in epochs) == found["samples_lost"] == 1
    back, late = found["recoveries"]
    assert (back["what"], back["died"], back["noticed"]) == ("worker 2", 0.105, 0.11)
    assert (late["what"], late["started"]) == ("worker 4", 0.15)
    moments = ("started", "has the model", "takes part", "first gradient")
    for row in (back, late):
        assert sorted(row[moment] for moment in moments) == [row[moment] for moment in moments]
        assert row["has the model"] > row["started"] + 0.001


def test_who_dies_faster_than_it_computes_ends_in_a_sentence() -> None:
    cluster = cluster_with([], workers=2, failures=Failures(mtbf=1e-4, repair=1e-4))
    with pytest.raises(RunFailed, match="without one complete gradient"):
        build(bowl(4), "ensemble", cluster, steps=10, batch=1, engine="none").run()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (["return 2@1s"], "worker 2 is alive then"),
        (["kill 2@2s", "return 2@1s"], "worker 2 is alive then"),
        (["arrive 2@1s", "arrive 2@2s"], "worker 2 is alive then"),
    ],
)
def test_lives_that_cannot_be_are_refused(faults: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        cluster_with(faults)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repair": 1.0}, "needs mtbf"),
        ({"mtbf": 1.0, "per": "rack"}, "unit of .failures. per"),
        ({"mtbf": -1.0}, "must be a finite time"),
    ],
)
def test_failures_that_cannot_be_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        cluster_with([], failures=Failures(**values))


@pytest.mark.parametrize("method", ["all_reduce:groups=3", "all_reduce:balance=speed"])
def test_what_nobody_can_come_into_is_refused(method: str) -> None:
    with pytest.raises(ConfigurationError, match="no worker can come during the run"):
        run(method, cluster_with())
