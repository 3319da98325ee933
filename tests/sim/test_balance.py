"""`balance=speed` in virtual time changes how long rounds take, and nothing else."""

from __future__ import annotations

import pytest
import torch

from gossamer.config.cluster import Cluster, Compute
from gossamer.config.faults import Fault
from gossamer.errors import ConfigurationError
from gossamer.runs.result import Result
from gossamer.sim.simulation import simulate
from support import bowl, build, digits, pieces
from tiers import only

SLOW = Fault("slow", worker=0, amount=4.0)
METHODS = ["all_reduce", "all_reduce:stale=1", "all_reduce:overlap=false", "sync_server",
           "sync_server:servers=2"]  # fmt: skip


def uneven(workers: int = 4, *faults: Fault, fixed: float = 0.2, batch: int = 16) -> Cluster:
    """A step of 10 ms at that batch, of which so much is fixed; worker 0 is four times slower."""
    compute = Compute(
        0.01 * fixed, per_sample=0.01 * (1 - fixed) / batch, distribution="constant", jitter=0.0
    )
    return Cluster(workers=workers, compute=compute, faults=(SLOW, *faults))


def balanced(method: str) -> str:
    return method + ("," if ":" in method else ":") + "balance=speed"


def ran(method: str, cluster: Cluster, steps: int = 45, batch: int = 16) -> Result:
    return build(pieces(3, 3), method, cluster, steps=steps, batch=batch, evaluations=1).run()


@pytest.mark.parametrize("method", only(METHODS[:1], METHODS))
def test_the_descent_is_that_of_equal_shares(method: str) -> None:
    """A round has the same samples however they are cut, so the model moves alike; the rounds and
    the samples are the same in number."""
    equal, own = ran(method, uneven()), ran(balanced(method), uneven())
    torch.testing.assert_close(own.parameters, equal.parameters, rtol=1e-4, atol=1e-5)
    for key in ("samples", "steps"):
        assert own.summary[key] == equal.summary[key]
    assert own.summary["batch_share"][0] < 0.15


@pytest.mark.parametrize("method", only(METHODS[:1], METHODS))
def test_one_slow_worker_costs_less_than_half(method: str) -> None:
    """One of four is four times slower, and four fifths of a step follow the batch."""
    equal, own = (
        build(
            digits(), name, uneven(), steps=100, batch=16, engine="none", evaluations=1
        ).run().summary["virtual_seconds"]
        for name in (method, balanced(method))
    )  # fmt: skip
    assert own < equal / 2


def test_one_worker_is_the_same_bit_for_bit() -> None:
    """It has every share whatever its speed."""
    plain, own = (
        ran(name, uneven(1), steps=20) for name in ("all_reduce", "all_reduce:balance=speed")
    )
    assert own.summary["digest"] == plain.summary["digest"]
    assert own.summary["parameters_digest"] == plain.summary["parameters_digest"]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_living_share_out_what_a_dead_worker_had(rank: int) -> None:
    """The budget is processed to the sample, as without balance; whoever dies, fast or slow."""
    cluster = uneven(4, Fault("kill", worker=rank, at=0.3))
    simulation = build(digits(), "all_reduce:balance=speed", cluster, steps=40, batch=16)
    summary, budget = simulation.run().summary, simulation.world.budget
    last = budget.shares_of(max(own.steps for own in simulation.world.metrics.workers.values()) - 1)
    assert summary["living"] == 3
    assert rank not in last
    assert sum(last.values()) == 3 * 16
    assert budget.samples <= summary["samples"] < budget.samples + 3 * 16


def test_no_sample_of_an_epoch_is_left_out_or_dealt_twice() -> None:
    """Rounds of unequal shares cut the same order as equal ones."""
    task = bowl()
    workers, batch = 4, 8
    rounds = len(task.train) // (workers * batch)
    simulation = build(task, "all_reduce:balance=speed", uneven(), steps=rounds, batch=batch)
    seen = list[int]()
    usual = simulation.world.batcher.start

    def start(gradient: object) -> None:
        seen.extend(gradient.batch.tolist())  # type: ignore[attr-defined]
        usual(gradient)  # type: ignore[arg-type]

    simulation.world.batcher.start = start  # type: ignore[method-assign]
    simulation.run()
    assert len(seen) == len(set(seen)) == rounds * workers * batch


@pytest.mark.parametrize(
    ("method", "split", "what"),
    [
        ("ad_psgd:balance=speed", "shuffled", "use all_reduce and sync_server"),
        ("local_sgd:balance=speed", "shuffled", "use all_reduce and sync_server"),
        ("backup_workers:balance=speed", "shuffled", "use all_reduce and sync_server"),
        ("sync_server:balance=speed,backups=1", "shuffled", "leave out backups="),
        ("all_reduce:balance=load", "shuffled", "balance must be speed"),
        ("all_reduce:balance=speed,groups=2", "shuffled", "leave out groups="),
        ("all_reduce:balance=speed", "sharded", "use the split shuffled"),
    ],
)  # fmt: skip
def test_where_it_cannot_be_it_is_refused(method: str, split: str, what: str) -> None:
    """In one sentence that says what to do."""
    with pytest.raises(ConfigurationError, match=what):
        simulate(digits(), method, uneven(), split=split)
