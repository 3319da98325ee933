"""Changed clusters, and what they do to the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.cluster import load_cluster
from gossamer.config.faults import parse_fault
from gossamer.plan.advise.sensitivity import (
    ChangedCluster,
    SceneOutcome,
    scenes,
    sentence,
    thresholds,
    with_workers,
)
from gossamer.runs.arrival import Arrival
from support import cluster_of


def outcome(
    what: str = "bandwidth", workers: int = 8, **times: tuple[float | None, ...]
) -> SceneOutcome:
    arrivals = {method: Arrival(method, seconds) for method, seconds in times.items()}
    return SceneOutcome(ChangedCluster(what, "a change", cluster_of(workers)), arrivals, {})


def test_each_scene_differs_in_one_thing() -> None:
    """Ten times up and down, the slow ones healed, half and twice as many."""
    cluster = load_cluster("one-slow-of-16")
    found = {scene.title: scene.cluster for scene in scenes(cluster)}
    bandwidths = [one.network.bandwidth for one in found.values()]
    assert sorted(set(bandwidths)) == pytest.approx([1.25e8, 1.25e9, 1.25e10])
    assert found["every worker equally fast"].faults == ()
    assert [c.workers for c in found.values() if c.workers != 16] == [8, 32]
    assert "a tenth of the bandwidth (1 Gbit/s)" in found


def test_equal_workers_get_a_slow_one() -> None:
    slow = [scene for scene in scenes(load_cluster("equal-8")) if scene.what == "slow workers"]
    assert [str(fault) for scene in slow for fault in scene.cluster.faults] == ["slow 0=4"]


def test_one_worker_has_no_scenes() -> None:
    assert scenes(cluster_of(1)) == []


@given(st.integers(1, 40))
def test_faults_of_workers_that_are_gone_go_with_them(workers: int) -> None:
    """Whatever is left names workers that exist, or the cluster could not be made."""
    faults = [parse_fault("slow", "9=3"), parse_fault("partition", "0,1|2-7@1s+2s"),
              parse_fault("drop", "0.1")]  # fmt: skip
    changed = with_workers(cluster_of(16, faults=faults), workers)
    assert changed.workers == workers
    kinds = {fault.kind for fault in changed.faults}
    assert kinds == {"drop"} | ({"slow"} if workers > 9 else set()) | (
        {"partition"} if workers > 7 else set()
    )


def test_a_changed_answer_is_told_with_both_times() -> None:
    said = sentence(outcome(a=(4.0, 5.0), b=(1.0, 2.0)), "a", "95 %")
    assert said == "with a change: choose b (1.41 s; a needs 4.47 s)"


def test_an_unchanged_answer_names_the_next() -> None:
    said = sentence(outcome(a=(1.0, 2.0), b=(4.0, None), c=(3.0, 3.0)), "a", "95 %")
    assert said == "with a change: still a (1.41 s; next c, 3.00 s)"


def test_times_that_mix_are_too_close_to_call() -> None:
    said = sentence(outcome(a=(1.0, 4.0), b=(2.0, 1.5)), "a", "95 %")
    assert said == "with a change: too close to call between b (1.73 s) and a (2.00 s)"


def test_where_nobody_arrives_nobody_is_chosen() -> None:
    said = sentence(outcome(a=(None, None), b=(1.0, None)), "a", "95 %")
    assert said == "with a change: none of the contenders reaches 95 % with every seed"


def test_only_a_clear_change_makes_a_threshold() -> None:
    """Above or below the number of workers of the cluster as it is."""
    clear = outcome("workers", 32, a=(4.0, 5.0), b=(1.0, 2.0))
    close = outcome("workers", 4, a=(1.0, 3.0), b=(2.0, 1.5))
    assert thresholds([clear, close], 8, "a") == ["above 8 workers choose b (measured with 32)"]
