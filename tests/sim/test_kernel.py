"""Virtual time: one heap, shuffled ties, and an end that explains itself."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import PeerLost, ProtocolError, RunFailed, Stalled
from gossamer.pending import Pending, gather
from gossamer.replica import Replica
from gossamer.sim.kernel import SECOND, Digest, Kernel
from gossamer.worker import Worker
from support import bowl, build, cluster_of, only_here

SEEDS = st.integers(0, 2**32)


def sleep(kernel: Kernel, delay_ns: int) -> Pending[None]:
    pending: Pending[None] = Pending("sleep")
    kernel.at(delay_ns, pending.resolve, None)
    return pending


# ---------------------------------------------------------------------- order of events


def crowd(seed: int, workers: int, steps: int) -> Kernel:
    """Workers that sleep equal times again and again: nearly every event ties with others."""
    kernel = Kernel(seed)

    async def life() -> None:
        for _ in range(steps):
            await sleep(kernel, 10)

    for rank in range(workers):
        kernel.spawn(life(), rank, is_main=True)
    kernel.run()
    return kernel


def test_two_hundred_thousand_events_follow_from_the_seed() -> None:
    """The digest of a long run in which everything ties is the seed's alone."""
    first, second, other = (crowd(seed, 200, 500) for seed in (3, 3, 4))
    assert first.events >= 200_000
    assert first.now == 500 * 10
    assert first.digest.hexdigest() == second.digest.hexdigest()
    assert first.digest.hexdigest() != other.digest.hexdigest()


def test_every_order_of_a_tie_occurs() -> None:
    """Three events at one time come in all six orders, and in the same one for the same seed."""

    def order(seed: int) -> tuple[int, ...]:
        kernel, seen = Kernel(seed), list[int]()
        for number in range(3):
            kernel.at(5, seen.append, number)
        kernel.run()
        return tuple(seen)

    orders = [order(seed) for seed in range(120)]
    assert set(orders) == set(itertools.permutations(range(3)))
    assert orders == [order(seed) for seed in range(120)]
    assert max(Counter(orders).values()) < 50


@given(SEEDS, st.lists(st.integers(0, 20), max_size=30))
def test_time_never_goes_back(seed: int, delays: list[int]) -> None:
    """Whatever is asked for, events come in order of time and each exactly once."""
    kernel, seen = Kernel(seed), list[int]()
    for delay in delays:
        kernel.at(delay, lambda: seen.append(kernel.now))
    kernel.run()
    assert seen == sorted(delays)
    assert kernel.events == len(delays)


def test_a_cancelled_timer_is_skipped() -> None:
    """It neither calls back nor counts, nor moves the clock."""
    kernel, seen = Kernel(0), list[str]()
    kernel.at(5, seen.append, "kept")
    kernel.at(9, seen.append, "cancelled").cancel()
    kernel.run()
    assert seen == ["kept"]
    assert (kernel.now, kernel.events) == (5, 1)


def test_every_await_lets_others_go_first() -> None:
    """Also on an operation that has finished: that is where races are found."""
    orders: set[str] = set()
    for seed in range(40):
        kernel, seen = Kernel(seed), list[str]()

        async def speaks(name: str, kernel: Kernel = kernel, seen: list[str] = seen) -> None:
            done: Pending[None] = Pending("nothing")
            done.resolve(None)
            seen.append(name)
            await done
            seen.append(name.upper())

        kernel.spawn(speaks("a"), 0, is_main=True)
        kernel.spawn(speaks("b"), 1, is_main=True)
        kernel.run()
        orders.add("".join(seen))
    assert {"abAB", "aAbB", "abBA"} <= orders


# ---------------------------------------------------------------------- how a run ends


def test_a_stall_names_who_waits_for_whom_since_when() -> None:
    """In order of rank, the first sixteen by name and the rest by number."""
    kernel = Kernel(0)

    async def stuck(rank: int) -> None:
        await sleep(kernel, rank * SECOND)
        await Pending("reply", (rank + 1) % 20)

    for rank in range(20):
        kernel.spawn(stuck(rank), rank, is_main=True)
    with pytest.raises(Stalled) as stalled:
        kernel.run()
    lines = str(stalled.value).splitlines()
    assert lines[0] == "nobody can go on at 19.000000 s:"
    assert lines[1] == "  worker 0 waits for reply of worker 1 since 0.000000 s"
    assert lines[16] == "  worker 15 waits for reply of worker 16 since 15.000000 s"
    assert lines[17:] == ["  and 4 more"]


def test_who_need_not_end_stalls_nobody() -> None:
    """Servers and side tasks may wait for ever; a run ends when the main ones have ended."""
    kernel, ends = Kernel(0), list[str]()

    async def serves() -> None:
        try:
            await Pending("receive")
        finally:
            ends.append("closed")

    kernel.spawn(serves(), 0, is_main=False)
    kernel.run()
    assert ends == ["closed"]


def test_the_dead_do_not_go_on() -> None:
    """Ending a worker's tasks runs their cleaning up and nothing else of them."""
    kernel, seen = Kernel(0), list[str]()

    async def life() -> None:
        try:
            await sleep(kernel, 10)
            seen.append("went on")
        finally:
            seen.append("cleaned up")

    task = kernel.spawn(life(), 3, is_main=True)
    kernel.at(5, kernel.end_tasks, 3)
    kernel.run()
    assert seen == ["cleaned up"]
    assert task.finished.done


def test_a_paused_worker_goes_on_when_its_pause_is_over() -> None:
    """What became ready meanwhile waits; others do not."""
    kernel, seen = Kernel(0), list[tuple[int, int]]()
    kernel.resume_at = lambda worker: 100 if worker == 0 else 0

    async def life(rank: int) -> None:
        await sleep(kernel, 10)
        seen.append((rank, kernel.now))

    for rank in range(2):
        kernel.spawn(life(rank), rank, is_main=True)
    kernel.run()
    # Worker 0 could not even begin before 100.
    assert seen == [(1, 10), (0, 110)]


@pytest.mark.parametrize("where", ["side task", "started task"])
def test_an_error_beside_the_main_part_ends_the_run(where: str) -> None:
    """It names the worker and the time; the original error is the cause."""

    async def broken(w: Worker) -> None:
        await w.sleep(0.125)
        raise ZeroDivisionError("nobody left to average with")

    async def method(w: Worker, x: Replica) -> None:
        async def main() -> None:
            await w.sleep(1.0)

        if w.rank != 1:
            await main()
        elif where == "side task":
            await w.together(main(), broken(w))
        else:
            w.start(broken(w))
            await main()

    expected = r"worker 1 failed at 0\.125000 s: ZeroDivisionError: nobody left"
    with pytest.raises(RunFailed, match=expected) as failed:
        build(bowl(), only_here(method), cluster_of(3), steps=1, engine="none").run()
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


# ---------------------------------------------------------------------- started operations


def test_gather_keeps_the_order_of_its_parts() -> None:
    """Whichever ends first; an empty one is there at once."""
    parts: list[Pending[int]] = [Pending(f"part {number}") for number in range(3)]
    whole = gather(parts)
    for number in (2, 0, 1):
        assert not whole.done
        parts[number].resolve(10 * number)
    assert whole.result() == [0, 10, 20]
    assert gather(list[Pending[int]]()).result() == []


def test_gather_fails_when_a_part_fails() -> None:
    """With the error of that part and at once: the others may never end."""
    parts: list[Pending[int]] = [Pending("part") for _ in range(2)]
    whole = gather(parts)
    parts[1].fail(PeerLost(4))
    assert whole.done
    with pytest.raises(PeerLost, match="worker 4"):
        whole.result()


def test_an_operation_ends_once() -> None:
    """What comes after the first result, failure or cancellation changes nothing."""
    pending: Pending[int] = Pending("send")
    calls: list[str] = []
    pending.when_done(lambda: calls.append("first"))
    pending.when_done(lambda: calls.append("second"))
    with pytest.raises(ProtocolError, match="before it was there"):
        pending.result()
    pending.resolve(1)
    pending.resolve(2)
    pending.fail(PeerLost(0))
    pending.cancel()
    assert pending.result() == 1
    assert calls == ["first", "second"]


def test_a_cancelled_operation_cannot_be_awaited() -> None:
    """That would wait for nothing."""
    pending: Pending[int] = Pending("sleep")
    pending.cancel()
    with pytest.raises(ProtocolError, match="cancelled and then awaited"):
        pending.result()


# ---------------------------------------------------------------------- the digest

EVENTS = st.lists(
    st.tuples(st.integers(0, 2**70), st.integers(0, 1000), st.sampled_from("abc")), max_size=20
)


def digest(events: list[tuple[int, int, str]]) -> str:
    whole = Digest()
    for event in events:
        whole.event(*event)
    return whole.hexdigest()


@given(EVENTS, EVENTS)
def test_a_digest_tells_events_apart(
    first: list[tuple[int, int, str]], second: list[tuple[int, int, str]]
) -> None:
    """Equal sequences have equal digests and others do not, also past the end of the clock."""
    wrapped = [
        [(time % 2**63, worker, label) for time, worker, label in e] for e in (first, second)
    ]
    assert (digest(first) == digest(second)) == (wrapped[0] == wrapped[1])


def test_reading_a_digest_does_not_change_it() -> None:
    """Nor does the size of its buffer."""
    watched, plain = Digest(), Digest()
    for number in range(10_000):
        for one in (watched, plain):
            one.event(number, number % 7, "step")
        if number % 1000 == 0:
            watched.hexdigest()
    assert watched.hexdigest() == watched.hexdigest() == plain.hexdigest()
