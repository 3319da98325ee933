"""Stages on real workers end with the simulator's parameters: bit for bit where both add the same
micro-batches in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer import simulate
from gossamer.config.cluster import Cluster
from tiers import wide
from train_groups import Group, Ran, run_groups

pytestmark = pytest.mark.timeout(300)

TRANSFORMER = f"{Path(__file__).parents[2] / 'programs' / 'small_transformer.py'}:task"
SHORT = {"epochs": 0.5, "evaluations": 1, "learning_rate": 0.05}


def stages(method: str, workers: int, **more: object) -> Group:
    """A few steps of the transformer."""
    return Group(method, workers, task=TRANSFORMER, choices=SHORT, **more)


def check_bits(groups: list[Group], ran: list[Ran]) -> None:
    """Each ended with the parameters of the same run in virtual time."""
    for group, run in zip(groups, ran, strict=True):
        assert run.ends == [0] * group.workers, (group, run.written)
        twin = simulate(
            group.task, group.method, Cluster(workers=group.workers), engine="loop", **SHORT
        )
        assert run.summary["parameters_digest"] == twin.summary["parameters_digest"], group
        assert run.summary["steps"] == twin.summary["steps"]
        assert run.summary["max_staleness"] == twin.summary["max_staleness"]
        kept = [[one["weight_versions"] for one in found["pipeline"]]
                for found in (run.summary, twin.summary)]  # fmt: skip
        assert kept[0] == kept[1]


def test_stages_of_a_transformer_end_with_the_simulators_bits() -> None:
    """Two stages of 1F1B, and a hybrid of two pipelines of two, which equals one worker with twice
    the batch."""
    groups = [stages("all_reduce:stages=2", 2), stages("all_reduce:stages=2", 4)]
    ran = run_groups(groups)
    check_bits(groups, ran)
    alone = simulate(TRANSFORMER, "all_reduce", Cluster(workers=1), batch=32, **SHORT)
    assert ran[1].summary["loss"] == pytest.approx(alone.summary["loss"], rel=1e-5)


WIDE = [
    stages("all_reduce:stages=4", 4),
    stages("all_reduce:stages=2,pipeline=gpipe", 2),
    stages("all_reduce:stages=2,pipeline=interleaved", 2),
    stages("all_reduce:stages=2,pipeline=zero_bubble", 2),
    stages("all_reduce:stages=2,pipeline=zbv", 2),
    stages("all_reduce:stages=2,pipeline=dualpipev", 2),
    stages("all_reduce:stages=4,pipeline=pipedream", 4),
    stages("all_reduce:stages=4,pipeline=vertical_sync", 4),
    stages("all_reduce:stages=2,pipeline=2bw", 2),
    stages("all_reduce:stages=2", 4, transport="torch"),
    stages("d_psgd:stages=2", 4),
    stages("push_sum:stages=2,pipeline=gpipe", 4),
    stages("local_sgd:period=2,stages=2,pipeline=pipedream", 4),
    stages("diloco:period=2,stages=2", 4),
]


@wide
@pytest.mark.parametrize(
    "group",
    [stages("all_reduce:stages=4,pipeline=ampnet", 4),
     stages("all_reduce:stages=2,pipeline=pipemare", 2)],
    ids=lambda group: group.method,
)  # fmt: skip
def test_pipelines_without_old_weights_agree_to_rounding(group: Group) -> None:
    """The simulator makes the same gradient in one expression, whose sums are others. With weight
    stashing the run would end elsewhere."""
    (run,) = run_groups([group])
    assert run.ends == [0] * group.workers, run.written
    stashed = f"{group.method.rpartition('=')[0]}=pipedream"
    twin, other = (
        simulate(group.task, method, Cluster(workers=group.workers), engine="loop", **SHORT)
        for method in (group.method, stashed)
    )
    assert run.summary["loss"] == pytest.approx(twin.summary["loss"], rel=1e-5)
    assert run.summary["loss"] != pytest.approx(other.summary["loss"], rel=1e-4)


@wide
@pytest.mark.parametrize("group", WIDE, ids=lambda group: f"{group.method} {group.transport}")
def test_every_schedule_and_method_of_stages_agrees(group: Group) -> None:
    check_bits([group], run_groups([group]))
