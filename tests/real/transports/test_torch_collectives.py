"""Which collectives workers on the torch transport use, and what the doctor says about it."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.cuda import nccl

from gossamer.commands import doctor
from gossamer.errors import ConfigurationError
from gossamer.real.launch.environment import Environment
from gossamer.real.transports.torch.reduction_choice import (
    ReductionPlace,
    agree_on_reduction,
    check_reduction,
    choose_reduction,
    own_gpu,
)
from gossamer.real.transports.transport import StopToken


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


GPUS = st.lists(
    st.sampled_from(["no GPU", "no NCCL", "GPU-a", "GPU-b", "GPU-c"]), min_size=1, max_size=4
)
ALIKE = st.builds(lambda gpu, count: [gpu] * count, st.just("no GPU"), st.integers(1, 4))


def places(gpus: list[str], neighbours: int = 1) -> list[ReductionPlace]:
    return [ReductionPlace(gpu, neighbours) for gpu in gpus]


@settings(max_examples=100)
@given(GPUS | ALIKE, st.integers(1, 4))
def test_the_best_that_all_have_is_used(gpus: list[str], neighbours: int) -> None:
    """Two of NCCL's processes on one GPU would hang, and without a GPU there is nothing to use;
    memory is shared by those of one host, and holds no GPU's values."""
    has_own = len(set(gpus)) == len(gpus) and all(gpu.startswith("GPU") for gpu in gpus)
    is_near = set(gpus) == {"no GPU"} and neighbours == len(gpus)
    expected = "nccl" if has_own else "shared" if is_near else "messages"
    assert choose_reduction("auto", places(gpus, neighbours))[0] == expected


def test_nothing_is_shared_where_one_launcher_says_otherwise() -> None:
    """Each host's says how many it has; all must be on the first."""
    mixed = [ReductionPlace("no GPU", 3), ReductionPlace("no GPU", 3), ReductionPlace("no GPU", 1)]
    assert choose_reduction("auto", mixed)[0] == "messages"


@pytest.mark.parametrize(
    ("gpus", "neighbours", "why"),
    [
        (["no GPU", "GPU-a"], 2, "worker 1 computes on a GPU"),
        (["no GPU", "no GPU"], 1, "worker 0 has 1 of 2 workers on its host"),
    ],
)
def test_memory_that_cannot_be_shared_is_left_out_with_its_reason(
    gpus: list[str], neighbours: int, why: str
) -> None:
    """Messages go everywhere."""
    chosen, reason = choose_reduction("auto", places(gpus, neighbours))
    assert chosen == "messages"
    assert why in reason


@pytest.mark.parametrize("name", ["engine", "fixed", "shared"])
def test_a_reduction_of_former_times_is_refused_in_one_sentence(name: str) -> None:
    """It says what can be asked for instead."""
    with pytest.raises(ConfigurationError, match=rf"GOSSAMER_REDUCTION={name} .*messages or nccl"):
        check_reduction(name)


def test_without_linux_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems have no memory without a name that others may open."""
    monkeypatch.setattr(sys, "platform", "darwin")
    chosen, why = choose_reduction("auto", places(["no GPU"] * 2, 2))
    assert chosen == "messages"
    assert "needs Linux, and this is darwin" in why


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
    chosen, reason = choose_reduction("auto", places(gpus))
    assert chosen == "messages"
    assert reason.startswith(why)
    with pytest.raises(ConfigurationError, match=why):
        choose_reduction("nccl", places(gpus))


def test_messages_are_used_where_they_were_asked_for() -> None:
    """Somebody may want the same bits everywhere, or no NCCL."""
    assert choose_reduction("messages", places(["GPU-a", "GPU-b"]))[0] == "messages"
    assert choose_reduction("messages", places(["no GPU"] * 2, 2))[0] == "messages"


def test_a_worker_on_the_cpu_says_so_without_looking_for_gpus() -> None:
    """Looking would take memory of a GPU that nobody asked for."""
    assert own_gpu(torch.device("cpu")) == "no GPU"
    assert not torch.cuda.is_initialized()


def test_all_workers_choose_alike_once_all_have_spoken() -> None:
    """Nobody concludes anything from half of the answers."""
    store, chosen = Facts(**{"place/0": "3 GPU-a"}), list[str]()

    def choose() -> None:
        own = ReductionPlace("no GPU", 3)
        chosen.append(agree_on_reduction("auto", own, 1, 3, store, StopToken().check))

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join(0.05)
    assert chosen == []
    store.agree("place/2", "3 GPU-b")
    thread.join(100)
    assert chosen == ["messages"]


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
