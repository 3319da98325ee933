"""All-reduces whose streams wait for each other: nobody else waits, and deaths are survived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.real.join.binding import Binding
from gossamer.real.transports.conformance.tools import values_of
from gossamer.real.transports.shm import ahead
from gossamer.real.transports.shm.ahead import AHEAD
from gossamer.rules import mean_in_order
from gpu_together import WIDTH, Together, settled
from main_memory import Signalling

SIZE = 3


class Trio(Together):
    """Three that have all opened each other's arenas."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, without_kernel: Sequence[int] = ()
    ) -> None:
        self.each = [Signalling(folder) for _ in range(SIZE)]
        for rank in without_kernel:
            self.each[rank].own.has_mean = False
        super().__init__(SIZE, self.each, patch)
        self.count = 0
        self.round()

    def values(self, count: int = WIDTH) -> list[Tensor]:
        self.count += 1
        return [values_of(rank, count, self.count) for rank in range(SIZE)]

    def round(self, count: int = WIDTH) -> list[bool]:
        """Who went ahead; the means are what they should be."""
        values = self.values(count)
        for mean in self.reduce(values):
            assert torch.equal(mean, mean_in_order(values))
        return self.ahead()

    def ahead(self) -> list[bool]:
        return [bool(place & AHEAD) for place in self.places()]

    def kill(self, rank: int) -> None:
        self.segments.mark_dead(rank)

    def remaining(self, rank: int, values: list[Tensor]) -> list[Tensor]:
        """The means of those who are left."""
        survivors = [other for other in range(SIZE) if other != rank]
        started = [self.transports[r].all_reduce(values[r], range(SIZE)) for r in survivors]
        return [settled(pending) for pending in started]


@pytest.fixture
def trio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trio]:
    together = Trio(tmp_path, monkeypatch)
    yield together
    together.close()


def test_once_the_arenas_are_open_nobody_waits_for_its_stream(trio: Trio) -> None:
    """Each step costs no wait, and each post says so."""
    before = [gpu.finished for gpu in trio.gpus]
    for _ in range(20):
        assert trio.round() == [True] * SIZE
    assert [gpu.finished for gpu in trio.gpus] == before


def test_two_places_are_used_in_turn(trio: Trio) -> None:
    """Who writes again where it wrote two steps ago is behind everybody's reading of that."""
    places: list[int] = []
    for _ in range(6):
        trio.round()
        places.append(trio.places()[0])
    assert len(set(places)) == 2
    assert places[:2] * 3 == places


def test_sizes_may_change(trio: Trio) -> None:
    """Each has places of its own."""
    for count in (7, WIDTH, 7, 7, 3, WIDTH, WIDTH):
        assert trio.round(count) == [True] * SIZE


def test_other_types_go_the_other_way_and_spoil_nothing(trio: Trio) -> None:
    """The kernel knows 32 bits only."""
    for _ in range(4):
        assert trio.round() == [True] * SIZE
        values = [value.to(torch.float64) for value in trio.values()]
        for mean in trio.reduce(values):
            assert torch.equal(mean, mean_in_order(values))
        assert trio.ahead() == [False] * SIZE


def test_who_has_not_awaited_the_last_does_not_go_ahead(trio: Trio) -> None:
    """It will read the others' values later than its next post, so its word is not relied on; once
    all is awaited, everybody goes ahead again."""
    rounds = [trio.values() for _ in range(4)]
    started = [trio.start(values) for values in rounds]
    assert trio.ahead() == [False] * SIZE
    for values, pendings in zip(rounds, started, strict=True):
        for pending in pendings:
            assert torch.equal(settled(pending), mean_in_order(values))
    seen = [trio.round() for _ in range(4)]
    assert seen[-1] == [True] * SIZE


def test_one_with_another_stream_is_waited_for(trio: Trio) -> None:
    """Nothing is known of the order of two streams: it posts what is written, and all are right."""
    trio.round()
    trio.each[1].own.stream = 2
    before = trio.gpus[1].finished
    seen = [trio.round() for _ in range(4)]
    assert [ahead[1] for ahead in seen] == [False] * 4
    assert trio.gpus[1].finished >= before + 4
    assert seen[-1] == [False] * SIZE


def test_a_stream_that_has_read_before_the_first_sum_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads may still be under way when another stream posts."""
    gpus = [Signalling(tmp_path) for _ in range(SIZE)]
    trio = Together(SIZE, gpus, monkeypatch)
    gpus[1].own.stream = 2
    trio.reduce([values_of(rank, WIDTH).to(torch.float64) for rank in range(SIZE)])
    gpus[1].own.stream = 1
    for number in range(4):
        values = [values_of(rank, WIDTH, number) for rank in range(SIZE)]
        for mean in trio.reduce(values):
            assert torch.equal(mean, mean_in_order(values))
        assert not any(place & AHEAD for place in trio.places())
    trio.close()


def test_where_one_has_no_kernel_nobody_goes_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order is never known, so nobody goes ahead, and no memory is kept for it."""
    trio = Trio(tmp_path, monkeypatch, without_kernel=[1])
    for _ in range(4):
        assert trio.round() == [False] * SIZE
    trio.close()


@pytest.mark.parametrize("small", [0, WIDTH])
def test_what_the_dead_had_only_asked_for_is_left_out_by_all(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Killed between its post and the writing: streams that wait are let go, and nobody adds up
    what was never there. A large kernel looks at a copy of who is left out."""
    monkeypatch.setattr(ahead, "_SMALL", small)
    for _ in range(3):
        trio.round()
    values = trio.values()
    trio.each[2].own.is_silent = True
    trio.transports[2].all_reduce(values[2], range(SIZE))
    trio.kill(2)
    means = trio.remaining(2, values)
    for mean in means:
        assert torch.equal(mean, mean_in_order(values[:2]))


def test_a_member_in_main_memory_waits_for_what_others_put_ahead(trio: Trio) -> None:
    """Where values are differs between workers: it takes part without a stream."""
    trio.round()
    values = trio.values()
    quiet = trio.each[0].own
    started = [trio.transports[r].all_reduce(values[r], range(SIZE)) for r in (1, 2)]
    assert quiet.words[0] == 2
    elsewhere = trio.transports[0]._reducing
    elsewhere._arenas, arenas = None, elsewhere._arenas
    elsewhere._kinds.clear()
    last = trio.transports[0].all_reduce(values[0], range(SIZE))
    elsewhere._arenas = arenas
    for pending in (*started, last):
        assert torch.equal(settled(pending), mean_in_order(values))


def test_only_some_sizes_have_places_of_their_own(trio: Trio) -> None:
    """Places are kept for good; what comes beyond goes the other way."""
    seen = [trio.round(count) for count in (1, 2, 3, 4, 5, 6, 1, 5)]
    assert [ahead[0] for ahead in seen] == [True] * 4 + [False] * 2 + [True, False]


def test_a_cancelled_reduction_brings_nothing(trio: Trio) -> None:
    """Its mean must not be taken for that of a gradient."""
    bindings = [_binding(rank) for rank in range(SIZE)]
    trio.reduce([binding.new_gradient() for binding in bindings])
    pendings = trio.start([binding.new_gradient() for binding in bindings])
    settle = pendings[0].settle
    assert settle is not None
    pendings[0].cancel()
    settle()
    assert bindings[0]._lent is None


def test_what_the_dead_had_written_counts(trio: Trio) -> None:
    """Killed behind its signal: it has contributed to that, and to nothing later."""
    trio.round()
    values = trio.values()
    trio.transports[2].all_reduce(values[2], range(SIZE))
    trio.kill(2)
    for mean in trio.remaining(2, values):
        assert torch.equal(mean, mean_in_order(values))
    for _ in range(5):
        values = trio.values()
        for mean in trio.remaining(2, values):
            assert torch.equal(mean, mean_in_order(values[:2]))
        assert trio.ahead()[:2] == [True, True]


def test_a_release_is_not_taken_for_a_contribution(trio: Trio) -> None:
    """The signal of the dead is set in their place; how far they had come is known all the same."""
    trio.round()
    trio.kill(2)
    one = trio.transports[0]._reducing.ahead
    assert one is not None
    assert not one._words.has_come(2, 3)  # waits for the release
    assert one._words.has_come(2, 2)


def test_windows_are_shared_in_turns(trio: Trio) -> None:
    """No addition is lost and averages keep the sum, with nobody waiting for a stream."""
    before = [gpu.finished for gpu in trio.gpus]
    for number in range(27):
        trio.transports[number % SIZE].accumulate(number // 3 % SIZE, torch.ones(WIDTH))
    assert [float(t.window(r).sum()) for r, t in enumerate(trio.transports)] == [9.0 * WIDTH] * 3
    trio.transports[0].window(0).add_(torch.arange(float(WIDTH)))
    for number in range(12):
        trio.transports[number % SIZE].average(number % SIZE, (number + 1) % SIZE)
    total = sum(t.window(r).double() for r, t in enumerate(trio.transports))
    assert torch.equal(total, 27.0 + torch.arange(float(WIDTH), dtype=torch.float64))
    assert [gpu.finished for gpu in trio.gpus] == before


def test_a_mean_of_gradients_is_lent_to_the_descent(trio: Trio) -> None:
    """No copy of it is made where nobody wants more than to descend along it."""
    bindings = [_binding(rank) for rank in range(SIZE)]
    for _ in range(3):
        tokens = [binding.new_gradient() for binding in bindings]
        values = [binding.flat_gradient().clone() for binding in bindings]
        trio.reduce(list(tokens))
        assert trio.ahead() == [True] * SIZE
        for binding, token in zip(bindings, tokens, strict=True):
            assert binding._lent is not None
            assert torch.equal(token + 0.0, mean_in_order(values) + 0.0)
            assert binding._lent is None


def _binding(rank: int) -> Binding:
    torch.manual_seed(rank)
    module = nn.Linear(20, 5)
    binding = Binding(list(module.named_parameters()))
    binding.attach(binding.initial(), is_private=False)
    module(torch.randn(4, 20)).square().sum().backward()
    return binding
