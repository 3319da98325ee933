"""Which collectives workers on the torch transport use, and what the doctor says about it."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.cuda import nccl

from gossamer.commands import doctor
from gossamer.errors import ConfigurationError
from gossamer.real.environment import Environment
from gossamer.real.torch_transport.collectives import (
    agree_on_collectives,
    choose_collectives,
    own_gpu,
)
from gossamer.real.transport import StopToken


class Facts:
    """A store in one process."""

    def __init__(self, **facts: str) -> None:
        self.facts = facts

    def agree(self, key: str, value: str) -> str:
        return self.facts.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        return amount

    def get(self, key: str) -> str | None:
        return self.facts.get(key)


GPUS = st.lists(st.sampled_from(["no GPU", "no NCCL", "GPU-a", "GPU-b", "GPU-c"]), max_size=4)


@settings(max_examples=50, deadline=None)
@given(GPUS.filter(bool))
def test_nccl_is_used_exactly_where_every_worker_has_a_gpu_of_its_own(gpus: list[str]) -> None:
    """Two of its processes on one GPU would hang; without a GPU there is nothing to use."""
    has_own = len(set(gpus)) == len(gpus) and all(gpu.startswith("GPU") for gpu in gpus)
    assert choose_collectives("auto", gpus)[0] == ("nccl" if has_own else "engine")


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (["GPU-a", "no GPU"], "worker 1 computes on the CPU"),
        (["GPU-a", "GPU-b", "GPU-a"], "workers 0 and 2 share one"),
        (["no NCCL", "GPU-b"], "the torch of worker 0 has no NCCL"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_with_its_reason(gpus: list[str], why: str) -> None:
    """Asked for, NCCL says what is in its way; unasked, the same is why it is not used."""
    assert choose_collectives("auto", gpus) == ("engine", why)
    with pytest.raises(ConfigurationError, match=why):
        choose_collectives("nccl", gpus)


@pytest.mark.parametrize("wanted", ["fixed", "engine"])
def test_what_was_asked_for_is_used_whatever_gpus_there_are(wanted: str) -> None:
    """Somebody may want the same bits everywhere, or no NCCL."""
    assert choose_collectives(wanted, ["GPU-a", "GPU-b"])[0] == wanted


def test_a_worker_on_the_cpu_says_so_without_looking_for_gpus() -> None:
    """Looking would take memory of a GPU that nobody asked for."""
    assert own_gpu(torch.device("cpu")) == "no GPU"
    assert not torch.cuda.is_initialized()


def test_all_workers_choose_alike_once_all_have_spoken() -> None:
    """Nobody concludes anything from half of the answers."""
    store, chosen = Facts(**{"gpu/0": "GPU-a"}), list[str]()

    def choose() -> None:
        cpu = torch.device("cpu")
        chosen.append(agree_on_collectives("auto", cpu, 1, 3, store, StopToken().check))

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join(0.05)
    assert chosen == []
    store.agree("gpu/2", "GPU-b")
    thread.join(5.0)
    assert chosen == ["engine"]


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, workers: int) -> doctor.Finding:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "version", lambda: (2, 27, 3))
    here = Environment("torchrun", 0, workers, 0, workers)
    monkeypatch.setattr(doctor, "discover", lambda: here)
    return doctor._PARTS["NCCL"]()


def test_the_doctor_says_how_many_workers_can_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are GPUs."""
    finding = pretend_gpus(monkeypatch, 4, 4)
    assert finding.works
    assert finding.why.startswith("NCCL 2.27.3: over torch, up to 4 worker(s)")


def test_the_doctor_says_why_workers_that_share_gpus_do_not_use_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what to use instead."""
    finding = pretend_gpus(monkeypatch, 1, 2)
    assert not finding.works
    assert "needs a GPU for each worker, but 2 share 1 here" in finding.why
    assert "use shm" in finding.advice
