"""The parts of the shared-memory transport, alone or as two transports inside one process."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import PeerLost, ProtocolError
from gossamer.real.transports.conformance.tools import FrameRecorder, mean_of
from gossamer.real.transports.shm import Segments, ShmTransport, create_segments
from gossamer.real.transports.shm.memory import (
    CACHE_LINE,
    CELL_FIELDS,
    CELLS,
    LARGE_FRAMES,
    RING_BYTES,
    RING_HEAD_BYTES,
    FreeList,
    lay_out,
)
from gossamer.real.transports.shm.rings import LENGTH_BYTES, RingReader, RingWriter
from gossamer.real.transports.shm.system import Bell
from gossamer.real.transports.transport import Stopped, StopToken, Window
from gossamer.rules import mean_in_order


class NoStore:
    """These tests agree on nothing."""

    def agree(self, key: str, value: str) -> str:
        return value

    def add(self, key: str, amount: int) -> int:
        return amount

    def get(self, key: str) -> str | None:
        return None


def in_both(action: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=action, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def pair() -> Iterator[tuple[Segments, list[ShmTransport], list[FrameRecorder]]]:
    """Two transports with a window of ten each, as if in two processes."""
    segments = create_segments(2)
    files = [os.dup(file) for file in segments.fds]
    transports = [
        ShmTransport(0, 2, segments.fds, NoStore()),
        ShmTransport(1, 2, files, NoStore()),
    ]
    segments.fds = ()
    recorders = [FrameRecorder(), FrameRecorder()]
    windows = {rank: Window(10, torch.float32, rank) for rank in range(2)}
    in_both(
        lambda rank: transports[rank].open(
            windows, {rank: torch.zeros(10)}, recorders[rank], StopToken()
        )
    )
    yield segments, transports, recorders
    for transport in transports:
        transport.close()


Pair = tuple[Segments, list[ShmTransport], list[FrameRecorder]]


@given(st.lists(st.integers(0, 5_000), max_size=30), st.data())
def test_room_is_never_given_twice(lengths: list[int], data: st.DataObject) -> None:
    """What is taken never overlaps, stays inside, and what is given back serves again."""
    room = FreeList(CACHE_LINE, CACHE_LINE + 20_000)
    taken: dict[int, int] = {}
    for length in lengths:
        start = room.take(length)
        if start is not None:
            assert start >= CACHE_LINE
            assert start + length <= CACHE_LINE + 20_000
            assert all(start >= s + n or start + length <= s for s, n in taken.items() if n)
            taken[start] = length
        if taken and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(taken)))
            del taken[gone]
            room.give_back(gone)
    for start in taken:
        room.give_back(start)
    assert room.take(20_000 - CACHE_LINE) == CACHE_LINE


def test_a_place_of_no_bytes_is_one_of_its_own() -> None:
    """Else giving it back would give back what lies at the same place."""
    room = FreeList(0, 1 << 12)
    nothing, some = room.take(0), room.take(CACHE_LINE)
    assert nothing is not None
    assert some is not None
    assert nothing != some
    room.give_back(nothing)
    assert some not in [room.take(CACHE_LINE) for _ in range((1 << 12) // CACHE_LINE)]


def no_large_frame(notice: memoryview) -> memoryview:
    """Where no large frames are sent, none comes."""
    raise AssertionError(bytes(notice))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3 * RING_BYTES // 2), max_size=4), st.integers(0, 1000))
def test_a_ring_delivers_the_frames_that_were_written(lengths: list[int], seed: int) -> None:
    """However writer and reader take turns, across the seam, longer than the ring itself."""
    random = Random(seed)
    region = memoryview(bytearray(RING_HEAD_BYTES + RING_BYTES))
    bell = Bell(mmap.mmap(-1, CACHE_LINE), 0, 0)
    writer, reader = RingWriter(region), RingReader(region, bell, no_large_frame)
    frames = [random.randbytes(length) for length in lengths]
    stream = memoryview(
        b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in frames)
    )
    arrived: list[bytes] = []
    while stream:
        for _ in range(3):
            limit = random.choice([1, 7, 300_000, RING_BYTES])
            stream = stream[writer.write(stream[:limit]) :]
        writer.publish()
        arrived += map(bytes, reader.frames())
    assert arrived == frames


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2)), max_size=8))
def test_nothing_in_a_layout_overlaps(sizes: list[tuple[int, int]]) -> None:
    """Rings, cells, locks, windows and the memory for reductions each have their own bytes."""
    windows = {end: Window(n, torch.float64, process) for end, (n, process) in enumerate(sizes)}
    layout = lay_out(1, 3, windows)
    ranges = [(layout.ring(source), RING_HEAD_BYTES + RING_BYTES) for source in range(3)]
    ranges += [
        (layout.cells, 8 * CELLS * CELL_FIELDS),
        (layout.releases, 8 * LARGE_FRAMES * 3),
        (layout.reductions, layout.large_frames - layout.reductions),
        (layout.large_frames, layout.total - layout.large_frames),
    ]
    for end, place in layout.windows.items():
        assert windows[end].process == 1
        assert place.data % CACHE_LINE == 0
        ranges += [(place.lock, CACHE_LINE), (place.data, 8 * place.window.numel)]
    ranges.sort()
    for (start, length), (following, _) in pairwise(ranges):
        assert start + length <= following


def test_a_cancelled_all_reduce_keeps_nobody_waiting(pair: Pair) -> None:
    """The one who gave up has still contributed, and its memory is used again afterwards."""
    _, (first, second), _ = pair
    for number in range(2 * CELLS):  # more than there is room for at once
        mean_of(first, torch.full((3,), float(number)), [0, 1]).cancel()
        pending = mean_of(second, torch.zeros(3), [0, 1])
        assert pending.settle is not None
        pending.settle()
        assert pending.result().tolist() == [number / 2] * 3


def test_more_all_reduces_than_there_is_room_for_are_refused(pair: Pair) -> None:
    """Starting without ever awaiting ends with an error that says so."""
    _, (first, _), _ = pair
    for _ in range(CELLS):
        mean_of(first, torch.zeros(1), [0, 1])
    with pytest.raises(ProtocolError, match="await some"):
        mean_of(first, torch.zeros(1), [0, 1])


def test_members_with_values_of_different_length_are_told(pair: Pair) -> None:
    """A method whose workers disagree about the length gets an error rather than a sum."""
    _, (first, second), _ = pair
    mean_of(second, torch.zeros(4), [0, 1])
    pending = mean_of(first, torch.zeros(3), [0, 1])
    assert pending.settle is not None
    with pytest.raises(ProtocolError, match=r"16 bytes .* 12"):
        pending.settle()


def test_what_does_not_fit_into_a_window_is_refused(pair: Pair) -> None:
    """Adding beyond the end of a window would change somebody else's."""
    _, (first, _), _ = pair
    with pytest.raises(ProtocolError, match="do not fit"):
        first.accumulate(1, torch.zeros(5), 6)
    first.accumulate(1, torch.ones(5), 5)
    assert first.read(1).result().tolist() == [0.0] * 5 + [1.0] * 5


def test_one_that_has_closed_is_never_marked_dead(pair: Pair) -> None:
    """The launcher sees every process end; only those that had not closed are lost."""
    segments, (first, second), recorders = pair
    second.close()
    segments.mark_dead(1)
    first.send(0, [b"a frame later"])
    assert recorders[0].take(0) == b"a frame later"
    assert first.lost == frozenset()


def test_the_windows_of_the_dead_are_lost_with_them(pair: Pair) -> None:
    """Reading, adding and averaging fail with the name of the dead process."""
    segments, (first, _), recorders = pair
    segments.mark_dead(1)
    while 1 not in recorders[0].lost_at:
        first.send(0, [b"another frame"])
        recorders[0].take(0)
    for pending in (first.read(1), first.accumulate(1, torch.ones(10)), first.average(0, 1)):
        with pytest.raises(PeerLost, match="worker 1"):
            pending.result()


def test_a_process_whose_launcher_died_stops(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would tell it of deaths any more, so its waits end."""
    _, (first, _), _ = pair
    pending = mean_of(first, torch.zeros(3), [0, 1])
    assert pending.settle is not None
    monkeypatch.setattr(os, "getppid", lambda: 1_000_000)
    with pytest.raises(Stopped):
        pending.settle()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_mean_of_a_pair_is_exact_where_halving_a_value_is_not(
    pair: Pair, dtype: torch.dtype
) -> None:
    """An odd multiple of float16's least number has no half there."""
    _, (first, second), _ = pair
    values = [torch.tensor([3e-7, 1.0]).to(dtype), torch.tensor([4.2e-7, 3.0]).to(dtype)]
    mean_of(second, values[1], [0, 1])
    pending = mean_of(first, values[0], [0, 1])
    assert pending.settle is not None
    pending.settle()
    assert torch.equal(pending.result(), mean_in_order(values))
