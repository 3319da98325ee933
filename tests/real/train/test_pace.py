"""Every batch of a run is processed by somebody who lives, whoever dies and when."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.real.train.batches import LeasedBatches, RoundBatches
from gossamer.real.transports.local import LocalStore
from gossamer.tasks.split import Order, make_sampler

BATCH = 3


class DyingStore(LocalStore):
    """Stops whoever is to die after so many of its questions: a death between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, int] = {}
        self.asking = 0

    def _ask(self) -> None:
        if self.asking in self.left:
            self.left[self.asking] -= 1
            if self.left[self.asking] < 0:
                raise KeyboardInterrupt

    def add(self, key: str, amount: int) -> int:
        found = super().add(key, amount)
        self._ask()
        return found

    def agree(self, key: str, value: str) -> str:
        found = super().agree(key, value)
        self._ask()
        return found


@given(
    workers=st.integers(2, 4),
    batches=st.integers(1, 40),
    deaths=st.dictionaries(st.integers(1, 3), st.integers(0, 12), max_size=3),
    order=st.lists(st.integers(0, 3), max_size=120),
)
def test_leases_of_the_dead_are_taken_over(
    workers: int, batches: int, deaths: dict[int, int], order: list[int]
) -> None:
    """Worker 0 lives and comes last, so nothing may be left undone; nothing is done for fun.

    The others die between any two questions to the store, also before their name is written.
    """
    store = DyingStore()
    store.left = {rank: after for rank, after in deaths.items() if rank < workers}
    live = set(range(workers))
    repeated = [0]
    samples = batches * BATCH

    def make(rank: int) -> LeasedBatches:
        return LeasedBatches(
            samples, BATCH, samples, store, Order(samples, 0, BATCH), rank, workers,
            lambda: frozenset(live), lambda count: repeated.__setitem__(0, repeated[0] + count),
        )  # fmt: skip

    leases = [make(rank) for rank in range(workers)]
    done: list[int] = []
    held: dict[int, list[int]] = {}

    def step(rank: int) -> bool:
        """The batch counts as processed when the worker lives on to ask for the next."""
        store.asking = rank
        done.extend(held.pop(rank, ()))
        try:
            if not leases[rank].open_step(0):
                return False
            held[rank] = leases[rank].next_batch().tolist()
        except KeyboardInterrupt:
            live.discard(rank)
            return False
        return True

    for rank in order:
        if rank in live and rank < workers:
            step(rank)
    # Who has not ended by now is slow, and dies if it was to.
    for rank in [rank for rank in deaths if rank < workers]:
        live.discard(rank)
    for rank in sorted(live, reverse=True):
        while step(rank):
            pass
    assert set(done) == set(range(samples))
    assert len(done) <= samples + repeated[0] + 4 * BATCH * len(deaths)
    if not deaths:
        assert sorted(done) == list(range(samples))
        assert repeated[0] == 0


def test_the_epoch_does_not_go_back_with_what_the_dead_had_left() -> None:
    """A learning rate follows it: the last steps of a run are not its first ones."""
    store, live, samples = LocalStore(), {0, 1}, 40 * BATCH

    def make(rank: int) -> LeasedBatches:
        order = Order(samples, 0, BATCH)
        return LeasedBatches(
            samples, BATCH, samples, store, order, rank, 2, lambda: frozenset(live)
        )  # fmt: skip

    first, second = make(0), make(1)
    assert second.open_step(0)  # it has the first lease
    live.discard(1)
    epochs: list[float] = []
    done: list[int] = []
    while first.open_step(0):
        epochs.append(first.epoch)
        done.extend(first.next_batch().tolist())
    assert sorted(done) == list(range(samples))
    assert epochs == sorted(epochs)
    assert epochs[-1] == pytest.approx(39 / 40)
    assert first.epoch == 1.0  # the run is over: all of it


class CountingStore(LocalStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get(self, key: str) -> str | None:
        self.asked += 1
        return super().get(key)


@pytest.mark.parametrize("dies_after", [0, 1, 9])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_an_early_death_does_not_make_the_end_read_all_leases(
    dies_after: int, is_resumed: bool
) -> None:
    """However long the others went on, they look for what was left around the death only."""
    batches, live, order = 8000, {0, 1, 2}, Order(8000, 0, 1)
    store = CountingStore()
    paces = [
        LeasedBatches(batches, 1, batches, store, order, rank, 3, lambda: frozenset(live))
        for rank in range(3)
    ]
    done = list[int]()
    if is_resumed:
        # Everyone had two leases, the second one half done, and between them many were nobody's.
        states = [
            {"taken": [[n, n + 1], [1000 + n, 1001 + n]], "left": [4 * n + 4002, 4 * n + 4004],
             "batches": batches, "drawn": 6}
            for n in range(3)
        ]  # fmt: skip
        for pace, state in zip(paces, states, strict=True):
            pace.resume(state, states)
        before = [*range(12), *(4 * n + at for n in range(3) for at in (4000, 4001))]
        done += [int(order.lookup(position, 1)[0]) for position in before]

    def step(rank: int) -> bool:
        if not paces[rank].open_step(0):
            return False
        batch = int(paces[rank].next_batch()[0])
        if rank in live:
            done.append(batch)
        return True

    for _ in range(dies_after):
        for rank in range(3):
            step(rank)
    live.discard(2)
    ending = {0, 1}
    while ending:
        ending = {rank for rank in ending if step(rank)}
    assert set(done) == set(range(batches))
    assert store.asked < 200


def make_rounds(
    live_at: Callable[[int], frozenset[int]], samples: int, workers: int
) -> RoundBatches:
    sampler = make_sampler(torch.zeros(90, dtype=torch.int64), workers, BATCH, "shuffled", 0, True)
    return RoundBatches(samples, BATCH, 90, live_at, sampler, 0, workers)


@given(died_at=st.integers(0, 80), late=st.integers(0, 15), samples=st.integers(1, 600))
def test_rounds_make_up_for_what_the_dead_left(died_at: int, late: int, samples: int) -> None:
    """Also if a few steps pass before the death is known; everybody counts alike."""
    workers = 3
    made = [0]

    def live_at(step: int) -> frozenset[int]:
        # Who asks about a block first fixes it for all, knowing what is known by then.
        block = step // 16
        if block not in agreed:
            known = made[0] >= died_at + late
            agreed[block] = frozenset({0, 2} if known else {0, 1, 2})
        return agreed[block]

    agreed: dict[int, frozenset[int]] = {}
    rounds = make_rounds(live_at, samples, workers)
    processed = 0
    while rounds.open_step(made[0]):
        processed += BATCH * (3 if made[0] < died_at else 2)
        made[0] += 1
        assert made[0] < 1000
    lacking = samples - processed
    if made[0] >= died_at + late:
        assert lacking <= 0
    assert processed <= samples + BATCH * (workers + 32 + 16)


def test_rounds_without_deaths_end_at_the_budget() -> None:
    """As many rounds as the samples fill, no more."""
    rounds = make_rounds(lambda step: frozenset(range(3)), 90, 3)
    steps = 0
    while rounds.open_step(steps):
        steps += 1
    assert steps == 10
    assert rounds.epoch == 1.0
    assert isinstance(rounds.next_batch(), np.ndarray)
