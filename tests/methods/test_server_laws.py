"""Laws of the methods with something in the middle: the elastic centre and the parameter server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from gossamer.config.cluster import Cluster, Wires
from gossamer.methods.shards import Parameters
from gossamer.pending import Pending
from gossamer.rules import delay_compensated, elastic_pull
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.sim.simulation import Simulation
from gossamer.sim.worker import SimulatedWorker
from gossamer.worker import Message
from support import (
    Ones,
    batches,
    before_each_descent,
    bowl,
    bowl_gradient,
    build,
    centre,
    cluster_of,
    pieces,
    racing,
    rows,
    scatter,
    signed,
    total,
    unequal,
)

few = examples(max_examples=12)
seeds = st.integers(0, 999)


# ---------------------------------------------------------------------- elastic averaging


@few
@given(
    st.sampled_from(["easgd", "eamsgd"]),
    st.integers(1, 8),
    st.floats(0.05, 0.9),
    st.integers(1, 4),
    st.floats(1e-5, 0.05),
    seeds,
)
def test_elastic_exchanges_keep_the_sum_with_the_centre(
    method: str, workers: int, beta: float, period: int, latency: float, seed: int
) -> None:
    """What a worker loses the centre gains, however stale its read was and whoever else pulled."""
    cluster = cluster_of(workers, distribution="exponential", latency=latency)
    spec = f"{method}:alpha={beta / workers},period={period}"
    simulation = build(bowl(), spec, cluster, steps=10, seed=seed, engine="none")
    scatter(simulation, seed)
    before, middle = total(simulation), centre(simulation)
    simulation.run()
    torch.testing.assert_close(total(simulation), before, rtol=1e-5, atol=1e-5)
    assert (centre(simulation) - middle).norm() > 1e-3


@pytest.mark.parametrize("workers", [1, 8])
def test_elastic_exchanges_do_overlap_in_the_race(workers: int) -> None:
    """With alpha = 1 an exchange that nobody interrupts swaps worker and centre. So the values are
    the same as before, in another order, for one worker; in the race of eight they are not."""
    simulation = build(bowl(), "easgd:alpha=1,period=1", racing(workers), steps=3, engine="none")
    scatter(simulation)

    def values() -> Tensor:
        return torch.cat([rows(simulation), centre(simulation).unsqueeze(0)]).sort(0).values

    before = values()
    simulation.run()
    change = float((values() - before).abs().max())
    assert change > 0.01 if workers > 1 else change < 1e-5


@few
@given(st.integers(1, 6), st.integers(1, 3), seeds)
def test_synchronous_easgd_is_the_dense_recursion(workers: int, period: int, seed: int) -> None:
    """x_i <- x_i - eta g_i(x_i) - alpha (x_i - c) and c <- c + alpha sum (x_i - c), from time t."""
    alpha, rate, steps = 0.9 / workers, 0.05, 6
    simulation = build(
        bowl(), f"easgd:synchronous=true,alpha={alpha},period={period}",
        cluster_of(workers, jitter=0.5), steps=steps, seed=seed, engine="loop",
        optimiser="sgd", learning_rate=rate,
    )  # fmt: skip
    scatter(simulation, seed)
    x, c = rows(simulation), centre(simulation)
    simulation.run()
    draw = batches(bowl(), workers, 4, seed)
    for step in range(steps):
        gradients = torch.stack([bowl_gradient(bowl(), x[r], draw(r)) for r in range(workers)])
        pull = alpha * (x - c) if step % period == 0 else torch.zeros_like(x)
        x, c = x - rate * gradients - pull, c + pull.sum(0)
    torch.testing.assert_close(rows(simulation), x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(centre(simulation), c, rtol=1e-4, atol=1e-5)


def round_robin_radius(workers: int, rate: float, alpha: float) -> float:
    """How much a round of elastic exchanges, one worker after the other on x^2/2, can grow."""
    state = torch.eye(workers + 1, dtype=torch.float64)  # each column is one start
    for worker in range(workers):
        x, middle = state[worker].clone(), state[-1].clone()
        pull = elastic_pull(x, middle, alpha)
        state[worker] = x - rate * x - pull  # the gradient of x^2/2 before the pull is x
        state[-1] = middle + pull
    return float(np.abs(np.linalg.eigvals(state.numpy())).max())


@examples(max_examples=40)
@given(st.integers(1, 6), st.floats(0.05, 1.9))
def test_round_robin_easgd_is_stable_up_to_its_edge(workers: int, rate: float) -> None:
    """Stable for alpha up to (4 - 2 eta) / (4 - eta) for any number of workers. That is the exact
    edge for an odd number; an even one, whose turns cancel in part, bears a little more."""
    edge = (4 - 2 * rate) / (4 - rate)
    beyond = 1.02 if workers % 2 else 1.15
    assert round_robin_radius(workers, rate, 0.98 * edge) <= 1 + 1e-9
    assert round_robin_radius(workers, rate, beyond * edge) > 1 + 1e-6


def test_the_centre_varies_as_theory_says() -> None:
    """p times the variance of the centre on a noisy quadratic, for many workers in step."""
    workers, copies, rate, beta, curvature = 100, 500, 0.1, 0.9, 1.0
    generator = torch.Generator().manual_seed(0)
    x, middle = torch.zeros(copies, workers), torch.zeros(copies, 1)
    seen: list[Tensor] = []
    for step in range(300):
        noise = torch.randn(copies, workers, generator=generator)
        pull = elastic_pull(x, middle, beta / workers)
        x = x - rate * (curvature * x - noise) - pull
        middle = middle + pull.sum(1, keepdim=True)
        if step >= 60:
            seen.append(middle.square().mean())
    eta = rate * curvature
    first = beta * eta / ((2 - beta) * (2 - eta))
    second = (2 - beta - eta + beta * eta) / (beta + eta - beta * eta)
    expected = first * second / curvature**2
    assert expected == pytest.approx(0.05158, abs=1e-5)
    assert workers * float(torch.stack(seen).mean()) == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------------- the asynchronous server


def staleness_of(simulation: Simulation) -> list[tuple[int, int]]:
    """For each gradient that the server applied: the version then, and the one it was read at."""
    applied: list[tuple[int, int]] = []

    def note(replica: SimulatedReplica, read: Sequence[int]) -> None:
        applied.extend((replica.version, version) for version in read)

    before_each_descent(simulation, note)
    return applied


@pytest.mark.parametrize("method", ["downpour", "dc_asgd", "staleness_aware"])
@few
@given(st.integers(1, 8), seeds)
def test_staleness_adds_up_exactly(method: str, workers: int, seed: int) -> None:
    """The sum of staleness is the sum over workers of the version after their last apply, less the
    number of applies: every other version was read by the worker whose gradient made it."""
    simulation = build(bowl(), method, unequal(workers, seed), steps=20, engine="none")
    applied = staleness_of(simulation)
    result = simulation.run()
    count = len(applied)
    assert [version for version, _ in applied] == list(range(count))
    read_back = [read for _, read in applied if read > 0]
    assert len(set(read_back)) == len(read_back)
    last_applies = set(range(1, count + 1)) - set(read_back)
    assert len(last_applies) == sum(read == 0 for _, read in applied) == workers
    total_staleness = sum(version - read for version, read in applied)
    assert total_staleness == sum(last_applies) - count
    assert result.mean_staleness * count == pytest.approx(total_staleness)
    assert sum(result.staleness.values()) == count


def test_mean_staleness_tends_to_one_less_than_the_workers() -> None:
    """N - 1 in a long run, for any mix of speeds, while fast and slow workers see very different
    values."""
    result = build(bowl(), "downpour", unequal(8, 3), steps=300, engine="none").run()
    assert result.mean_staleness == pytest.approx(7, rel=0.03)
    assert result.max_staleness > 20


@few
@given(st.booleans(), st.integers(1, 4), st.integers(1, 4), seeds)
def test_downpour_moves_the_server_by_the_sum_of_all_gradients(
    is_paper: bool, n_push: int, n_fetch: int, seed: int
) -> None:
    """A plain server ends at its start minus eta times every gradient that was accrued and pushed:
    a constant gradient makes that the count of steps, whatever is pushed and fetched when. Unless
    it is the paper's, all that a worker computes between two meetings counts as one gradient."""
    workers, rate, steps = 3, 0.01, 12
    method = f"downpour:{'paper,' * is_paper}n_push={n_push},n_fetch={n_fetch}"
    simulation = build(
        bowl(), method, cluster_of(workers, jitter=0.3), steps=steps, seed=seed,
        own_engine=Ones(), learning_rate=rate, optimiser="sgd",
    )  # fmt: skip
    before = centre(simulation)
    result = simulation.run()
    weight = 1.0 if is_paper else 1 / max(n_push, n_fetch)
    moved = float((before - centre(simulation)).mean()) / rate / weight
    # A worker that is cut short at the end pushes what it had accrued until then.
    assert moved == pytest.approx(result.steps, abs=4e-3)


@few
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), seeds)
def test_downpour_applies_every_gradient_once(
    workers: int, servers: int, n_push: int, n_fetch: int, seed: int
) -> None:
    """What is accrued is forgotten once it is pushed and not before: a gradient reaches the servers
    once, and of a worker that is cut short all that it had computed. Until the next fetch its own
    copy contains its own gradients."""
    method = f"downpour:paper,n_push={n_push},n_fetch={n_fetch},servers={servers}"
    simulation, engine = signed(method, unequal(workers, seed), steps=8, seed=seed)
    simulation.run()
    contents = engine.contents(centre(simulation))
    most = contents.shape[1]
    for rank, account in simulation.world.metrics.workers.items():
        assert contents[rank].tolist() == [float(n < account.steps) for n in range(most)]
    for (rank, number), seen in engine.read.items():
        fetched = number // n_fetch * n_fetch
        assert (seen[rank, fetched:number] == 1).all()
        assert seen[rank, : fetched // n_push * n_push].all()


def test_downpour_alone_is_the_loop_of_its_paper() -> None:
    """accrued += g and x -= eta g at every step; every n_push steps w -= eta accrued, then every
    n_fetch steps x = w."""
    steps, n_push, n_fetch, rate = 25, 3, 4, 0.05
    simulation = build(
        bowl(), f"downpour:n_push={n_push},n_fetch={n_fetch}", cluster_of(1), steps=steps,
        engine="loop", learning_rate=rate, optimiser="sgd:momentum=0.9", evaluations=1,
    )  # fmt: skip
    x = w = centre(simulation)
    accrued = torch.zeros_like(x)
    draw = batches(bowl(), 1, 4, 0)
    simulation.run()
    for step in range(1, steps + 1):
        gradient = bowl_gradient(bowl(), x, draw(0))
        accrued, x = accrued + gradient, x - rate * gradient
        if step % n_push == 0 or step == steps:
            w, accrued = w - rate * accrued, torch.zeros_like(x)
        if step % n_fetch == 0:
            x = w
    torch.testing.assert_close(centre(simulation), w, rtol=1e-4, atol=1e-5)


def first_contributions(method: str, cluster: Cluster, steps: int) -> tuple[list[int], int]:
    """For each worker, after how many updates of the last server its first gradient was in it."""
    simulation, engine = signed(method, cluster, steps=steps)
    server = simulation.world.replicas[-1]
    first = [-1] * cluster.workers

    def note(replica: SimulatedReplica, _: Sequence[int]) -> None:
        if replica is server:
            contents = engine.contents(centre(simulation))
            for rank in contents.sum(1).nonzero().flatten().tolist():
                first[rank] = first[rank] if first[rank] >= 0 else server.version

    before_each_descent(simulation, note)
    simulation.run()
    return first, server.version


@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_trains_alone_until_the_warm_start_is_over(servers: int) -> None:
    """Up to the share `warm_start` of all updates the server contains gradients of one worker only;
    soon after it, of everybody."""
    method = f"downpour:warm_start=0.5,servers={servers}"
    first, updates = first_contributions(method, cluster_of(4, jitter=0.3), 12)
    assert 0 <= first[0] <= 1
    assert all(0.5 * updates < version < 0.5 * updates + 8 for version in first[1:])


def test_workers_are_introduced_one_after_the_other() -> None:
    """After the warm start, worker k of p comes in once k/p of the share `introduce` has passed."""
    method = "downpour:warm_start=0.2,introduce=0.6"
    first, updates = first_contributions(method, cluster_of(4), 12)
    assert first[0] == 1
    assert first == sorted(first)
    for rank in (1, 2, 3):
        begin = (0.2 + 0.6 * rank / 4) * updates
        assert begin < first[rank] <= begin + 6


def test_a_warm_start_counts_the_updates_of_groups() -> None:
    """Two groups of two make half as many updates as four workers; the share is one of those."""
    method = "downpour:warm_start=0.5,groups=2"
    first, updates = first_contributions(method, cluster_of(4), 24)
    assert 48 <= updates <= 50
    assert 24 < first[2] <= 28


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_clips_what_it_is_given(servers: int) -> None:
    """A gradient of norm 2 moves each server by eta times the clip, in the gradient's direction."""
    simulation = build(
        pieces(4, 4) if servers == 2 else pieces(4), f"downpour:servers={servers}", cluster_of(3),
        steps=5, own_engine=Ones(), engine="none", learning_rate=0.1, optimiser="sgd", clip=0.5,
    )  # fmt: skip
    before = centre(simulation)
    result = simulation.run()
    moved = before - centre(simulation)
    expected = torch.full_like(moved, 0.1 * 0.25 * result.steps)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=0)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5), st.floats(0.1, 9))
def test_the_right_compensation_makes_a_quadratics_gradient_fresh(
    now: float, then: float, optimum: float, curvature: float
) -> None:
    """Where lambda g g is the curvature h, a gradient of h (x - a)^2 / 2 that was taken a while ago
    becomes the one at the present point."""
    stale = torch.tensor(curvature * (then - optimum), dtype=torch.float64)
    if abs(stale) < 1e-3:
        return
    drift = torch.tensor(now - then, dtype=torch.float64)
    compensated = delay_compensated(stale, drift, curvature / float(stale) ** 2)
    assert float(compensated) == pytest.approx(curvature * (now - optimum), abs=1e-9)


# ---------------------------------------------------------------------- without locks


@few
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4), seeds)
def test_hogwild_loses_no_update(workers: int, pieces: int, servers: int, seed: int) -> None:
    """Adds are atomic: in the end every gradient that was computed is in there once, however torn
    the values were that the readers saw."""
    method = f"hogwild:pieces={pieces},servers={servers}"
    simulation, engine = signed(method, racing(workers), steps=8, seed=seed, model_bytes=10**6)
    result = simulation.run()
    contents = engine.contents(centre(simulation))
    assert ((contents == 0) | (contents == 1)).all()
    assert contents.sum(1).tolist() == [a.steps for a in simulation.world.metrics.workers.values()]
    assert contents.sum() == result.steps


@pytest.mark.parametrize(("pieces", "is_torn"), [(1, False), (4, True)])
def test_who_reads_between_the_pieces_of_an_update_sees_it_torn(pieces: int, is_torn: bool) -> None:
    """With gradients of one and a start at zero, a value is whole if all its coordinates agree. An
    update that lands in one piece is seen wholly or not at all; one in pieces is seen in part."""
    engine = Ones()
    cluster = Cluster(workers=4, network=Wires(bandwidth=1e8))
    simulation = build(
        bowl(8), f"hogwild:pieces={pieces}", cluster, steps=10, own_engine=engine, engine="none",
        learning_rate=1.0, model_bytes=10**6,
    )  # fmt: skip
    simulation.world.servers[0].parameters.zero_()
    simulation.run()
    assert any(bool((point != point[0]).any()) for point in engine.points) == is_torn


def test_no_worker_hears_of_a_step_before_its_moving_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real workers may save a checkpoint, the server's part too, as soon as they are answered."""
    simulation = build(bowl(), "sync_server:decay=0.5", cluster_of(3), steps=6)
    server = simulation.world.replicas[3]
    answered: list[int] = []
    expected: list[Tensor] = []
    reply = SimulatedWorker.reply

    def observed(self: SimulatedWorker, message: Message, payload: Parameters) -> Pending[None]:
        if not expected:
            expected.append(payload.value.clone())
        elif len(expected) == payload.version:
            expected.append(expected[-1].lerp(payload.value, 0.5))
        assert torch.equal(server.memory["average"], expected[payload.version])
        answered.append(payload.version)
        return reply(self, message, payload)

    monkeypatch.setattr(SimulatedWorker, "reply", observed)
    simulation.run()
    assert answered == sorted([*range(7)] * 3)
