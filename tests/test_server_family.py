"""Laws of the parameter servers between "wait for all" and "wait for none": clocks and bounds,
softsync and its staleness, compensated delays, backup workers."""

from __future__ import annotations

from itertools import pairwise
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from gossamer.methods.shards import Push
from gossamer.sim.cluster import Cluster, Compute
from gossamer.sim.faults import Fault
from gossamer.sim.gradients import Request
from gossamer.sim.simulation import Result, Simulation
from support import (
    Signed,
    before_each_descent,
    bowl,
    build,
    centre,
    cluster_of,
    on_each_push,
    pieces,
    racing,
    signed,
    unequal,
)

few = examples(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 999)
LATE = Fault("drop", amount=0.3)


def trained(method: str, cluster: Cluster, **choices: object) -> Simulation:
    """A run of true gradients on the quadratic, by plain SGD, that has ended."""
    usual = {"learning_rate": 0.05, "optimiser": "sgd", "engine": "loop", "evaluations": 1}
    simulation = build(pieces(3, 2, 1), method, cluster, steps=8, **(usual | choices))
    simulation.run()
    return simulation


def run_signed(
    method: str, cluster: Cluster, *, steps: int, seed: int = 0, **choices: object
) -> tuple[Signed, Result, list[Tensor]]:
    """A signed run; also what the server contained after each of its updates, from none on."""
    simulation, engine = signed(method, cluster, steps=steps, seed=seed, **choices)
    contents: list[Tensor] = []

    def note(replica: object, _: object) -> None:
        if replica is simulation.world.replicas[-1]:
            contents.append(engine.contents(centre(simulation)))

    before_each_descent(simulation, note)
    result = simulation.run()
    return engine, result, [*contents, engine.contents(centre(simulation))]


# ---------------------------------------------------------------------- clocks


def gaps_at_each_start(simulation: Simulation) -> list[int]:
    """For each gradient as it starts: its clock minus the slowest one completed at any server, as
    told by the messages that have arrived there."""
    world = simulation.world
    ends = range(world.size, world.ends)
    completed = {(server, rank): 0 for server in ends for rank in range(world.size)}
    clocks = [0] * world.size
    gaps: list[int] = []
    usual = world.desk.start

    def pushed(server: int, source: int, push: Push) -> None:
        if push.gradient is not None:
            completed[server, source] = push.clock + 1

    def started(request: Request) -> None:
        known = [completed[s, rank] for s in ends for rank in world.clients_of(s)]
        gaps.append(clocks[request.worker] - min(known))
        clocks[request.worker] += 1
        usual(request)

    on_each_push(simulation, pushed)
    world.desk.start = started
    return gaps


@examples(max_examples=40, deadline=None, derandomize=True)
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
    made = [account.steps for account in simulation.world.accounts.workers]
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
    made = simulation.world.accounts.workers[1].steps
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


@pytest.mark.parametrize(("workers", "n"), [(8, 1), (8, 2), (12, 4), (32, 4), (16, 16)])
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


# ---------------------------------------------------------------------- backup workers


@few
@given(st.integers(1, 5), st.data(), seeds)
def test_backup_workers_use_exactly_n_fresh_gradients_an_update(
    workers: int, data: st.DataObject, seed: int
) -> None:
    """Each update is the mean of N gradients of different workers, all of them taken at the version
    before it; every other gradient is dropped and counted: at most one for each of the b who were
    not among the first, and what was waiting at the end of the run."""
    backups = data.draw(st.integers(0, workers - 1))
    n = workers - backups
    spec = f"backup_workers:backups={backups}"
    engine, result, contents = run_signed(spec, unequal(workers, seed, LATE), steps=8, seed=seed)
    for before, after in pairwise(contents):
        change = after - before
        used = change.nonzero().tolist()
        assert len({rank for rank, _ in used}) == len(used) == n
        assert all(torch.equal(engine.read[rank, number], before) for rank, number in used)
        torch.testing.assert_close(change[change != 0], torch.full((n,), 1 / n).double())
    updates = len(contents) - 1
    assert updates >= 1
    assert result.steps == n * updates + result.dropped_gradients
    assert result.dropped_gradients <= backups * updates + workers
    assert result.max_staleness == 0


@pytest.mark.parametrize("distribution", ["normal", "exponential", "lognormal"])
@pytest.mark.parametrize("backups", [1, 2, 5])
def test_backup_workers_waste_at_most_their_share(distribution: str, backups: int) -> None:
    """Of the work of N + b exchangeable workers at most b / (N + b) is dropped, and not much less
    where the late ones are not that late."""
    cluster = cluster_of(10, distribution=distribution, jitter=0.3)
    spec = f"backup_workers:backups={backups}"
    result = build(bowl(), spec, cluster, steps=150, engine="none").run()
    share = result.dropped_gradients / result.steps
    assert 0.4 * backups / 10 < share <= backups / 10


@few
@given(st.integers(1, 5), st.integers(1, 3), seeds)
def test_without_backups_it_is_the_synchronous_server_bit_for_bit(
    workers: int, servers: int, seed: int
) -> None:
    """Nothing is dropped, and the server goes the same way; only the output is its average."""
    cluster = unequal(workers, seed, LATE)
    options = f"servers={servers},server_optimiser=sgd:momentum=0.9"
    none = trained(f"backup_workers:backups=0,{options}", cluster, seed=seed)
    every = trained(f"sync_server:{options}", cluster, seed=seed)
    assert torch.equal(centre(none), centre(every))


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9])
def test_the_output_is_the_moving_average_of_the_servers_model(decay: float) -> None:
    """a <- decay a + (1 - decay) x after each update, from the start on; without decay, x."""
    spec = f"backup_workers:backups=1,decay={decay}"
    engine, result, contents = run_signed(spec, unequal(4, 1), steps=12)
    average = contents[0]
    for after in contents[1:]:
        average = decay * average + (1 - decay) * after
    torch.testing.assert_close(engine.contents(result.parameters), average, rtol=1e-5, atol=1e-6)
    assert torch.equal(average, contents[-1]) == (decay == 0)


def test_what_a_worker_sent_before_it_died_takes_nobodys_place() -> None:
    """When the others learn of its death, its gradient is left out of the update that was waiting
    for a slow one: without backups nobody alive is ever dropped."""
    faults = [Fault("slow", worker=2, amount=10), Fault("kill", at=0.02, worker=0)]
    _, result, contents = run_signed("sync_server", cluster_of(3, faults=faults), steps=4)
    assert (contents[-1][0] == 0).all()
    assert contents[-1][1:].sum(1).tolist() == [3.0, 3.0]
    assert result.dropped_gradients == 0


def test_the_last_of_the_backup_workers_goes_on_alone() -> None:
    """When three of four have died, every gradient of the fourth is an update of its own."""
    kills = [Fault("kill", at=0.03, worker=rank) for rank in range(3)]
    _, result, (*_, used) = run_signed("backup_workers", cluster_of(4, faults=kills), steps=8)
    assert result.living == 1
    assert used[:3].count_nonzero() <= 9
    assert (used[3] == 1).sum() >= 20
