"""Large frames beside the ring: moved once, kept as long as anybody looks, then room again."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import cast

import pytest

from gossamer.real.transports.shm.large_frames import LargeFrameReceiver, LargeFrameSender
from gossamer.real.transports.shm.memory import (
    CLOSED,
    DEAD,
    LARGE_FRAMES,
    OPEN,
    Control,
    FreeList,
    SharedMemory,
)

TO = 3
ROOM = 1 << 16


class States:
    """What the control memory would say of the receiver."""

    def __init__(self) -> None:
        self.now = OPEN

    def state(self, process: int) -> int:
        assert process == TO
        return self.now


class Way:
    """A sender and its receiver."""

    def __init__(self, file: int) -> None:
        memory = SharedMemory(file, ROOM)
        self.states = States()
        self.room = FreeList(0, ROOM)
        released = memoryview(bytearray(8 * LARGE_FRAMES)).cast("Q")
        control = cast(Control, self.states)
        self.sender = LargeFrameSender(memory, self.room, {TO: released}, control)
        self.receiver = LargeFrameReceiver(memory, released)

    def send(self, *parts: bytes) -> memoryview | None:
        notice = self.sender.pack(TO, parts, sum(map(len, parts)))
        return None if notice is None else self.receiver.open(memoryview(notice))


@pytest.fixture
def way() -> Iterator[Way]:
    file = os.memfd_create("test")
    os.ftruncate(file, ROOM)
    yield Way(file)
    os.close(file)


def test_what_is_sent_arrives_in_one_piece_and_can_be_written_to(way: Way) -> None:
    frame = way.send(b"head", b"", b"body" * 1000)
    assert frame is not None
    assert bytes(frame) == b"head" + b"body" * 1000
    frame[:4] = b"HEAD"
    assert bytes(frame[:8]) == b"HEADbody"


def test_two_that_are_held_never_share_bytes(way: Way) -> None:
    frames = [way.send(bytes([number]) * 5000) for number in range(8)]
    for number, frame in enumerate(frames):
        assert frame is not None
        assert bytes(frame) == bytes([number]) * 5000


def test_a_view_of_a_view_keeps_the_whole(way: Way) -> None:
    """And the place is used again once the last one is gone."""
    frame = way.send(b"a" * (ROOM // 2 + 1))
    assert frame is not None
    kept = frame[10:20].cast("B")
    del frame
    gc.collect()
    assert way.send(b"b" * (ROOM // 2 + 1)) is None
    assert bytes(kept) == b"a" * 10
    del kept
    gc.collect()
    again = way.send(b"b" * (ROOM // 2 + 1))
    assert again is not None
    assert bytes(again[:2]) == b"bb"


def test_there_is_no_place_for_more_than_fits(way: Way) -> None:
    assert way.send(b"x" * (ROOM + 1)) is None
    held = [way.send(b"x") for _ in range(LARGE_FRAMES)]
    assert None not in held
    assert way.send(b"x") is None
    held.pop()
    gc.collect()
    assert way.send(b"y") is not None


@pytest.mark.parametrize(("state", "is_free"), [(DEAD, True), (CLOSED, False)])
def test_the_dead_hold_nothing_and_those_that_left_do(way: Way, state: int, is_free: bool) -> None:
    """Who has closed its transport may still look at what it got."""
    frame = way.send(b"a" * ROOM)
    assert frame is not None
    way.states.now = state
    assert (way.sender.pack(TO, [b"b" * ROOM], ROOM) is not None) == is_free
    assert bytes(frame[:1]) == (b"b" if is_free else b"a")
