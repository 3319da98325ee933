"""Turns at a window on a GPU whose streams wait for each other: no process does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gossamer.real.transports.shm import create_segments
from gossamer.real.transports.shm.line import Line
from gossamer.real.transports.shm.segments import CLOSED, Control
from gossamer.real.transports.shm.turns import Turns
from gossamer.real.transports.shm.words import TURNS, Words
from gossamer.real.transports.transport import StopToken
from gpu_together import OneStore, Together
from main_memory import MainMemory, MainSignals, Signalling


class Noting(MainSignals):
    """Says which waits it was asked for, and goes on."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self.words = control.words
        self.waits: list[int] = []
        self.values: list[int] = []

    def set(self, word: int, value: int) -> None:
        self.values.append(value)
        super().set(word, value)

    def wait(self, word: int, value: int) -> None:
        self.waits.append(value)


class Two:
    """Two processes at one window."""

    def __init__(self, folder: Path, near: tuple[bool, bool] = (True, True)) -> None:
        self.segments = create_segments(2)
        self.control = self.segments._control
        self.signals = [Noting(self.control) for _ in range(2)]
        self.gpus = [MainMemory(folder) for _ in range(2)]
        self.stop = stop = StopToken()
        last, store = memoryview(bytearray(8)).cast("Q"), OneStore()
        self.lines = [
            Line(rank, Words(TURNS, self.control.words, 2, signals, stop), signals)
            for rank, signals in enumerate(self.signals)
        ]
        self.turns = [
            Turns(
                rank, 0, last, self.gpus[rank], store, self.control, stop, self.lines[rank],
                is_near=near[rank],
            )
            for rank in range(2)
        ]  # fmt: skip

    def turn(self, rank: int) -> bool:
        is_torn = self.turns[rank].begin()
        self.turns[rank].end()
        return is_torn


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_who_comes_next_lets_its_stream_wait(two: Two) -> None:
    """Though the GPU of the one before has not come to the end of its turn."""
    two.signals[0].is_silent = True
    assert not two.turn(0)
    assert not two.turn(1)
    assert two.signals[1].waits == [1]
    assert [gpu.finished for gpu in two.gpus] == [0, 0]


def test_a_turn_that_has_ended_is_not_waited_for(two: Two) -> None:
    """Asking the GPU to wait takes longer than looking."""
    assert not two.turn(0)
    assert not two.turn(1)
    assert two.signals[1].waits == []
    assert two.lines[1].torn_updates == 0


def test_one_turn_ends_at_two_windows(tmp_path: Path) -> None:
    """Whoever comes to the second waits for the same signal, which is set once."""
    two = Two(tmp_path)
    two.signals[0].is_silent = True
    number = two.turns[0].end()
    assert number == 1
    assert two.turns[0].end(number) == 1
    assert two.signals[0].values == [1]
    assert not two.turn(1)
    assert two.signals[1].waits == [1]


def test_averaging_two_windows_is_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process that averages; the other's streams are asked for nothing."""
    gpus = [Signalling(tmp_path) for _ in range(2)]
    two = Together(2, gpus, monkeypatch)
    first, second = (two.transports[rank].window(rank) for rank in range(2))
    for window, value in ((first, 1.0), (second, 3.0)):
        window.fill_(value)
    asked: list[tuple[int, int]] = []
    set_word = gpus[0].own.set

    def noting(word: int, value: int) -> None:
        asked.append((word, value))
        set_word(word, value)

    gpus[0].own.set = noting
    for _ in range(3):
        two.transports[0].average(0, 1)
    assert len(asked) == 3
    assert [float(window.mean()) for window in (first, second)] == [2.0, 2.0]
    two.close()


def test_who_comes_again_has_nothing_to_wait_for(two: Two) -> None:
    """Its stream does everything in order."""
    for _ in range(3):
        assert not two.turn(0)
    assert two.signals[0].waits == []
    assert two.signals[0].values == [1, 2, 3]


def test_another_stream_of_the_same_process_waits_for_the_first(two: Two) -> None:
    """And the end of its turn is told by a mark, as its order with the first is not known."""
    two.signals[0].is_silent = True
    two.turn(0)
    two.signals[0].stream = 2
    assert not two.turn(0)
    assert two.signals[0].waits == [1]
    assert two.signals[0].values == [1]
    assert not two.turn(1)
    assert two.signals[1].waits == []


def test_a_turn_that_the_dead_never_ended_is_told_once(two: Two) -> None:
    """What it left may be half done; then the window is in use again."""
    two.turn(0)
    two.signals[0].is_silent = True
    two.turn(0)
    two.segments.mark_dead(0)
    assert two.turn(1)
    assert not two.turn(1)


def test_a_turn_that_the_dead_had_ended_is_whole(two: Two) -> None:
    two.turn(0)
    two.segments.mark_dead(0)
    assert not two.turn(1)
    assert two.lines[1].torn_updates == 0


def test_who_was_told_to_wait_for_the_dead_learns_that_it_was_in_vain(two: Two) -> None:
    """The stream is let go; the update counts as torn."""
    two.signals[0].is_silent = True
    two.turn(0)
    assert not two.turn(1)
    assert two.lines[1].torn_updates == 0
    two.segments.mark_dead(0)
    assert not two.lines[1].has_ended(0, 1)  # waits for the release
    assert two.lines[1].torn_updates == 1


def test_who_has_left_in_good_order_has_ended_its_turns(two: Two) -> None:
    two.turn(0)
    two.turns[0].finish()
    two.control.set_state(0, CLOSED)
    assert not two.turn(1)


def test_who_leaves_waits_for_its_gpu_though_all_is_to_stop(two: Two) -> None:
    """It has asked for it, so it will come; others must find its turns ended."""
    two.signals[0].is_silent = True
    two.turn(0)
    two.stop.set()
    later = threading.Timer(0.05, lambda: two.signals[0].words.__setitem__(4, 1))
    later.start()
    two.turns[0].finish()
    assert two.signals[0].words[4] == 1


def test_who_is_on_another_gpu_waits_itself(tmp_path: Path) -> None:
    """Streams of two GPUs know nothing of each other; its turns end by marks."""
    two = Two(tmp_path, near=(True, False))
    two.turn(0)
    assert not two.turn(1)
    assert not two.turn(0)
    assert two.signals[1].waits == two.signals[1].values == []
    assert two.signals[0].values == [1, 2]


def test_numbers_rise_whichever_thread_ends_a_turn(two: Two) -> None:
    """A stream that waits for one would else be passed over."""
    threads = [
        threading.Thread(target=lambda: [two.lines[0].end_turn() for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert two.signals[0].values == list(range(1, 801))
