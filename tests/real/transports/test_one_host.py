"""Sums in memory that the workers of one host open to each other, beside another transport."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from gossamer.errors import PeerLost
from gossamer.real.transports.shm import one_host
from gossamer.real.transports.shm.memory import is_segment
from gossamer.real.transports.shm.one_host import OneHostAllReduce, open_files
from gossamer.real.transports.transport import StopToken, Window
from gossamer.rules import mean_in_order

WINDOWS = {rank: Window(1000, torch.float32, rank) for rank in range(3)}
LIMIT_S = 100.0


class Answers:
    """What threads tell each other."""

    def __init__(self, size: int) -> None:
        self._told: Sequence[int] = ()
        self._answers = [True] * size
        self._meeting = threading.Barrier(size)

    def tell(self, rank: int, numbers: Sequence[int]) -> Sequence[int]:
        if rank == 0:
            self._told = numbers
        self._meeting.wait(LIMIT_S)
        return self._told

    def agree(self, rank: int, answer: bool) -> bool:
        self._answers[rank] = answer
        self._meeting.wait(LIMIT_S)
        return all(self._answers)


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What each of them returned, or raised."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"worker {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return found


def shared(size: int) -> list[Any]:
    answers = Answers(size)
    windows = {rank: WINDOWS[rank] for rank in range(size)}

    def share(rank: int) -> OneHostAllReduce | None:
        tell, agree = partial(answers.tell, rank), partial(answers.agree, rank)
        return one_host.share_memory(rank, size, windows, StopToken(), tell, agree)

    return in_threads(size, share)


def open_descriptors() -> int:
    gc.collect()  # other tests of this process may have left some that nobody holds
    return sum(is_segment(int(file)) for file in os.listdir("/proc/self/fd"))


def result(sums: OneHostAllReduce, value: torch.Tensor, members: range) -> torch.Tensor:
    mean = value.clone()
    pending = sums.start([mean], members)
    assert pending.settle is not None
    pending.settle()
    pending.result()
    return mean


def means_of(values: list[torch.Tensor]) -> list[torch.Tensor]:
    size = len(values)
    sums = shared(size)
    return in_threads(size, lambda rank: result(sums[rank], values[rank], range(size)))


@pytest.mark.parametrize("count", [5, 100_003])
def test_workers_who_share_memory_get_the_mean_in_order_of_rank(count: int) -> None:
    """And no descriptor of it is left open."""
    before = open_descriptors()
    values = [torch.randn(count) for _ in range(3)]
    for mean in means_of(values):
        assert torch.equal(mean, mean_in_order(values))
    # A mapping holds one of its own, which has gone with it.
    assert open_descriptors() == before


def test_one_who_cannot_open_it_keeps_all_from_using_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All then take the same other way, and nothing stays open."""
    before = open_descriptors()

    def forbidden(owner: int, numbers: Any) -> list[int]:
        is_last = threading.current_thread().name == "worker 2"
        return [] if is_last else open_files(owner, numbers)

    monkeypatch.setattr(one_host, "open_files", forbidden)
    assert shared(3) == [None, None, None]
    assert open_descriptors() == before


def refuse(*rest: Any) -> Any:
    raise OSError("not here")


@pytest.mark.parametrize("what", ["create_segments", "OneHostAllReduce"])
def test_a_system_that_gives_no_memory_is_no_failure(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of a process, or a sandbox: there is another way to make sums."""
    before = open_descriptors()
    monkeypatch.setattr(one_host, what, refuse)
    assert shared(2) == [None, None]
    assert open_descriptors() == before


def test_nothing_stays_open_where_somebody_never_comes() -> None:
    """Who waits for the others is told that one has died."""
    before = open_descriptors()

    def dead(answer: bool) -> bool:
        raise PeerLost(1, "it died before all workers had met")

    with pytest.raises(PeerLost):
        one_host.share_memory(0, 2, WINDOWS, StopToken(), lambda told: told, dead)
    assert open_descriptors() == before


def test_a_file_that_is_no_such_memory_is_not_opened() -> None:
    """Whatever has that number in another process must not be written to."""
    with open(os.devnull) as file:
        assert open_files(os.getpid(), [file.fileno()]) == []


def test_the_dead_are_left_out_once_somebody_has_said_so() -> None:
    sums = shared(3)
    values = [torch.randn(7) for _ in range(3)]
    sums[0].lost(1)
    survivors = (0, 2)
    means = in_threads(2, lambda n: result(sums[survivors[n]], values[survivors[n]], range(3)))
    for mean in means:
        assert torch.equal(mean, mean_in_order([values[0], values[2]]))


@pytest.mark.parametrize("end", ["it left", "it is taken for dead"])
def test_who_is_held_for_gone_posts_nothing_more(end: str) -> None:
    """Some have taken the mean without it; those who come later must get the same."""
    sums = shared(2)
    if end == "it left":
        sums[1].close()
    else:
        sums[0].lost(1)
    with pytest.raises(PeerLost):
        sums[1].start([torch.ones(3)], range(2))
    assert torch.equal(result(sums[0], torch.ones(3), range(2)), torch.ones(3))


def test_what_was_begun_before_leaving_is_whole_however_late_it_is_read() -> None:
    """The others keep what they put in until the one that has left has read it."""
    sums = shared(3)
    late = [torch.full((9,), float(rank)) for rank in range(3)]
    begun = [sums[rank].start([late[rank]], range(3)) for rank in range(3)]
    sums[1].leave()
    for rank in (0, 2):
        begun[rank].settle()
    for _ in range(20):  # so many that cells and memory are used again
        means = in_threads(2, lambda n: result(sums[2 * n], torch.full((9,), 2.0 * n), range(3)))
        assert [mean.tolist() for mean in means] == [[1.0] * 9] * 2
    in_threads(1, lambda _: begun[1].settle())
    assert late[1].tolist() == [1.0] * 9


def test_what_has_no_room_in_memory_goes_another_way() -> None:
    """A model fits many times, whatever its size; what is much larger than all of them may not."""
    (sums,) = shared(1)
    assert sums.has_room_for([torch.empty(1000)])
    assert sums.has_room_for([torch.empty(1 << 25)])
    assert not sums.has_room_for([torch.empty(1 << 40, device="meta")])
