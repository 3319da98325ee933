"""Processes that share a GPU, with main memory in its place: who may read and write what, when."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.real.transports.conformance.tools import values_of
from gossamer.real.transports.shm import create_segments
from gossamer.real.transports.shm.contributions import ON_GPU
from gossamer.real.transports.shm.gpu import WindowOrder
from gossamer.real.transports.shm.memory import CLOSED, Control
from gossamer.real.transports.shm.system import LOCK_BYTES, SPARE_WORD
from gossamer.real.transports.transport import Stopped, StopToken
from gossamer.rules import mean_in_order
from gpu_together import WIDTH, OneStore, Together, settled
from main_memory import FileMark, MainMemory


@pytest.fixture
def trio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Together]:
    together = Together(3, [MainMemory(tmp_path) for _ in range(3)], monkeypatch)
    yield together
    together.close()


def test_values_go_through_the_gpu_once_all_have_opened_the_arenas(trio: Together) -> None:
    """The first by main memory, all later ones without; nobody sees a difference."""
    seen: list[list[bool]] = []
    for number in range(4):
        values = [values_of(rank, WIDTH, number) for rank in range(3)]
        for mean in trio.reduce(values):
            assert torch.equal(mean, mean_in_order(values))
        seen.append([bool(place & ON_GPU) for place in trio.places()])
    assert seen == [[False] * 3, [True] * 3, [True] * 3, [True] * 3]


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(1, WIDTH), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_mean_on_the_gpu_has_the_bits_of_one_in_main_memory(
    trio: Together, counts: list[int], dtype: torch.dtype
) -> None:
    """Added in order of rank and then divided, whatever the sizes and the type."""
    for number, count in enumerate(counts):
        values = [values_of(rank, count, number).to(dtype) for rank in range(3)]
        for mean in trio.reduce(values):
            assert torch.equal(mean, mean_in_order(values))


def test_a_value_is_posted_only_when_the_gpu_has_written_it(trio: Together) -> None:
    """Whoever sees a post may read the value, so the stream is waited for before."""
    trio.reduce([values_of(rank, WIDTH) for rank in range(3)])
    before = [gpu.finished for gpu in trio.gpus]
    trio.start([values_of(rank, WIDTH, 1) for rank in range(3)])
    assert [gpu.finished for gpu in trio.gpus] == [count + 1 for count in before]


def test_room_is_used_again_only_when_everybody_has_read_it(trio: Together) -> None:
    """A reader says so once its GPU has; until then the next values lie elsewhere."""
    for number in range(3):
        trio.reduce([values_of(rank, WIDTH, number) for rank in range(3)])
    places: list[int] = []
    for number in range(3, 6):
        trio.reduce([values_of(rank, WIDTH, number) for rank in range(3)])
        places.append(trio.places()[0])
    assert places[0] != places[1]
    assert places[0] == places[2]
    reading = trio.transports[1]._all_reduce._boards[1]
    assert any(key != done for key, done in zip(reading.keys, reading.finished, strict=True) if key)


def test_values_that_no_longer_fit_go_through_main_memory(trio: Together) -> None:
    """Many reductions at once are right all the same."""
    trio.reduce([values_of(rank, WIDTH) for rank in range(3)])
    large = 200_000
    rounds = [[values_of(rank, large, number) for rank in range(3)] for number in range(4)]
    started = [trio.start(values) for values in rounds]
    in_arena = [bool(p.place & ON_GPU) for p in trio.transports[0]._all_reduce._posted[-4:]]
    assert set(in_arena) == {True, False}
    for values, pendings in zip(rounds, started, strict=True):
        for pending in pendings:
            assert torch.equal(settled(pending), mean_in_order(values))


class Closed(MainMemory):
    """A GPU whose memory nobody can open after the windows."""

    def open(self, handle: str) -> Tensor:
        if self.opened >= 2:
            raise RuntimeError("invalid handle")
        return super().open(handle)


def test_an_arena_that_cannot_be_opened_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner sees that, and stays with main memory."""
    gpus = [MainMemory(tmp_path), MainMemory(tmp_path), Closed(tmp_path)]
    trio = Together(3, gpus, monkeypatch)
    for number in range(4):
        values = [values_of(rank, WIDTH, number) for rank in range(3)]
        for mean in trio.reduce(values):
            assert torch.equal(mean, mean_in_order(values))
    assert [bool(place & ON_GPU) for place in trio.places()] == [False, False, True]
    trio.close()


# ---------------------------------------------------------------------- turns at a window


class SlowMark(FileMark):
    """Recorded at once, reached when the test says so."""

    reached = False

    def query(self) -> bool:
        return SlowMark.reached and super().query()

    def precede(self) -> None:
        raise AssertionError("only a process's own marks order its stream")


class Slow(MainMemory):
    def open_mark(self, handle: str) -> SlowMark:
        return SlowMark(handle)


class Lonely(MainMemory):
    def shared_mark(self) -> FileMark:
        raise RuntimeError("not supported")


class Two:
    """Two processes at one window."""

    def __init__(self, gpus: list[MainMemory]) -> None:
        self.control = _control()
        self.stop = StopToken()
        self.last = memoryview(bytearray(8)).cast("Q")
        store = OneStore()
        self.turns = [
            WindowOrder(rank, 0, self.last, gpus[rank], store, self.control, self.stop)
            for rank in range(2)
        ]


def _control() -> Control:
    segments = create_segments(2)
    control = Control(os.dup(segments.fds[0]), 2, 0)
    segments.close()
    return control


def test_who_comes_next_waits_for_the_gpu_and_not_only_for_the_lock(tmp_path: Path) -> None:
    """Work of another process that is only asked for is not touched."""
    SlowMark.reached = False
    two = Two([MainMemory(tmp_path), Slow(tmp_path)])
    assert not two.turns[0].begin()
    two.turns[0].end()
    entered: list[bool] = []
    waiting = threading.Thread(target=lambda: entered.append(two.turns[1].begin()))
    waiting.start()
    waiting.join(0.05)
    assert entered == []
    SlowMark.reached = True
    waiting.join(100)
    assert entered == [False]


def test_who_comes_again_waits_for_nobody(tmp_path: Path) -> None:
    """Its own stream keeps the order, so a loop alone with its window never stands still."""
    gpu = MainMemory(tmp_path)
    two = Two([gpu, gpu])
    for _ in range(3):
        assert not two.turns[0].begin()
        two.turns[0].end()
    assert gpu.finished == 0


def test_the_work_of_the_dead_is_not_waited_for(tmp_path: Path) -> None:
    """It may be half done: that is told, once, and the window is in use again."""
    SlowMark.reached = False
    two = Two([MainMemory(tmp_path), Slow(tmp_path)])
    two.turns[0].begin()
    two.turns[0].end()
    two.control.set_state(0, CLOSED)
    assert two.turns[1].begin()
    two.turns[1].end()
    assert two.last[0] == 2


def test_waiting_for_a_turn_obeys_a_stop(tmp_path: Path) -> None:
    """A run that is told to stop is not kept by another's GPU."""
    SlowMark.reached = False
    two = Two([MainMemory(tmp_path), Slow(tmp_path)])
    two.turns[0].begin()
    two.turns[0].end()
    two.stop.set()
    with pytest.raises(Stopped):
        two.turns[1].begin()


def test_without_marks_that_can_be_shared_every_turn_is_waited_for(tmp_path: Path) -> None:
    """Slower, and as safe: the next process finds nothing under way."""
    gpu = Lonely(tmp_path)
    two = Two([gpu, MainMemory(tmp_path)])
    two.turns[0].begin()
    two.turns[0].end()
    assert gpu.finished == 1
    assert not two.turns[1].begin()


def test_the_word_of_the_last_user_lies_behind_the_lock() -> None:
    """A `pthread_mutex_t` has at most 48 bytes where torch runs."""
    assert SPARE_WORD % 8 == 0
    assert 48 <= SPARE_WORD <= LOCK_BYTES - 8
