"""Replicas of several processes: deaths, a slow stage, checkpoints, servers, bad input."""

from __future__ import annotations

import pytest

from gossamer import train
from gossamer.config.faults import Fault
from gossamer.errors import ConfigurationError
from gossamer.real.faults.fault_plan import FAULTS_VARIABLE, FaultPlan
from tiers import wide
from train_groups import Group, run_groups

pytestmark = pytest.mark.timeout(300)

CHOICES = {"epochs": 2, "evaluations": 1, "batch": 16, "learning_rate": 0.03}


@pytest.mark.parametrize(
    "method",
    [
        "all_reduce:stages=2",
        pytest.param("ad_psgd:stages=2,pipeline=pipedream", marks=wide),
        pytest.param("d_psgd:stages=2,pipeline=gpipe", marks=wide),
    ],
)
def test_a_replica_ends_with_one_of_its_stages_and_the_others_go_on(method: str) -> None:
    """The second stage of the second replica dies; its first stage ends in good order, and the
    first replica learns digits alone."""
    (ran,) = run_groups([Group(method, 4, choices=CHOICES, killed=(2, 0.2))])
    assert ran.ends[2] == -9, ran.written
    assert ran.ends[:2] == [0, 0], ran.written
    assert ran.ends[3] == 0, ran.written
    assert (
        "the replica of workers 2, 3 has ended with one of them; the other replicas go on"
        in ran.written
    )
    assert ran.summary["accuracy"] > 0.8


def test_the_last_replica_cannot_end_in_good_order() -> None:
    """With its second stage the only model is gone."""
    (ran,) = run_groups([Group("all_reduce:stages=2", 2, choices=CHOICES, dies=(0, 20))])
    assert ran.ends == [-9, 1]
    assert "no other replica is left" in (ran.failure or "")


def test_servers_are_divided_like_the_stages() -> None:
    """DistBelief: each stage has a server of its own with Adagrad, and digits are learnt."""
    method = "downpour:stages=2,servers=2,server_optimiser=adagrad"
    (ran,) = run_groups([Group(method, 4, choices={**CHOICES, "epochs": 4})])
    assert ran.ends == [0] * 4, ran.written
    assert ran.summary["accuracy"] > 0.9


def test_a_slow_stage_slows_its_own_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica's second stage is slower; an asynchronous method lets the other replica
    make more of the steps."""
    plan = FaultPlan((Fault("slow", worker=1, amount=20),))
    monkeypatch.setenv(FAULTS_VARIABLE, plan.to_json())
    (ran,) = run_groups([Group("ad_psgd:stages=2", 4, choices=CHOICES)])
    assert ran.ends == [0] * 4, ran.written
    steps = ran.summary["steps_by_worker"]
    assert steps["0"] < steps["2"]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("all_reduce:stages=2,microbatches=1", "at least as many micro-batches as the 2 stages"),
        ("all_reduce:stages=2,tensor=2", "give the mesh to gossamer.join"),
        ("downpour:stages=2", "choose servers=2"),
        ("all_reduce:stages=4", "with 3 parts cannot be cut into 4"),
        ("all_reduce:stages=2,microbatches=3", "cannot be divided into 3"),
        ("all_reduce:stages=3", "do not divide the 4"),
        ("all_reduce:stages=2,pipeline=dualpipev,microbatches=2", "cannot be made of 2 stages"),
    ],
)
def test_what_stages_cannot_do_is_said_before_anything_starts(method: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train("digits-mlp", method, 4, batch=16)
