"""Laws of backup workers: which gradients make a step, what is dropped, what is handed out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gossamer.config.faults import Fault
from support import (
    bowl,
    build,
    centre,
    cluster_of,
    run_signed,
    trained,
    unequal,
)

few = examples(max_examples=12)
seeds = st.integers(0, 999)
LATE = Fault("drop", amount=0.3)


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
