"""`groups=` on real workers: who is in which group, who takes which batch, what a death does."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gossamer.groups import Grouping, Groups
from gossamer.methods import METHODS, parse_method
from gossamer.real.join.loader import OwnBatches, Passes, Positions, shard_of
from gossamer.real.launch.environment import Environment
from gossamer.real.session import groups_by_host, host_of
from gossamer.real.transports.local import LocalStore
from tiers import only
from train_groups import Group, run_groups

DATA, BATCH = 1437, 16
CHOICES = {"epochs": 2, "evaluations": 1, "batch": BATCH, "learning_rate": 0.03}

WIDTHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def groups_of(widths: list[int]) -> Groups:
    """Consecutive ranks, in groups of those sizes."""
    starts = [sum(widths[:number]) for number in range(len(widths))]
    return tuple(
        tuple(range(start, start + width)) for start, width in zip(starts, widths, strict=True)
    )


# ---------------------------------------------------------------------- who is in which group


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_workers_are_in_one_group_if_they_are_on_one_host(hosts: list[str]) -> None:
    """However ranks are dealt out over the hosts; the lowest rank of each comes first."""
    store = LocalStore()
    for rank, host in enumerate(hosts):
        store.agree(f"host/{rank}", host)
    groups = groups_by_host(store, 0, len(hosts))
    assert sorted(rank for group in groups for rank in group) == list(range(len(hosts)))
    assert all(list(group) == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert [{hosts[rank] for rank in group} for group in groups] == [
        {host} for host in dict.fromkeys(hosts)
    ]


@pytest.mark.parametrize("kind", ["gossamer", "torchrun"])
def test_a_host_is_known_by_its_first_rank(kind: str) -> None:
    """Where ranks run through one host after the other, also over hosts of unequal size."""
    placed = [(0, 0, 1), (1, 0, 2), (2, 1, 2)]
    names = [host_of(Environment(kind, rank, 3, local, size)) for rank, local, size in placed]
    assert names == ["0", "1", "1"]


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "srun"])
def test_a_host_of_mpi_is_known_by_its_name(kind: str) -> None:
    """MPI may deal ranks out in turn, so that local ranks say little."""
    assert host_of(Environment(kind, 2, 4, 1, 2)) == socket.gethostname()


@given(WIDTHS, st.data())
def test_a_group_counts_as_long_as_its_leader_lives(widths: list[int], data: st.DataObject) -> None:
    """Leaders speak; their living members work, and those of a dead leader do not."""
    groups = groups_of(widths)
    size = sum(widths)
    live = data.draw(st.frozensets(st.integers(0, size - 1)))
    grouping = Grouping(0, size, groups)
    assert grouping.speaking(live) == {group[0] for group in groups if group[0] in live}
    assert grouping.working(live) == {
        rank for group in groups if group[0] in live for rank in group if rank in live
    }


def test_without_groups_everyone_speaks_for_itself() -> None:
    """The very same sets, so that whoever compares by identity sees no change."""
    alone, live = Grouping(1, 3), frozenset({0, 1})
    assert alone.speaking(live) is live
    assert alone.working(live) is live
    assert (alone.ends, alone.group, alone.follows) == (3, (1,), False)


# ---------------------------------------------------------------------- who takes which batch


@dataclass
class Coupled:
    """As much of a coupling as sharding looks at."""

    rank: int
    size: int
    group: tuple[int, ...]
    store: LocalStore
    is_synchronous: bool = field(default=False)


@given(WIDTHS, st.integers(0, 60), st.randoms(use_true_random=False))
def test_groups_take_whole_rounds_and_every_batch_once(widths, batches, chance) -> None:
    """Members of a group get equally many, in whatever order they ask, without waiting for each
    other; what is left out is less than a round of the largest group."""
    store, size = LocalStore(), sum(widths)
    taking = {}
    for group in groups_of(widths):
        for rank in group:
            positions = Positions(Coupled(rank, size, group, store))
            taking[rank] = positions.within("epoch", batches)
    taken: dict[int, list[int]] = {rank: [] for rank in taking}
    while taking:
        rank = chance.choice(sorted(taking))
        position = next(taking[rank], None)
        if position is None:
            del taking[rank]
        else:
            taken[rank].append(position)
    for group in groups_of(widths):
        assert len({len(taken[rank]) for rank in group}) == 1
    every = sorted(position for own in taken.values() for position in own)
    assert len(set(every)) == len(every)
    assert every == list(range(len(every)))
    assert batches - len(every) < max(widths)


@settings(max_examples=30)
@given(WIDTHS, st.integers(0, 40))
def test_a_stream_is_shared_out_in_whole_rounds_too(widths: list[int], batches: int) -> None:
    """Nobody knows where it ends before it does."""
    store, size = LocalStore(), sum(widths)
    taken = {}
    before = Positions._orders
    for group in groups_of(widths):
        for rank in group:
            Positions._orders = before  # each worker counts its own loaders
            coupled = Coupled(rank, size, group, store)
            taken[rank] = list(shard_of((i for i in range(batches)), coupled, 0, Passes()))
        assert len({len(taken[rank]) for rank in group}) == 1
    every = sorted(number for own in taken.values() for number in own)
    assert len(set(every)) == len(every)
    assert batches - len(every) < max(widths)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass
class Shuffled:
    """A user's own batch sampler."""

    shuffle: Callable[[list[int]], object]

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(12))
        self.shuffle(order)
        return iter([[number] for number in order])


@pytest.mark.parametrize(
    ("shuffle", "draw"),
    [
        (random.shuffle, random.random),
        (np.random.shuffle, np.random.random),
        (lambda order: order.sort(key=lambda number: torch.rand(()).item()),
         lambda: torch.rand(()).item()),
    ],
    ids=["python", "numpy", "torch"],
)  # fmt: skip
def test_everybody_shuffles_alike_whatever_a_sampler_draws_from(
    shuffle: Callable[[list[int]], object], draw: Callable[[], float]
) -> None:
    """Together the workers see every sample once, each epoch in another order, and what a worker
    draws itself is what it would have drawn."""
    store, size, before = LocalStore(), 3, Positions._orders
    taken: list[list[list[int]]] = []
    for rank in range(size):
        Positions._orders = before  # each worker counts its own loaders
        batches = OwnBatches(
            Shuffled(shuffle), Positions(Coupled(rank, size, (), store, is_synchronous=True)), 7
        )
        seed_all(rank)
        expected = draw()
        seed_all(rank)
        taken.append([[number for (number,) in batches] for _ in range(2)])
        assert draw() == expected
    epochs = [[number for own in taken for number in own[epoch]] for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]


# ---------------------------------------------------------------------- whole runs


def test_every_asynchronous_method_runs_between_groups() -> None:
    """Members step together, every sample is processed, and nothing is done twice."""
    names = [n for n, m in METHODS.items() if not m.is_synchronous(parse_method(n).resolve(2, 99))]
    groups = [Group(f"{name}:groups=2", 4, choices=CHOICES | {"epochs": 1}) for name in names]
    for group, run in zip(groups, run_groups(groups, 200), strict=True):
        assert run.ends == [0] * 4, (group, run.written)
        own = run.summary["steps_by_worker"]
        assert own["0"] == own["1"], group
        assert own["2"] == own["3"], group
        assert DATA <= run.summary["samples"] <= DATA + 3 * BATCH, group
        assert run.summary["repeated_samples"] == 0


@pytest.mark.parametrize("transport", only(["shm"], ["shm", "torch"]))
def test_a_group_goes_on_without_a_member_and_ends_with_its_leader(transport: str) -> None:
    """In both cases the others process the samples that are left, and all who live end well."""
    methods = ["d_psgd:groups=2", "ad_psgd:groups=2"]
    groups = [
        Group(method, 4, transport, choices=CHOICES, dies=(victim, 15), sleeps=0.002)
        for method in methods for victim in (2, 3)
    ]  # fmt: skip
    for group, run in zip(groups, run_groups(groups, 200), strict=True):
        victim = group.dies[0]
        expected = [-signal.SIGKILL if rank == victim else 0 for rank in range(4)]
        assert run.ends == expected, (group, run.written)
        own = run.summary["steps_by_worker"]
        counting = [0, 1] if victim == 2 else [0, 1, 2]
        done = sum(own[str(rank)] for rank in counting) + 14 * (4 - len(counting))
        assert done * BATCH >= 2 * DATA, group
        says = "worker 2 is lost: it led the group of workers 2, 3, which ends with it"
        assert (says in run.written) == (victim == 2), group
        assert own["0"] == own["1"], group
        if victim == 2:
            assert own["3"] <= 15, group


def test_the_last_group_that_loses_its_leader_fails_the_run_in_one_sentence() -> None:
    """Nobody waits for it."""
    groups = [
        Group(method, 2, choices=CHOICES, dies=(0, 10))
        for method in ("all_reduce:groups=1", "ad_psgd:groups=host")
    ]
    for run in run_groups(groups):
        assert run.ends == [-signal.SIGKILL, 1], run.written
        assert run.failure == (
            "worker 0 is lost: it led the group of workers 0, 1, which ends with it; no other "
            "group is left"
        )


def test_only_what_passes_between_groups_is_an_exchange() -> None:
    """Inside a group a gradient is computed: of four workers two exchange at each step."""
    grouped, alone = (Group(f"d_psgd:groups={k}", 4, choices=CHOICES) for k in (2, 1))
    between, inside = run_groups([grouped, alone])
    assert between.summary["exchanges_per_step"] == pytest.approx(0.5)
    assert inside.summary["exchanges_per_step"] is None
