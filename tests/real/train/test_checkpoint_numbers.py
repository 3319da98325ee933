"""Asynchronous workers, however unequal, write the same checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.real.train import checkpoint as checkpointing
from gossamer.real.train.batches import LeasedBatches
from gossamer.real.train.checkpoint import AsynchronousTimer, CheckpointedBatches, Every
from gossamer.real.transports.local import LocalStore
from gossamer.tasks.split import Order

BATCHES = 400


class Workers:
    """All of a run, in step with nobody; `written` is what each has saved, in order."""

    def __init__(self, every: str, size: int) -> None:
        store, order = LocalStore(), Order(BATCHES, 0, 1)
        self.living = set(range(size))
        self.ended = set[int]()
        self.written: list[list[int]] = [[] for _ in range(size)]
        self._paces = [
            LeasedBatches(
                BATCHES, 1, BATCHES, store, order, rank, size, lambda: frozenset(self.living)
            )
            for rank in range(size)
        ]
        self._checkpointed = [
            CheckpointedBatches(
                pace,
                AsynchronousTimer(
                    Every.parse(every), store, pace, lambda: len(self.living), size, 0
                ),
                saved.append, 0,
            )
            for pace, saved in zip(self._paces, self.written, strict=True)
        ]  # fmt: skip

    def step(self, rank: int) -> None:
        if rank not in self.living - self.ended:
            return
        if self._checkpointed[rank].open_step(0):
            self._paces[rank].next_batch()
        else:
            self.ended.add(rank)

    def run_to_end(self, slowness: int) -> None:
        """Worker 0 makes one step while the others make so many."""
        while self.living - self.ended:
            for rank in range(len(self.written)):
                for _ in range(slowness if rank else 1):
                    self.step(rank)


@given(
    every=st.integers(1, 30),
    size=st.integers(1, 4),
    slowness=st.integers(1, 10),
    order=st.lists(st.integers(0, 3), max_size=100),
)
def test_every_checkpoint_that_is_begun_becomes_whole(
    every: int, size: int, slowness: int, order: list[int]
) -> None:
    """But for one that is overtaken by the end: all write the same ones, which are multiples of the
    interval, and the last of them is everybody's end."""
    workers = Workers(f"{every}steps", size)
    for rank in order:
        if rank < size:
            workers.step(rank)
    workers.run_to_end(slowness)
    ends = {written.pop() for written in workers.written}
    assert ends == {-(-BATCHES // size) + 1}
    whole = min(workers.written, key=len)
    for written in workers.written:
        assert written == sorted(set(written))
        assert written[: len(whole)] == whole
        assert len(written) <= len(whole) + 1
        assert all(number % every == 0 for number in written)


@pytest.mark.parametrize(("every", "slowness"), [(3, 1), (10, 1), (40, 5)])
def test_none_is_left_out_where_everyone_has_time_for_it(every: int, slowness: int) -> None:
    """Everyone comes to the end of a lease before the others are an interval further."""
    workers = Workers(f"{every}steps", 2)
    workers.run_to_end(slowness)
    assert workers.written[0][:-1] == list(range(every, workers.written[0][-2] + 1, every))
    assert workers.written[0][-2] > BATCHES // 2 - 2 * every


def test_a_death_does_not_end_the_checkpoints_of_the_living() -> None:
    """The one that the dead worker had not made stays unfinished, those after it become whole."""
    workers = Workers("10steps", 3)
    while not workers.written[1]:
        workers.step(1)
    workers.living.discard(2)
    workers.run_to_end(1)
    assert workers.written[0] == workers.written[1]
    assert workers.written[0][:4] == [10, 20, 30, 40]
    assert workers.written[2] == []


def test_timed_checkpoints_become_whole_though_a_step_lasts_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow worker makes the one that the others have begun, and they wait with the next."""
    now = [0.0]
    monkeypatch.setattr(checkpointing.time, "monotonic", lambda: now[0])
    workers = Workers("1s", 3)
    while workers.living - workers.ended:
        for _ in range(5):
            now[0] += 0.5
            workers.step(1)
            workers.step(2)
        workers.step(0)
    assert len(workers.written[0]) > 5
    assert workers.written[0] == workers.written[1] == workers.written[2]
