"""The laws that every transport keeps. All processes of a group run a law at the same time.

The table `SCENARIOS` of `tools` has the laws by name. Those with `apart` (see `death_laws`) need a
group of processes of their own.
"""

from __future__ import annotations

import random
import threading

import torch
from torch import Tensor

from gossamer.real.transports.conformance.tools import (
    SERVER_WIDTH,
    WIDTH,
    Tools,
    mean_of,
    scenario,
    values_of,
)
from gossamer.real.transports.transport import Transport
from gossamer.rules import mean_in_order

BIG = 20_000_000
MEGABYTE = 1 << 20


def bytes_of(seed: int, length: int) -> bytes:
    """Return random bytes, so that a shifted or torn frame cannot look right."""
    return random.Random(seed).randbytes(length)


# --- frames


@scenario()
def scenario_frames_of_every_size_arrive_whole_and_in_order(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Frames of a pair arrive in order, in one part or several, also empty ones and to oneself."""
    sizes = [0, 1, 2, 7, 8, 63, 64, 65, 1000, 4095, 4097, 65_537, MEGABYTE - 1, MEGABYTE, 3]
    for number, length in enumerate(sizes):
        content = bytearray(bytes_of(number + 100 * rank, length))
        for to in range(size):
            transport.send(to, [content[:5], b"", memoryview(content)[5:]])
        content[:] = bytes(length)  # the caller may reuse its memory at once
    for source in range(size):
        for number, length in enumerate(sizes):
            assert tools.recorder.take(source) == bytes_of(number + 100 * source, length)


@scenario()
def scenario_a_frame_larger_than_any_buffer_arrives(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """20 MB go around a ring of processes, and a small frame after them must not overtake."""
    before, after = (rank - 1) % size, (rank + 1) % size
    transport.send(after, [bytes_of(rank, BIG)])
    transport.send(after, [b"behind"])
    assert tools.recorder.take(before) == bytes_of(before, BIG)
    assert tools.recorder.take(before) == b"behind"


@scenario()
def scenario_frames_of_several_threads_stay_whole(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Threads may interleave frames but not parts of them. Frames of a thread stay in order."""
    threads, frames = 4, 60

    def speak(thread: int) -> None:
        for number in range(frames):
            length = (number * 397 + thread * 1013) % 9000
            for to in range(size):
                head = bytes([rank, thread, number])
                transport.send(to, [head, bytes_of(number * 10 + thread, length)])

    speakers = [threading.Thread(target=speak, args=(thread,)) for thread in range(threads)]
    for speaker in speakers:
        speaker.start()
    for source in range(size):
        seen = [0] * threads
        for _ in range(threads * frames):
            frame = tools.recorder.take(source)
            sender, thread, number = frame[:3]
            assert (sender, number) == (source, seen[thread])
            length = (number * 397 + thread * 1013) % 9000
            assert frame[3:] == bytes_of(number * 10 + thread, length)
            seen[thread] += 1
    for speaker in speakers:
        speaker.join()


@scenario()
def scenario_a_frame_may_be_answered_from_inside_the_listener(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Every pair answers frames inside `Listener.frame`, with frames that fill any buffer."""
    rallies = 25

    def answer(source: int, content: bytes) -> bool:
        if content[0] == 1:
            return False
        transport.send(source, [bytes([content[0] - 1]), content[1:]])
        return True

    tools.recorder.answer = answer
    tools.barrier("ready")
    for to in range(size):
        transport.send(to, [bytes([2 * rallies]), bytes_of(rank, 300_000)])
    for source in range(size):
        # The number of frames is even, so the last one comes back to the process that began.
        assert tools.recorder.take(source)[1:] == bytes_of(rank, 300_000)
    tools.barrier("played")
    tools.recorder.answer = None


# --- windows


@scenario()
def scenario_a_read_sees_what_the_owner_wrote(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Windows start as given, have their own type, and show what their owner writes."""
    server = size + rank
    assert torch.equal(transport.window(rank), torch.zeros(WIDTH))
    tools.barrier("looked")
    with transport.guard(rank):
        transport.window(rank).copy_(values_of(rank, WIDTH))
    with transport.guard(server):
        transport.window(server).fill_(rank + 0.5)
    tools.barrier("written")
    for other in range(size):
        assert torch.equal(tools.wait(transport.read(other)), values_of(other, WIDTH))
        theirs = tools.wait(transport.read(size + other))
        assert torch.equal(theirs, torch.full((SERVER_WIDTH,), other + 0.5, dtype=torch.float64))
    tools.barrier("read")
    with transport.guard(rank):
        transport.window(rank).zero_()
    with transport.guard(server):
        transport.window(server).zero_()


@scenario()
def scenario_no_addition_is_lost_under_contention(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """All processes add integers to all windows from two threads while the owners add under
    guard."""
    rounds, start = 60, 1000
    whole, part = torch.ones(WIDTH), torch.full((500,), 2.0)

    def add() -> None:
        for _ in range(rounds):
            for end in range(size):
                tools.wait(transport.accumulate(end, whole))
                tools.wait(transport.accumulate(end, part, start))

    helper = threading.Thread(target=add)
    helper.start()
    for _ in range(rounds):
        with transport.guard(rank):
            transport.window(rank).add_(3.0)
    add()
    helper.join()
    tools.barrier("added")
    expected = torch.full((WIDTH,), 3.0 * rounds + 2.0 * rounds * size)
    expected[start : start + 500] += 2 * 2.0 * rounds * size
    for end in range(size):
        assert torch.equal(tools.wait(transport.read(end)), expected)
    tools.barrier("read")
    with transport.guard(rank):
        transport.window(rank).zero_()


@scenario()
def scenario_an_average_makes_both_equal_and_keeps_the_sum(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """After an average of one pair both windows hold the exact mean of values of a few bits."""
    with transport.guard(rank):
        transport.window(rank).copy_(torch.arange(WIDTH) % 64 + 8 * rank)
    tools.barrier("filled")
    if rank == 1:
        tools.wait(transport.average(1, 0))
    tools.barrier("averaged")
    mean = (torch.arange(WIDTH) % 64 + 4).float()
    for end in (0, 1):
        assert torch.equal(tools.wait(transport.read(end)), mean)
    tools.barrier("read")
    with transport.guard(rank):
        transport.window(rank).zero_()


@scenario()
def scenario_averages_that_overlap_keep_the_sum(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """All pairs average while owners add. The sum stays exact, as values fit into 53 bits."""
    own = size + rank
    with transport.guard(own):
        transport.window(own).fill_(float(rank + 1))
    tools.barrier("filled")
    for number in range(12):
        peer = size + (rank + 1 + number % (size - 1)) % size
        tools.wait(transport.average(own, peer))
        with transport.guard(own):
            transport.window(own).add_(1.0)
    tools.barrier("averaged")
    values = [tools.wait(transport.read(size + end)).clone() for end in range(size)]
    expected = size * (size + 1) / 2 + 12.0 * size
    whole = torch.full((SERVER_WIDTH,), expected, dtype=torch.float64)
    assert torch.equal(torch.stack(values).sum(0), whole)
    tools.barrier("read")
    with transport.guard(own):
        transport.window(own).zero_()


# --- all-reduce


@scenario()
def scenario_an_all_reduce_is_the_mean_in_order_of_rank(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Bit for bit `mean_in_order`, for one element and for a million."""
    for operation, count in enumerate([1, 3, 1000, 1001, WIDTH, 1_000_003, 1]):
        value = values_of(rank, count, operation)
        mean = tools.wait(mean_of(transport, value, range(size)))
        members = [values_of(member, count, operation) for member in range(size)]
        assert torch.equal(mean, mean_in_order(members))
        mean.zero_()  # the result belongs to the caller
    whole = torch.arange(7, dtype=torch.float64) * (rank + 1)
    mean = tools.wait(mean_of(transport, whole, range(size)))
    assert torch.equal(mean, torch.arange(7, dtype=torch.float64) * (size + 1) / 2)


def shapes_of(rank: int, count: int) -> list[Tensor]:
    """Return tensors of several shapes: one element, none, many, and one that is not contiguous."""
    flat = values_of(rank, 6 * count + 1)
    square = flat[1 : 4 * count + 1].view(2, 2 * count).t()
    return [flat[0].clone(), flat[:0].clone(), square.clone(memory_format=torch.preserve_format),
            flat[4 * count + 1 :].clone()]  # fmt: skip


@scenario()
def scenario_all_reduce_replaces_tensors_when_it_is_finished(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Tensors are read at once and written when the operation is awaited. A cancelled one writes
    nothing."""
    for count in (3, 100_000):
        tensors = shapes_of(rank, count)
        before = [tensor.clone() for tensor in tensors]
        pending = transport.all_reduce(tensors, range(size))
        cancelled = transport.all_reduce(before, range(size))
        cancelled.cancel()
        assert all(map(torch.equal, tensors, before))
        for tensor in tensors:
            tensor.fill_(float("nan"))
        tools.wait(pending)
        everybody = zip(*(shapes_of(member, count) for member in range(size)), strict=True)
        for tensor, values in zip(tensors, everybody, strict=True):
            assert torch.equal(tensor, mean_in_order(values))
        assert all(map(torch.equal, before, shapes_of(rank, count)))


@scenario()
def scenario_all_reduces_may_be_in_flight_together(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Twenty all-reduces start before one is awaited, in any order. Inputs may change at once."""
    counts = [5000 if number % 3 else 300_000 for number in range(20)]
    pendings = []
    for number, count in enumerate(counts):
        value = values_of(rank, count, number)
        pendings.append(mean_of(transport, value, range(size)))
        value.zero_()
    order = random.Random(rank).sample(range(len(counts)), len(counts))
    for number in order:
        mean = tools.wait(pendings[number])
        members = [values_of(member, counts[number], number) for member in range(size)]
        assert torch.equal(mean, mean_in_order(members))


@scenario()
def scenario_subsets_reduce_beside_each_other(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Each group of members has an order of its own, also a group of one member."""
    groups = [(0, 1), (1, 2), (0, 2), (rank,), tuple(range(size))]
    for operation in range(5):
        started = [
            (members, mean_of(transport, values_of(rank, 700, operation), members))
            for members in groups
            if rank in members
        ]
        if rank % 2:
            started.reverse()
        for members, pending in started:
            theirs = [values_of(member, 700, operation) for member in members]
            assert torch.equal(tools.wait(pending), mean_in_order(theirs))


# --- the store


@scenario()
def scenario_the_store_agrees_and_counts(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """The first proposal counts for all processes, also an empty one. Counters lose nothing."""
    store = transport.store
    assert store.get(tools.key("nobody")) is None
    agreed = store.agree(tools.key("who"), str(rank))
    assert agreed in {str(other) for other in range(size)}
    assert store.agree(tools.key("who"), "late") == agreed == store.get(tools.key("who"))
    assert store.agree(tools.key("empty"), "") == ""
    for _ in range(10):
        store.add(tools.key("count"), rank + 1)
    tools.barrier("added")
    assert store.add(tools.key("count"), 0) == 10 * size * (size + 1) // 2
