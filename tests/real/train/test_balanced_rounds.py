"""`balance=speed` on real workers: all know the same shares, which are those of virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.batch_shares import BatchShares
from gossamer.errors import Error
from gossamer.real.train.batches import BalancedBatches
from gossamer.real.transports.local import LocalStore
from gossamer.sim.budget import Budget
from gossamer.tasks.split import BalancedSampler, Order

WORKERS, BATCH, DATA = 3, 8, 500
SLOWNESS = {0: 4.0, 1: 1.0, 2: 1.5}


def seconds(rank: int, samples: int) -> float:
    return SLOWNESS[rank] * (0.002 + 0.001 * samples)


def made(
    store: LocalStore, rank: int, samples: int, live: set[int], agreed: dict[int, frozenset[int]]
) -> BalancedBatches:
    """`live` may change; as in a run, who asks about a block of rounds first fixes its members."""
    return BalancedBatches(
        samples, Order(DATA, 0, BATCH), store, rank, WORKERS,
        lambda step: agreed.setdefault(step // 16, frozenset(live)), lambda: frozenset(live),
    )  # fmt: skip


def round_of(workers: dict[int, BalancedBatches], step: int) -> dict[int, np.ndarray] | None:
    """What each worker computes in this round; None when all are told the end."""
    opened = {rank: one.open_step(step) for rank, one in workers.items()}
    assert len(set(opened.values())) == 1
    if not all(opened.values()):
        return None
    found = {rank: one.next_batch() for rank, one in workers.items()}
    for rank, one in workers.items():
        one.computed(len(found[rank]), seconds(rank, len(found[rank])))
    return found


def test_real_rounds_are_those_of_virtual_time() -> None:
    """Where gradients take the same times, every worker has the same samples in every round."""
    samples, live = 60 * BATCH * WORKERS, set(range(WORKERS))
    store, agreed = LocalStore(), dict[int, frozenset[int]]()
    workers = {rank: made(store, rank, samples, live, agreed) for rank in live}
    budget = Budget(
        samples, BATCH, DATA, synchronous=True, working=live, shares=BatchShares(BATCH, WORKERS)
    )
    sampler = BalancedSampler(Order(DATA, 0, BATCH), WORKERS, budget.shares_of)
    step = 0
    while (found := round_of(workers, step)) is not None:
        for rank in live:
            assert budget.open_step(step) is not None
            own = sampler.next(rank)
            np.testing.assert_array_equal(own, found[rank])
            assert workers[rank].weight == budget.weight(rank, step, live) == len(own) / BATCH
            budget.deliver(rank, len(own), step, seconds(rank, len(own)))
        step += 1
    assert step == 60
    assert budget.open_step(step) is None
    assert budget.shares_of(59)[0] < BATCH / 2


def test_the_survivors_agree_and_make_up_for_what_the_dead_left() -> None:
    """Until its death is agreed on the dead worker's share is missing, and the weights of the
    others allow for that; then the living share whole rounds. The budget is processed; what
    the dead one made in the last two blocks is made again."""
    samples, live = 40 * BATCH * WORKERS, set(range(WORKERS))
    store, agreed = LocalStore(), dict[int, frozenset[int]]()
    workers = {rank: made(store, rank, samples, live, agreed) for rank in live}
    processed = step = 0
    while (found := round_of(workers, step)) is not None:
        sizes = {rank: len(batch) for rank, batch in found.items()}
        processed += sum(sizes.values())
        mean = sum(sizes.values()) / len(sizes)
        for rank, one in workers.items():
            assert one.weight == pytest.approx(sizes[rank] / mean)
        assert sum(sizes.values()) == BATCH * len(live) or 22 <= step < 32
        step += 1
        if step == 22:
            del workers[0]
            live.discard(0)
    assert samples <= processed < samples + 22 * BATCH


def test_a_resumed_worker_goes_on_with_the_shares_it_had() -> None:
    """They are in the checkpoint."""
    live = set(range(WORKERS))
    first = {rank: made(store, rank, 9999, live, agreed) for store, agreed in [(LocalStore(), {})]
             for rank in live}  # fmt: skip
    for step in range(12):
        round_of(first, step)
    states = [first[rank].state() for rank in sorted(live)]
    store, agreed = LocalStore(), dict[int, frozenset[int]]()
    again = {rank: made(store, rank, 9999, live, agreed) for rank in live}
    for rank, one in again.items():
        one.resume(states[rank], states)
    for step in range(12, 20):
        before, after = round_of(first, step), round_of(again, step)
        assert before is not None
        assert after is not None
        for rank in live:
            np.testing.assert_array_equal(before[rank], after[rank])


def test_speeds_that_no_worker_has_written_are_refused() -> None:
    """Under torchrun anybody can write into the store."""
    store = LocalStore()
    store.agree("speeds/5", "0=1.0 7=nan")
    worker = made(store, 0, 9999, {0}, {})
    for step in range(5):
        worker.open_step(step)
    with pytest.raises(Error, match="the speeds of workers"):
        worker.open_step(5)
