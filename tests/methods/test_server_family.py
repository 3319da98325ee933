"""Laws of the parameter servers between "wait for all" and "wait for none": clocks and bounds,
softsync and its staleness, compensated delays."""

from __future__ import annotations

from itertools import pairwise
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from gossamer.config.cluster import Cluster, Compute
from gossamer.config.faults import Fault
from gossamer.methods.shards import Push
from gossamer.sim.gradients import SimulatedGradient
from gossamer.sim.simulation import Simulation
from support import (
    bowl,
    build,
    centre,
    cluster_of,
    on_each_push,
    racing,
    run_signed,
    signed,
    trained,
    unequal,
)
from tiers import every

few = examples(max_examples=12)
seeds = st.integers(0, 999)
LATE = Fault("drop", amount=0.3)


# ---------------------------------------------------------------------- clocks


def gaps_at_each_start(simulation: Simulation) -> list[int]:
    """For each gradient as it starts: its clock minus the slowest one completed at any server, as
    told by the messages that have arrived there."""
    world = simulation.world
    ends = range(world.size, world.ends)
    completed = {(server, rank): 0 for server in ends for rank in range(world.size)}
    clocks = [0] * world.size
    gaps: list[int] = []
    usual = world.batcher.start

    def pushed(server: int, source: int, push: Push) -> None:
        if push.gradient is not None:
            completed[server, source] = push.clock + 1

    def started(gradient: SimulatedGradient) -> None:
        known = [completed[s, rank] for s in ends for rank in world.clients_of(s)]
        gaps.append(clocks[gradient.worker] - min(known))
        clocks[gradient.worker] += 1
        usual(gradient)

    on_each_push(simulation, pushed)
    world.batcher.start = started
    return gaps


@examples(max_examples=40)
@given(
    st.sampled_from(["ssp", "bounded_delay"]),
    st.integers(0, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["racing", "unequal", "unequal and late"]),
    seeds,
)
def test_a_read_is_at_most_the_bound_ahead_and_misses_no_mandatory_update(
    method: str, bound: int, workers: int, servers: int, kind: str, seed: int
) -> None:
    """A read at clock c sees every update with a timestamp up to c - bound - 1 from everybody, all
    of its own, and nothing twice; and c is at most `bound` above the slowest completed clock. Who
    left at the end of the run owes no more than it made."""
    late = [LATE] if kind == "unequal and late" else []
    cluster = racing(workers) if kind == "racing" else unequal(workers, seed, *late)
    spec = f"{method}:bound={bound},servers={servers}"
    simulation, engine = signed(spec, cluster, steps=6, seed=seed)
    gaps = gaps_at_each_start(simulation)
    result = simulation.run()
    assert max(gaps) <= bound
    assert 0 <= result.max_clock_gap <= bound
    made = [account.steps for account in simulation.world.metrics.workers.values()]
    assert len(engine.read) >= sum(made) >= 6 * workers
    for (rank, clock), seen in engine.read.items():
        assert ((seen == 0) | (seen == 1)).all()
        assert (seen[rank, :clock] == 1).all()
        for other, steps in enumerate(made):
            assert (seen[other, : max(0, min(clock - bound, steps))] == 1).all()


@pytest.mark.parametrize("method", ["ssp", "bounded_delay"])
@pytest.mark.parametrize("bound", range(5))
def test_the_fastest_uses_the_whole_bound(method: str, bound: int) -> None:
    """With one worker five times slower the others run into the bound, and reads then really miss
    updates of the slow one: the largest gap is the bound itself."""
    slow = cluster_of(4, faults=[Fault("slow", worker=1, amount=5)])
    simulation, engine = signed(f"{method}:bound={bound}", slow, steps=10)
    gaps = gaps_at_each_start(simulation)
    assert simulation.run().max_clock_gap == max(gaps) == bound
    made = simulation.world.metrics.workers[1].steps
    missing = [min(clock, made) - int(seen[1].sum()) for (_, clock), seen in engine.read.items()]
    assert max(missing) == bound


@few
@given(st.sampled_from(["ssp", "bounded_delay"]), st.integers(1, 5), st.integers(1, 3), seeds)
def test_with_bound_zero_it_is_the_synchronous_server_bit_for_bit(
    method: str, workers: int, servers: int, seed: int
) -> None:
    """Updates that count 1/p are committed at the clock's end in order of rank; those that count
    whole are p times as large."""
    cluster = unequal(workers, seed, LATE)
    shared = f"servers={servers}"
    divided = trained(f"{method}:bound=0,divide=true,{shared}", cluster, seed=seed)
    synchronous = trained(f"sync_server:server_optimiser=sgd,{shared}", cluster, seed=seed)
    assert torch.equal(centre(divided), centre(synchronous))
    whole = trained(f"{method}:bound=0", cluster, seed=seed, learning_rate=0.05 / workers)
    torch.testing.assert_close(centre(whole), centre(synchronous), rtol=1e-4, atol=1e-5)


def test_an_update_counts_whole_or_its_share() -> None:
    """With `divide` each gradient moves the server by 1/p of itself, to the end of the run."""
    for divide, share in (("true", 0.25), ("false", 1.0)):
        for method in ("ssp", "bounded_delay"):
            spec = f"{method}:bound=2,divide={divide}"
            _, result, contents = run_signed(spec, unequal(4, 5), steps=8)
            assert ((contents[-1] == 0) | (contents[-1] == share)).all()
            assert contents[-1].count_nonzero() == result.steps == len(contents) - 1


def test_a_larger_bound_hides_random_stragglers_but_no_lasting_one() -> None:
    """Waiting orders synchronous > ssp(1) > ssp(4) > asynchronous when anyone may be late; one who
    always is sets the pace for every bound."""
    specs = ("sync_server", "ssp:bound=1", "ssp:bound=4", "downpour")
    now_and_then = Compute(jitter=0.05, pause_probability=0.1, pause_seconds=0.1)

    def seconds(cluster: Cluster) -> list[float]:
        runs = [build(bowl(), spec, cluster, steps=60, engine="none").run() for spec in specs]
        return [run.virtual_seconds for run in runs]

    random = seconds(Cluster(workers=8, compute=now_and_then))
    assert all(later < 0.95 * earlier for earlier, later in pairwise(random))
    lasting = seconds(cluster_of(8, faults=[Fault("slow", worker=2, amount=10)]))
    assert min(lasting[:3]) > 0.9 * lasting[0]
    assert lasting[3] < 0.2 * lasting[0]


# ---------------------------------------------------------------------- softsync


@few
@given(st.integers(1, 8), st.data(), seeds)
def test_the_staleness_of_softsync_adds_up_exactly(
    workers: int, data: st.DataObject, seed: int
) -> None:
    """With c gradients an update, the j-th to arrive meets version j // c and is answered with
    version (j + 1) // c, which its sender's next one has read. So the sum of staleness over K
    updates is the sum over workers of (the version answered last - the version read first) - K."""
    n = data.draw(st.integers(1, workers))
    c = workers // n
    cluster = unequal(workers, seed, LATE)
    simulation = build(bowl(), f"softsync:n={n}", cluster, steps=16, seed=seed, engine="none")
    arrived: list[tuple[int, int]] = []

    def pushed(_: int, source: int, push: Push) -> None:
        if push.gradient is not None:
            arrived.append((source, push.read))

    on_each_push(simulation, pushed)
    result = simulation.run()
    updates = len(arrived) // c
    first: dict[int, int] = {}
    answered: dict[int, int] = {}
    staleness: list[int] = []
    for position, (source, read) in enumerate(arrived[: c * updates]):
        assert read == answered.get(source, read)
        first.setdefault(source, read)
        answered[source] = (position + 1) // c
        staleness.append(position // c - read)
    assert sum(staleness) == sum(answered[rank] - first[rank] for rank in first) - updates
    assert result.staleness == {s: staleness.count(s) for s in sorted(set(staleness))}
    assert result.max_queue == c
    # What the run's end finds held, too little for an update, is not lost without a word.
    assert result.dropped_gradients == len(arrived) - c * updates == len(arrived) % c


@pytest.mark.parametrize(("workers", "n"), every(2, [(8, 1), (8, 2), (12, 4), (32, 4), (16, 16)]))
def test_mean_staleness_of_softsync_tends_to_a_share_of_the_others(workers: int, n: int) -> None:
    """(N - 1) / c in a long run for any mix of speeds; at most about 2 n for equal workers, where
    some do come near that."""
    c = workers // n
    for cluster in (unequal(workers, 3), cluster_of(workers)):
        result = build(bowl(), f"softsync:n={n}", cluster, steps=80, engine="none").run()
        assert result.mean_staleness == pytest.approx((workers - 1) / c, rel=0.03)
    assert n <= result.max_staleness <= 2 * n + 1


DAMPED = {
    "inverse": lambda tau: 1 / max(tau, 1),
    "exponential": lambda tau: exp(-0.3 * tau),
    "polynomial": lambda tau: (1 + tau) ** -0.3,
}


@few
@given(st.sampled_from(sorted(DAMPED)), st.integers(1, 5), st.integers(1, 3), seeds)
def test_every_gradient_is_damped_by_its_true_staleness(
    damping: str, workers: int, n: int, seed: int
) -> None:
    """What the server holds after each update shows which gradients went into it and how much of
    each; what a gradient's own point contained shows at which version it was taken."""
    n = min(n, workers)
    spec = f"staleness_aware:n={n},damping={damping},strength=0.3"
    engine, result, contents = run_signed(spec, unequal(workers, seed, LATE), steps=8, seed=seed)
    taken: dict[int, int] = {}
    for version, (before, after) in enumerate(pairwise(contents)):
        used = (after - before).nonzero().tolist()
        assert len(used) == workers // n
        for rank, number in used:
            seen = engine.read[rank, number]
            read = next(v for v in range(version + 1) if torch.equal(contents[v], seen))
            staleness = version - read
            taken[staleness] = taken.get(staleness, 0) + 1
            factor = DAMPED[damping](staleness) / (workers // n)
            assert after[rank, number] == pytest.approx(factor, rel=1e-5)
    assert taken == result.staleness
    assert 0 in taken


@few
@given(st.integers(2, 5), st.integers(0, 3), seeds)
def test_gradients_beyond_the_cap_are_dropped_and_counted(
    workers: int, cap: int, seed: int
) -> None:
    """What is used is no staler than the cap, and what is not used is counted."""
    spec = f"staleness_aware:cap={cap}"
    _, result, contents = run_signed(spec, unequal(workers, seed), steps=8, seed=seed)
    assert result.max_staleness <= cap
    assert contents[-1].count_nonzero() + result.dropped_gradients == result.steps
    assert result.dropped_gradients > 0 or cap >= workers - 1


# ---------------------------------------------------------------------- compensated delay


@few
@given(st.integers(1, 5), st.sampled_from(["false", "true", "true,shared=true"]),
       st.sampled_from([0.0, 0.5, 2.0]), seeds)  # fmt: skip
def test_dc_asgd_is_its_recursion_on_the_gradients_as_they_arrive(
    workers: int, form: str, compensation: float, seed: int
) -> None:
    """w <- w - eta (g + lambda g g (w - w_bak(m))), w_bak(m) being what worker m was given last and
    lambda divided, where adaptive, by the root of a mean square, its own or an unbiased one."""
    spec = f"dc_asgd:compensation={compensation},mean_square=0.7,adaptive={form}"
    simulation = build(
        bowl(), spec, unequal(workers, seed), steps=8, seed=seed, engine="loop",
        learning_rate=0.3, optimiser="sgd", evaluations=1,
    )  # fmt: skip
    w = centre(simulation)
    gradients, is_shared = 0, "shared" in form
    squares: dict[int, Tensor] = {}
    backup: dict[int, Tensor] = {}

    def pushed(_: int, source: int, push: Push) -> None:
        nonlocal w, gradients
        if push.gradient is not None:
            g = push.gradient.double()
            gradients += 1
            whose = -1 if is_shared else source
            squares[whose] = 0.7 * squares.get(whose, 0 * g) + 0.3 * g * g
            mean = squares[whose] / (1 - 0.7**gradients if is_shared else 1)
            strength = compensation if form == "false" else compensation / (mean + 1e-7).sqrt()
            w = w - 0.3 * (g + strength * g * g * (w - backup[source]))
        backup[source] = w

    on_each_push(simulation, pushed)
    simulation.run()
    torch.testing.assert_close(centre(simulation), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", ["compensation=2", "compensation=2,adaptive=true"])
def test_without_delay_dc_asgd_is_sgd_bit_for_bit(options: str) -> None:
    """One worker's gradients are never late, so that any compensation leaves them as they are."""
    compensated = trained(f"dc_asgd:{options}", cluster_of(1))
    assert torch.equal(centre(compensated), centre(trained("downpour", cluster_of(1))))
