"""Workers who wait for each other share few processors evenly."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.real.launch import cores
from gossamer.real.launch.cores import OwnCore, core_of
from gossamer.real.launch.environment import Environment


def test_cores_are_shared_out_evenly() -> None:
    assert [core_of(rank, 4, [3, 5]) for rank in range(4)] == [3, 5, 3, 5]


@pytest.mark.parametrize(("size", "cores"), [(2, [0, 1]), (2, [0, 1, 2]), (3, [0, 1]), (1, [0])])
def test_nobody_is_kept_anywhere_where_all_have_room_or_one_would_have_more(
    size: int, cores: list[int]
) -> None:
    assert [core_of(rank, size, cores) for rank in range(size)] == [None] * size


def _transport(name: str, rank: int, size: int) -> Any:
    return SimpleNamespace(name=name, rank=rank, size=size)


@pytest.fixture
def _one_thread() -> Any:
    before, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("_one_thread")
def test_a_thread_is_kept_to_its_core_until_it_is_let_go() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    rank, size = len(allowed) + 1, 2 * len(allowed)
    core = OwnCore(_transport("shm", rank, size), is_synchronous=True)
    assert os.sched_getaffinity(0) == {allowed[1 % len(allowed)]}
    core.let_go()
    assert os.sched_getaffinity(0) == set(allowed)
    core.let_go()
    assert os.sched_getaffinity(0) == set(allowed)


@pytest.mark.usefixtures("_one_thread")
def test_workers_of_torchrun_keep_to_cores_where_all_are_on_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    size = 2 * len(allowed)
    monkeypatch.setattr(cores, "discover", lambda: Environment("torchrun", 0, size, 0, size))
    monkeypatch.setattr(os, "cpu_count", lambda: max(allowed) + 2)
    OwnCore(_transport("torch", 0, size), is_synchronous=True)
    assert os.sched_getaffinity(0) == set(allowed)  # somebody has bound this one
    monkeypatch.setattr(os, "cpu_count", lambda: len(allowed))
    OwnCore(_transport("torch", 0, size), is_synchronous=True)
    assert os.sched_getaffinity(0) == {allowed[0]}


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("name", "is_synchronous", "threads"),
    [("torch", True, 1), ("mpi", True, 1), ("shm", False, 1), ("shm", True, 2)],
)
def test_who_waits_for_nobody_or_needs_more_than_one_core_goes_where_it_likes(
    name: str, is_synchronous: bool, threads: int
) -> None:
    allowed = os.sched_getaffinity(0)
    torch.set_num_threads(threads)
    OwnCore(_transport(name, 0, 2 * len(allowed)), is_synchronous=is_synchronous)
    assert os.sched_getaffinity(0) == allowed
