"""Laws of the methods that average: what all-reduce, neighbours, push-sum and outer steps compute,
compared with the same recursion written with dense matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from gossamer.config.faults import Fault
from gossamer.methods import parse_method
from gossamer.pending import Pending
from gossamer.rules import OuterOptimiser
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.sim.simulation import Simulation
from gossamer.topology import make_topology
from support import (
    batches,
    before_each_descent,
    bowl,
    bowl_gradient,
    build,
    cluster_of,
    racing,
    rows,
    scatter,
    spread,
    total,
    unequal,
    watch_end,
)

RATE = 0.05
PLAIN = "sgd"
few = examples(max_examples=12)
seeds = st.integers(0, 999)
a_topology = st.sampled_from(
    [
        "ring",
        "complete",
        "star",
        "torus",
        "grid",
        "exponential",
        "one_peer_exponential",
        "matchings",
    ]
)


def trained(method: str, workers: int, *, steps: int = 6, **choices: object) -> Simulation:
    """A run on the quadratic that has ended; every gradient is true."""
    given_choices = {"learning_rate": RATE, "optimiser": PLAIN, "engine": "loop", **choices}
    simulation = build(bowl(), method, cluster_of(workers), steps=steps, **given_choices)
    simulation.run()
    return simulation


def mixed(method: str, workers: int, steps: int, start: Tensor) -> Tensor:
    """Where the replicas end from `start` when all gradients are zero."""
    simulation = build(bowl(), method, cluster_of(workers), steps=steps, engine="none")
    simulation.world.workers.parameters.copy_(start)
    simulation.run()
    return rows(simulation)


# ---------------------------------------------------------------------- everyone with everyone


@few
@given(st.integers(2, 6), seeds, st.booleans(), st.sampled_from([PLAIN, "sgd:momentum=0.9"]))
def test_all_reduce_keeps_all_replicas_equal_at_every_step(
    workers: int, seed: int, overlap: bool, optimiser: str
) -> None:
    """Before each descent and at the end all replicas that have made as many steps are the same."""
    simulation = build(
        bowl(), f"all_reduce:overlap={str(overlap).lower()}", cluster_of(workers, jitter=0.5),
        steps=5, seed=seed, learning_rate=RATE, optimiser=optimiser, engine="loop",
    )  # fmt: skip
    seen: dict[int, set[bytes]] = {}

    def note(replica: SimulatedReplica, _: int | None) -> None:
        seen.setdefault(replica.version, set()).add(replica.snapshot().numpy().tobytes())

    before_each_descent(simulation, note)
    simulation.run()
    assert [len(seen[step]) for step in range(5)] == [1] * 5
    assert spread(rows(simulation)) == 0


@few
@given(st.integers(2, 6), seeds, st.sampled_from([PLAIN, "sgd:momentum=0.9", "adam"]))
def test_all_reduce_is_one_worker_with_the_big_batch(
    workers: int, seed: int, optimiser: str
) -> None:
    """p workers of batch b compute what one worker of batch p b computes, to rounding."""
    many = trained("all_reduce", workers, seed=seed, optimiser=optimiser, batch=4)
    one = trained("all_reduce", 1, seed=seed, optimiser=optimiser, batch=4 * workers)
    torch.testing.assert_close(rows(many)[0], rows(one)[0], rtol=1e-4, atol=1e-5)


@few
@given(st.integers(1, 5), seeds, st.integers(1, 3))
def test_stale_all_reduce_applies_the_mean_of_an_earlier_step(
    workers: int, seed: int, stale: int
) -> None:
    """The gradient of step t is applied in step t + stale; at the end what is left is applied."""
    simulation = trained(f"all_reduce:stale={stale}", workers, seed=seed, steps=8)
    x = simulation.model.initial.double()
    draw = batches(bowl(), workers, 4, seed)
    waiting: list[Tensor] = []
    for _ in range(8):
        gradients = [bowl_gradient(bowl(), x, draw(rank)) for rank in range(workers)]
        waiting.append(torch.stack(gradients).mean(0))
        if len(waiting) > stale:
            x = x - RATE * waiting.pop(0)
    for gradient in waiting:
        x = x - RATE * gradient
    torch.testing.assert_close(rows(simulation)[0], x, rtol=1e-4, atol=1e-5)


@few
@given(st.integers(2, 5), seeds)
def test_local_sgd_of_period_one_is_all_reduce(workers: int, seed: int) -> None:
    """With plain SGD, averaging models after one step is averaging gradients, to rounding."""
    averaged = trained("local_sgd:period=1", workers, seed=seed)
    reduced = trained("all_reduce", workers, seed=seed)
    torch.testing.assert_close(rows(averaged), rows(reduced), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "special",
    [
        "bmuf:block_momentum=0,state=local,period=3",
        "slowmo:alpha=1,beta=0,period=3",
        "diloco:outer_rate=1,outer_momentum=0,period=3",
    ],
)
def test_outer_steps_without_momentum_are_local_sgd(special: str) -> None:
    """Rate 1 and momentum 0 turn every outer optimiser into plain periodic averaging."""
    run = partial(trained, workers=4, steps=12, optimiser="sgd:momentum=0.9")
    assert torch.equal(rows(run(special)), rows(run("local_sgd:period=3")))


@pytest.mark.parametrize("method", ["diloco", "bmuf"])
@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 8, 12, 16, 32])
def test_the_default_outer_step_is_stable_at_every_period(method: str, period: int) -> None:
    """On quadratics of all curvatures h, inner steps with momentum 0.9 and a rate of up to 0.35 / h
    and the outer steps that follow from the period come to rest, whatever the number of workers."""
    spec = parse_method(f"{method}:period={period}")
    values = spec.resolve(64, 10_000)
    if method == "diloco":
        outer = OuterOptimiser(values["outer_rate"], values["outer_momentum"], nesterov=True)
    else:
        outer = OuterOptimiser(values["zeta"], values["block_momentum"], values["nesterov"])
    curvature = torch.linspace(0.05, 0.35, 200, dtype=torch.float64)
    start, velocity = torch.ones_like(curvature), torch.zeros_like(curvature)
    for _ in range(400):
        x = start
        for _ in range(period):
            velocity = 0.9 * velocity + curvature * x
            x = x - velocity
        start = outer.step(start, x)
        velocity = velocity * (method == "diloco")  # block momentum resets it
    assert float(start.abs().max()) < 1e-2


def test_outer_steps_follow_the_period_and_the_workers() -> None:
    """From local SGD's to the paper's values; what is given, and the paper's preset, stand."""

    def outer(text: str, workers: int) -> tuple[float, float]:
        values = parse_method(text).resolve(workers, 10_000)
        return values["outer_rate"], values["outer_momentum"]

    assert outer("diloco:period=500", 16) == pytest.approx((0.7, 0.9))
    assert outer("diloco:period=500", 2) == pytest.approx((1 - 0.5 / 3, 0.5))
    assert outer("diloco:period=500", 1) == pytest.approx((1.0, 0.0))
    assert outer("diloco:period=8", 16) == pytest.approx((1 - 0.223 / 3, 0.223), abs=1e-3)
    assert outer("diloco:period=8,outer_momentum=0.6", 16) == pytest.approx((0.8, 0.6))
    assert outer("diloco:period=8,outer_rate=0.4", 16) == pytest.approx((0.4, 0.223), abs=1e-3)
    assert outer("diloco:paper", 2) == outer("diloco:paper,period=8", 16) == (0.7, 0.9)
    block = [parse_method(f"bmuf{o}").resolve(8, 225)["block_momentum"] for o in
             (":paper", ":period=8", ":period=32", ":period=8,block_momentum=0.875")]  # fmt: skip
    assert block == pytest.approx([0.875, 0.223, 0.875, 0.875], abs=1e-3)


def test_a_vanishing_outer_momentum_tends_to_plain_averaging() -> None:
    """The general formula agrees with the short cut that plain averaging takes."""
    start, mean = torch.randn(2, 20, dtype=torch.float64, generator=torch.manual_seed(0))
    for nesterov in (False, True):
        for inner_rate in (None, 0.03):
            nearly = OuterOptimiser(1.0, 1e-12, nesterov).step(start, mean, inner_rate)
            torch.testing.assert_close(nearly, mean)


@given(st.integers(2, 64), st.booleans())
@examples(max_examples=30)
def test_block_momentum_gains_as_many_steps_as_workers(workers: int, nesterov: bool) -> None:
    """With eta_b = 1 - 1/N the steady progress of a block is N times its own displacement."""
    outer = OuterOptimiser(1.0, 1 - 1 / workers, nesterov)
    x, moved = torch.zeros(1, dtype=torch.float64), 0.0
    for _ in range(40 * workers):
        after = outer.step(x, x + 0.01)
        moved, x = float(after - x), after
    assert moved == pytest.approx(0.01 * workers, rel=1e-6)


def test_what_a_dead_straggler_owed_is_made_up_for() -> None:
    """The others were rounds ahead of it when it died; the samples it never saw are processed."""
    straggler = [Fault("slow", worker=3, amount=50), Fault("kill", at=0.15, worker=3)]
    cluster = cluster_of(4, faults=straggler)
    simulation = build(bowl(), "local_sgd:period=12", cluster, steps=24, engine="none")
    result = simulation.run()
    assert [account.steps for account in simulation.world.metrics.workers.values()] == [
        32,
        32,
        32,
        0,
    ]
    assert result.samples == simulation.settings.samples


# ---------------------------------------------------------------------- neighbours


@few
@given(a_topology, st.integers(2, 8), seeds, st.sampled_from(["after", "before"]), st.booleans())
def test_d_psgd_is_the_dense_recursion(
    topology: str, workers: int, seed: int, adapt: str, overlap: bool
) -> None:
    """X <- W X - eta G(X), or W (X - eta G(X)) where one adapts before mixing, for any graph."""
    assume(topology not in ("torus", "grid") or workers not in (5, 7))  # which fill no two rows
    options = f"topology={topology},adapt={adapt},overlap={str(overlap).lower()}"
    simulation = build(
        bowl(), f"d_psgd:{options}", cluster_of(workers, jitter=0.5), steps=5, seed=seed,
        learning_rate=RATE, optimiser=PLAIN, engine="loop",
    )  # fmt: skip
    scatter(simulation, seed)
    x = rows(simulation)
    simulation.run()
    graph = make_topology(topology, workers)
    draw = batches(bowl(), workers, 4, seed)
    for step in range(5):
        gradients = torch.stack([bowl_gradient(bowl(), x[r], draw(r)) for r in range(workers)])
        w = torch.from_numpy(graph.matrix(step))
        x = w @ (x - RATE * gradients) if adapt == "before" else w @ x - RATE * gradients
    torch.testing.assert_close(rows(simulation), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [6, 8, 9])
@pytest.mark.parametrize("topology", ["ring", "star", "torus", "grid", "exponential"])
def test_disagreement_shrinks_at_the_predicted_rate(topology: str, workers: int) -> None:
    """Started along the slowest direction of W, the spread falls by `mixing_rate` every round."""
    graph = make_topology(topology, workers)
    values, vectors = np.linalg.eig(graph.matrix() - 1 / workers)
    slowest = vectors[:, np.argmax(np.abs(values))].real
    start = torch.tensor(slowest, dtype=torch.float32).unsqueeze(1).expand(workers, 6) + 1.0
    end = mixed(f"d_psgd:topology={topology}", workers, 6, start)
    assert spread(end) / spread(start) == pytest.approx(graph.mixing_rate() ** 6, rel=2e-3)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("method", ["push_sum", "d_psgd:topology=one_peer_exponential"])
def test_one_peer_exponential_is_exact_for_powers_of_two(method: str, workers: int) -> None:
    """log2 n rounds with one message each give the exact average; one round fewer does not."""
    start = torch.randn(workers, 6, generator=torch.manual_seed(workers))
    rounds = workers.bit_length() - 1
    end = mixed(method, workers, rounds, start)
    torch.testing.assert_close(end, start.double().mean(0).expand_as(end), rtol=1e-5, atol=1e-6)
    if rounds > 1:
        assert spread(mixed(method, workers, rounds - 1, start)) > 0.1


def test_one_peer_exponential_is_inexact_otherwise() -> None:
    """Six workers are still apart after three rounds."""
    start = torch.randn(6, 6, generator=torch.manual_seed(6))
    assert spread(mixed("push_sum", 6, 3, start)) > 0.1


@pytest.mark.parametrize("workers", [4, 8, 12])
def test_ad_psgd_contracts_at_least_as_fast_as_random_pairs(workers: int) -> None:
    """K pair averages on the complete graph shrink the squared spread by pair_rate^K or more, on
    average over seeds: that everyone starts one in each step is better than chance."""
    rate = make_topology("complete", workers).pair_rate()
    compared: list[float] = []
    for seed in range(16):
        cluster = cluster_of(workers, jitter=0.3)
        method = "ad_psgd:topology=complete"
        simulation = build(bowl(64), method, cluster, steps=4, seed=seed, engine="none")
        scatter(simulation, seed)
        before = spread(rows(simulation))
        result = simulation.run()
        exchanges = round(result.exchanges_per_step * result.steps / 2)
        assert exchanges >= 4 * workers - 1
        compared.append((spread(rows(simulation)) / before) ** 2 / rate**exchanges)
    assert 0.01 < sum(compared) / len(compared) < 1.0


@pytest.mark.parametrize("method", ["ad_psgd", "ad_psgd:paper", "ad_psgd:topology=ring"])
def test_no_average_begins_after_the_last_gradient(method: str) -> None:
    """Those under way end at both ends, so the mean is kept; the step that completes the samples is
    followed by none."""
    simulation = build(bowl(), method, racing(4), steps=8, engine="none")
    world = simulation.world
    _, _, delivered = watch_end(simulation)
    begun: list[int] = []
    usual = world.members.watch

    def watch(pending: Pending[Any], owner: int) -> None:
        if pending.label == "average":
            begun.append(world.kernel.now)
        usual(pending, owner)

    world.members.watch = watch
    simulation.run()
    assert 0 < max(begun) <= max(delivered)


# ---------------------------------------------------------------------- push-sum


@few
@given(a_topology, st.integers(2, 8), st.integers(0, 3), seeds)
def test_push_sum_keeps_its_mass_and_finds_the_mean(
    topology: str, workers: int, overlap: int, seed: int
) -> None:
    """Weights add up to n, numerators to their sum, and x / w tends to the mean, with messages of
    any age on the way and on graphs whose degrees differ."""
    method = f"push_sum:topology={topology},overlap={overlap}"
    simulation = build(bowl(), method, racing(workers), steps=60, seed=seed, engine="none")
    scatter(simulation, seed)
    before = total(simulation)
    simulation.run()
    weights = torch.tensor([r.weight for r in simulation.world.replicas], dtype=torch.float64)
    assert weights.min() > 0
    assert float(weights.sum()) == pytest.approx(workers, rel=1e-9)
    torch.testing.assert_close(total(simulation), before, rtol=1e-5, atol=1e-5)
    found = rows(simulation) / weights.unsqueeze(1)
    torch.testing.assert_close(found, (before / workers).expand_as(found), rtol=1e-2, atol=1e-2)


def test_push_sum_counts_the_mass_that_dies() -> None:
    """What a dead worker held is missing from the sum of weights, and the summary says so."""

    def lost(*faults: Fault) -> float:
        cluster = cluster_of(6, latency=2e-3, faults=faults)
        method = "push_sum:topology=star"
        return build(bowl(), method, cluster, steps=20, engine="none").run().lost_mass

    assert lost() == pytest.approx(0.0, abs=1e-9)
    assert lost(Fault("kill", at=0.07, worker=0)) > 0.1


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "method",
    [
        "all_reduce", "sync_server", "d_psgd", "d_psgd:groups=2", "push_sum", "bmuf:period=2",
        "local_sgd:period=3", "easgd:synchronous=true,period=2", "ssp:bound=0",
        "bounded_delay:bound=0",
    ],
)  # fmt: skip
def test_a_row_of_a_synchronous_run_holds_complete_rounds(method: str) -> None:
    """The row after k rounds is that of a run that ends after k rounds, however far some workers
    are ahead of others."""

    def run(steps: int, evaluations: int) -> list[dict[str, Any]]:
        simulation = build(
            bowl(), method, unequal(4, 1), steps=steps, evaluations=evaluations, engine="loop"
        )
        return simulation.run().history

    found = run(8, 4)
    for rounds in (2, 4, 6, 8):
        row = next(row for row in found if row["samples"] >= 16 * rounds)
        alone = run(rounds, 1)[-1]
        for key in ("samples", "epochs", "steps", "loss", "consensus_distance"):
            assert row[key] == pytest.approx(alone[key], rel=1e-6), (rounds, key)
    assert [row["samples"] for row in found] == [0, 32, 64, 96, 128]


@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd", "downpour", "easgd"])
@pytest.mark.parametrize("workers", [1, 4])
def test_every_row_but_the_first_has_a_training_loss(method: str, workers: int) -> None:
    """The summary, which is the last row, too: there are batches since the row before."""
    simulation = build(bowl(), method, cluster_of(workers), steps=8, evaluations=4, engine="loop")
    result = simulation.run()
    assert [row["training_loss"] is None for row in result.history] == [True] + 4 * [False]
    assert result.training_loss == result.history[-1]["training_loss"]
