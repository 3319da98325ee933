"""Real workers and the simulator agree: bit for bit where timing decides nothing, else in accuracy.

The simulator's loop engine computes one worker at a time, as a real worker does.
"""

from __future__ import annotations

import functools

import pytest
import torch

from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.methods import METHODS, parse_method
from real_mpi import needs_mpirun, train_under_mpirun
from tiers import wide
from train_groups import Group, Ran, run_groups

TASK = "digits-mlp"
STEPS = 100
# What makes a run of a method that can wait for everybody do so.
_ON = {bool: True, int: 0}


def is_synchronous(method: str, workers: int) -> bool:
    spec = parse_method(method)
    return spec.method.is_synchronous(spec.resolve(workers, STEPS))


def timing_independent(workers: int) -> list[str]:
    """Every method of the registry that is synchronous, or is so with one option set."""
    found: list[str] = []
    for name, method in METHODS.items():
        if is_synchronous(name, workers):
            found.append(name)
            continue
        options = parse_method(name).resolve(workers, STEPS)
        for key, value in options.items():
            on = _ON.get(type(value))
            if on is not None and method.is_synchronous({**options, key: on}):
                found.append(f"{name}:{key}={str(on).lower()}")
    return found


def adds_in_arrival_order(method: str) -> bool:
    """The centre of elastic averaging takes what comes as it comes: sums agree to rounding only."""
    return METHODS[method.partition(":")[0]].family == "elastic"


BITWISE = [m for m in timing_independent(3) if not adds_in_arrival_order(m)]
TO_ROUNDING = [m for m in timing_independent(3) if adds_in_arrival_order(m)]
VARIANTS = ["all_reduce:stale=1", "sync_server:servers=2", "d_psgd:adapt=before"]
COMPRESSED = [
    "all_reduce+powersgd", "diloco:period=5+topk:share=0.1,bits=2", "sync_server:servers=2+onebit",
    "diloco:period=6,fragments=2,delay=2,mix=0.5+int4", "all_reduce+terngrad",
    "d_psgd@0.5@all_reduce+topk:share=0.1",
]  # fmt: skip
"""Also a method that changes. Random numbers and residuals are part of the bits."""
GROUPED = [
    "all_reduce:groups=2", "d_psgd:groups=2", "push_sum:groups=2", "local_sgd:groups=2",
    "sync_server:groups=2", "sync_server:groups=2,servers=3", "ssp:bound=0,groups=2",
    "d_psgd:groups=4", "local_sgd:groups=1",
]  # fmt: skip
ASYNCHRONOUS = [name for name in METHODS if not is_synchronous(name, 4)]
SHORT = {"epochs": 0.5, "evaluations": 1}


@functools.cache
def simulated(method: str, workers: int) -> tuple[str, torch.Tensor]:
    """The digest and the parameters of the same run in virtual time."""
    result = simulate(TASK, method, Cluster(workers=workers), engine="loop", **SHORT)
    return result.summary["parameters_digest"], result.parameters


def check_bits(groups: list[Group], ran: list[Ran]) -> None:
    for group, run in zip(groups, ran, strict=True):
        assert run.ends == [0] * group.workers, (group, run.written)
        digest, _ = simulated(group.method, group.workers)
        assert run.summary["parameters_digest"] == digest, group


def check_nearly(groups: list[Group], ran: list[Ran]) -> None:
    for group, run in zip(groups, ran, strict=True):
        assert run.ends == [0] * group.workers, (group, run.written)
        _, parameters = simulated(group.method, group.workers)
        torch.testing.assert_close(
            torch.tensor(run.summary["parameters"]), parameters, rtol=1e-4, atol=1e-5
        )


def test_the_list_of_methods_is_not_empty_by_accident() -> None:
    """Derived from the registry, it holds what everybody knows to be synchronous."""
    assert {"all_reduce", "d_psgd", "push_sum", "local_sgd", "sync_server"} <= set(BITWISE)
    assert {"ssp:bound=0", "bounded_delay:bound=0", "backup_workers:backups=0"} <= set(BITWISE)
    assert TO_ROUNDING == ["easgd:synchronous=true", "eamsgd:synchronous=true"]
    assert "ad_psgd" in ASYNCHRONOUS


def test_shared_memory_gives_the_simulators_bits() -> None:
    """Three processes and three workers of virtual time end with equal parameters."""
    groups = [Group(method, 3, choices=SHORT) for method in BITWISE + VARIANTS + COMPRESSED]
    check_bits(groups, run_groups(groups))


def test_growing_and_divided_batches_give_the_simulators_bits() -> None:
    """Rounds whose batches grow at an epoch, and gradients added up over micro-batches."""
    growing = {**SHORT, "schedule": "growth:at=0.2,by=3"}
    groups = [
        Group("all_reduce", 3, choices=growing), Group("local_sgd", 3, choices=growing),
        Group("all_reduce:microbatches=4", 3, choices=SHORT),
    ]  # fmt: skip
    for group, run in zip(groups, run_groups(groups), strict=True):
        assert run.ends == [0] * group.workers, (group, run.written)
        own = simulate(TASK, group.method, Cluster(workers=3), engine="loop", **dict(group.choices))
        assert run.summary["parameters_digest"] == own.summary["parameters_digest"], group


def test_groups_on_shared_memory_give_the_simulators_bits() -> None:
    """Four processes in groups: means inside them first, then the method between them."""
    groups = [Group(method, 4, choices=SHORT) for method in GROUPED]
    check_bits(groups, run_groups(groups))


@wide
def test_groups_over_torch_give_the_simulators_bits() -> None:
    """With the fixed order of adding at both levels, by number and by host."""
    groups = [Group(method, 4, "torch", choices=SHORT) for method in GROUPED[:5]]
    check_bits(groups, run_groups(groups))
    by_host = Group("d_psgd:groups=host", 4, "torch", choices=SHORT, per_host=2)
    (run,) = run_groups([by_host])
    assert run.ends == [0] * 4, run.written
    assert run.summary["parameters_digest"] == simulated("d_psgd:groups=2", 4)[0]


def test_sums_in_order_of_arrival_agree_to_rounding() -> None:
    """Elastic averaging in step adds each worker's pull to the centre as it arrives."""
    groups = [Group(method, 3, choices=SHORT) for method in TO_ROUNDING]
    check_nearly(groups, run_groups(groups))


def test_torch_gives_the_simulators_bits() -> None:
    """With the fixed order of adding."""
    methods = ["all_reduce", "d_psgd", "push_sum", "local_sgd", "sync_server"]
    groups = [Group(method, 2, "torch", choices=SHORT) for method in methods]
    check_bits(groups, run_groups(groups))


@wide
@pytest.mark.parametrize("reduction", ["auto", "messages"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_sums_over_torch_give_the_simulators_bits(workers: int, reduction: str) -> None:
    """What is added up in shared memory, and what pairs send whole and more send in parts, is added
    in order of rank either way."""
    groups = [
        Group(method, workers, "torch", choices=SHORT, reduction=reduction)
        for method in ("all_reduce", "local_sgd")
    ]
    check_bits(groups, run_groups(groups))


@wide
@needs_mpirun
@pytest.mark.parametrize(
    "method", ["all_reduce", pytest.param("d_psgd", marks=pytest.mark.slow),
               pytest.param("sync_server", marks=pytest.mark.slow)],
)  # fmt: skip
def test_mpi_gives_the_simulators_bits(method: str, tmp_path: object) -> None:
    """Under mpirun, over MPI's own windows and messages."""
    summary = train_under_mpirun(2, method, tmp_path, **SHORT)
    assert summary["parameters_digest"] == simulated(method, 2)[0]


@wide
@needs_mpirun
@pytest.mark.parametrize(
    "method", ["d_psgd:groups=2", pytest.param("all_reduce:groups=2", marks=pytest.mark.slow),
               pytest.param("local_sgd:groups=2", marks=pytest.mark.slow),
               pytest.param("sync_server:groups=2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_groups_under_mpirun_give_the_simulators_bits(method: str, tmp_path: object) -> None:
    """Four processes in two groups."""
    summary = train_under_mpirun(4, method, tmp_path, **SHORT)
    assert summary["parameters_digest"] == simulated(method, 4)[0]


def test_one_worker_gives_the_simulators_bits() -> None:
    """Alone there is no timing, so this holds for every method but one: when a merged model comes
    back to a learner that never waits depends on time even then."""
    methods = [method for method in METHODS if method != "decoupled_diloco"]
    groups = [Group(method, 1, choices=SHORT) for method in methods]
    check_bits(groups, run_groups(groups))


@pytest.mark.parametrize(
    "methods",
    [
        [*ASYNCHRONOUS[::4], "ad_psgd+bf16"],
        pytest.param([*ASYNCHRONOUS, "ad_psgd+int8"], marks=wide),
    ],
    ids=["some", "all"],
)
def test_every_asynchronous_method_learns(methods: list[str]) -> None:
    """Two workers reach a fair accuracy after a few epochs, with every sample processed."""
    choices = {"epochs": 6, "evaluations": 1, "learning_rate": 0.05}
    groups = [Group(method, 2, choices=choices) for method in methods]
    for group, run in zip(groups, run_groups(groups, 280), strict=True):
        assert run.ends == [0, 0], (group, run.written)
        assert run.summary["accuracy"] > 0.85, group
        assert run.summary["samples"] >= 6 * 1437
        assert run.summary["repeated_samples"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_asynchronous_methods_reach_the_simulators_accuracy() -> None:
    """Four workers end within the interval of the simulator's seeds, widened by two samples' error.

    The test set has 360 samples, so an accuracy of 0.96 has a standard error of 0.01.
    """
    choices = {"epochs": 10, "evaluations": 1}
    groups = [Group(method, 4, choices=choices) for method in ASYNCHRONOUS]
    for group, run in zip(groups, run_groups(groups, limit_s=800), strict=True):
        assert run.ends == [0] * 4, (group, run.written)
        seeds = [
            simulate(TASK, group.method, Cluster(workers=4), seed=seed, **choices)
            for seed in range(5)
        ]
        found = [result.summary["accuracy"] for result in seeds]
        low, high = min(found) - 0.02, max(found) + 0.02
        assert low <= run.summary["accuracy"] <= high, (group.method, found)
