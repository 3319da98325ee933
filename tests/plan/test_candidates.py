"""The menu: what can run where, and why the rest cannot."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from gossamer.config.cluster import Cluster, Compute, load_cluster
from gossamer.config.network import Wires
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from gossamer.plan.advise.candidates import (
    MENU,
    NOT_ADVISED,
    Candidate,
    candidates,
    kind_of,
    menu_with,
)
from gossamer.plan.advise.changes import UNCHANGED, Changes, asked_values, changes_to_try
from gossamer.sim.simulation import Simulation
from gossamer.tasks import Task
from support import cluster_of, digits
from tiers import every

RATES = (0.1, 0.3)


def base(workers: int = 8, epochs: float = 20.0) -> Settings:
    return make_settings(digits(), "all_reduce", cluster_of(workers), epochs=epochs)


def test_every_method_is_on_the_menu_or_has_a_reason_not_to_be() -> None:
    """A new method must not be forgotten by the advice."""
    named = {parse_method(spec).name for spec in MENU} | NOT_ADVISED.keys()
    assert named == METHODS.keys()


@pytest.mark.parametrize("row", every(11, MENU))
def test_every_row_trains_at_one_of_the_rates(row: str) -> None:
    """To 93 % of the digits on eight workers, within the task's own epochs (servers, which leave
    momentum out) or half of them; a long period may meet as often as the advice asks for."""
    spec = parse_method(row)
    epochs = digits().epochs / (1 if spec.method.family == "parameter server" else 2)
    steps = 4 * int(spec.options.get("period", 1))
    epochs = max(epochs, steps * 8 * digits().batch / len(digits().train))
    reached: list[float] = []
    for rate in sorted(digits().learning_rates, key=lambda rate: abs(rate - 0.1)):
        settings = dataclasses.replace(base(8, epochs), method=spec, evaluations=1)
        settings = dataclasses.replace(settings, learning_rate=rate).resolved()
        reached.append(Simulation(settings).run().accuracy)
        if reached[-1] >= 0.93:
            break
    assert max(reached) >= 0.93, f"{row} reaches {max(reached):.1%}"


def test_batches_in_proportion_to_speed_are_tried_where_they_may_help() -> None:
    """Workers must differ in speed, and their time must follow the batch; else the reason says what
    is missing."""
    balance, slow = "all_reduce:balance=speed", load_cluster("one-slow-of-8")
    fixed = dataclasses.replace(slow, compute=Compute(0.01))
    for cluster, reason in (
        (slow, None),
        (fixed, "a gradient takes as long here whatever its batch is"),
        (load_cluster("equal-8"), "all workers are equally fast"),
    ):
        found, left_out = candidates(
            make_settings(digits(), "all_reduce", cluster, epochs=20.0), RATES
        )
        assert (balance in {one.method for one in found}) == (reason is None)
        assert reason is None or left_out[balance].startswith(reason)


def test_what_does_not_fit_is_left_out_with_the_difference() -> None:
    """Where a second copy of the model is too much, the methods that hold none are left."""
    slow = load_cluster("one-slow-of-8")
    small = dataclasses.replace(slow, compute=dataclasses.replace(slow.compute, memory=110e3))
    asked = make_settings(digits(), "all_reduce", small, epochs=20.0)
    found, left_out = candidates(asked, RATES, ("all_reduce", "d_psgd"))
    assert "all_reduce" in {one.method for one in found}
    assert "a worker needs" in left_out["d_psgd"]
    assert "too few" in left_out["d_psgd"]


def test_every_candidate_gets_the_same_rates() -> None:
    found, _ = candidates(base(), RATES)
    methods = [candidate.method for candidate in found]
    assert {(c.method, c.learning_rate) for c in found} == {
        (method, rate) for method in methods for rate in RATES
    }


@pytest.mark.parametrize("workers", [2, 3, 8, 9])
def test_every_candidate_can_be_made(workers: int) -> None:
    """What is left out has a sentence, what is left can run."""
    found, left_out = candidates(base(workers), RATES)
    for candidate in found:
        candidate.settings(base(workers))
    assert all(left_out.values())
    offered = {candidate.method for candidate in found} | left_out.keys()
    assert offered == {*MENU, *NOT_ADVISED}


def test_a_pattern_that_needs_pairs_is_left_out_of_an_odd_cluster() -> None:
    _, left_out = candidates(base(9), RATES)
    assert "even number of workers" in left_out["ad_psgd:topology=bipartite_ring"]


def test_a_period_longer_than_the_run_is_left_out() -> None:
    """An average that never takes place cannot be judged."""
    _, left_out = candidates(base(8, epochs=2.0), RATES)
    assert "meet fewer than 4 times" in left_out["local_sgd:period=32"]


def test_a_pattern_with_too_many_messages_is_left_out_of_a_large_cluster() -> None:
    """The nominal cost of a run does not hold for it."""
    assert "d_psgd:topology=complete" not in candidates(base(8), RATES)[1]
    assert "63 models a step" in candidates(base(64), RATES)[1]["d_psgd:topology=complete"]


def test_the_choice_may_be_among_the_named_methods_only() -> None:
    found, _ = candidates(base(8), RATES, **menu_with(["d_psgd", "all_reduce"], only=True))
    assert {candidate.method for candidate in found} == {"d_psgd", "all_reduce"}
    with pytest.raises(ConfigurationError, match="give at least one"):
        menu_with([], only=True)


def test_one_worker_has_nothing_to_choose() -> None:
    found, _ = candidates(base(1), RATES)
    assert {candidate.method for candidate in found} == {"all_reduce"}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("all_reduce", "synchronous"),
        ("sync_server", "synchronous"),
        ("backup_workers", "synchronous with backups"),
        ("local_sgd:period=8", "local updates"),
        ("push_sum", "gossip in rounds"),
        ("ad_psgd", "asynchronous gossip"),
        ("downpour", "asynchronous server"),
    ],
)
def test_kinds_are_told_apart(method: str, kind: str) -> None:
    candidate = Candidate(method, 0.1)
    assert kind_of(candidate, candidate.settings(base())) == kind


def test_a_candidate_changes_nothing_but_method_and_rate() -> None:
    own = Candidate("ad_psgd", 0.3).settings(base())
    assert dataclasses.replace(own, method=base().method, learning_rate=None).resolved() == (
        dataclasses.replace(base(), learning_rate=None).resolved()
    )


def test_a_model_that_does_not_fit_is_offered_in_stages() -> None:
    """Where one machine cannot hold it, whole replicas are left out and divided ones are tried
    first; where the closed forms see nothing in it, no division is tried."""
    whole = base()
    assert not any("stages=" in one.method for one in candidates(whole, RATES)[0])
    compute = Compute(0.0, per_sample=0.001, memory=50e3)
    small = dataclasses.replace(
        whole, cluster=dataclasses.replace(whole.cluster, compute=compute), batch=32
    )
    found, left_out = candidates(small, RATES)
    assert "a worker needs" in left_out["all_reduce"]
    assert all("stages=" in one.method or "tensor=" in one.method for one in found)
    first = found[0].method
    assert first.startswith("all_reduce:")
    Simulation(dataclasses.replace(found[0].settings(small), epochs=0.1)).run()


def test_a_thin_network_suggests_replicas_of_several_machines() -> None:
    """Between machines little goes, and a wide model has many more parameters than activations."""
    data = torch.randn(256, 1024), torch.randint(4, (256,))
    wide = Task.of(
        lambda: nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4)),
        nn.CrossEntropyLoss(), data, name="wide",
    )  # fmt: skip
    wires = Wires(bandwidth=1e6, latency=1e-5, memory_bandwidth=1e12)
    compute = Compute(0.0, per_sample=0.001)
    where = Cluster(workers=8, workers_per_machine=4, network=wires, compute=compute)
    found, _ = candidates(make_settings(wide, "all_reduce", where, batch=32), RATES)
    assert found[0].method.startswith("all_reduce:")
    assert "stages=" in found[0].method or "tensor=" in found[0].method


def test_changed_settings_come_after_the_menu_one_and_two_at_a_time() -> None:
    """What is as it was asked for is no change, and what a method cannot take is left out."""
    base = make_settings("digits-mlp", "all_reduce", "equal-8", batch=16)
    asked = asked_values(["batch=8/16", "momentum=0.5", "groups=2,weight_decay=0"], base)
    tried = changes_to_try(asked, base)
    assert [str(one) for one in tried] == [
        "", "batch 8", "momentum 0.5", "groups 2", "batch 8, momentum 0.5", "batch 8, groups 2",
        "momentum 0.5, groups 2",
    ]  # fmt: skip
    found, left_out = candidates(base, [0.1, 0.3], ["all_reduce", "downpour"], tried)
    assert [str(one) for one in found[:4]] == [
        "all_reduce at 0.1", "all_reduce at 0.3", "downpour at 0.1", "downpour at 0.3",
    ]  # fmt: skip
    assert "momentum out" in left_out["downpour (momentum 0.5)"]
    grouped = next(one for one in found if str(one) == "all_reduce (batch 8, groups 2) at 0.3")
    settings = grouped.settings(base)
    assert (settings.batch, settings.method.groups, settings.learning_rate) == (8, 2, 0.3)
    changed = Candidate("all_reduce", 0.1, Changes(momentum=0.5)).settings(base)
    assert changed.rule == dataclasses.replace(base.rule, momentum=0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [("bach", "setting to search"), ("batch=0", "so small"), ("momentum=x", "--search momentum")],
)
def test_settings_that_cannot_be_searched_are_refused(text: str, said: str) -> None:
    """In one sentence that names the option."""
    base = make_settings("digits-mlp", "all_reduce", "equal-8")
    with pytest.raises(ConfigurationError, match=said):
        asked_values([text], base)


def test_an_optimiser_without_momentum_is_not_given_one() -> None:
    """The candidate is left out with the reason, the others go on."""
    base = make_settings("digits-mlp", "all_reduce", "equal-8", optimiser="adagrad")
    found, left_out = candidates(base, [0.1], ["all_reduce"], [UNCHANGED, Changes(momentum=0.5)])
    assert len(found) == 1
    assert "has no momentum" in left_out["all_reduce (momentum 0.5)"]
