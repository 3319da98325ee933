"""Two levels: exact averaging inside a group, the method between groups."""

from __future__ import annotations

import pytest
import torch

from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.config.faults import Fault
from gossamer.contract import laws
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from gossamer.sim.simulation import Simulation
from support import bowl, build, centre, cluster_of, digits, racing, rows, scatter, total
from tiers import every

NODES = cluster_of(8, workers_per_machine=4)
"""Two machines of four workers each."""


def trained(method: str, cluster: Cluster, *, batch: int = 4, optimiser: str = "sgd") -> Simulation:
    simulation = build(
        bowl(), method, cluster, steps=6, batch=batch, engine="loop", learning_rate=0.05,
        optimiser=optimiser,
    )  # fmt: skip
    simulation.run()
    return simulation


def leaders(simulation: Simulation) -> torch.Tensor:
    """The replicas that count: those of the first members."""
    return rows(simulation)[list(simulation.world.speakers)]


@pytest.mark.parametrize(
    "method",
    every(4, ["ad_psgd:groups=4", "easgd:groups=2", "d_psgd:groups=host", "downpour:groups=host"]),
)
def test_groups_train_the_digits(method: str) -> None:
    """A method between groups still gets 93 % of the test digits right."""
    assert simulate(digits(), method, NODES, seed=3, evaluations=1).accuracy >= 0.93


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_between_groups(name: str) -> None:
    """The budget of samples is met by all members together, and the groups' leaders speak."""
    laws.runs_between_groups(parse_method(name))
    simulation = build(bowl(), f"{name}:groups=2", NODES, steps=2, engine="none")
    simulation.run()
    assert list(simulation.world.speakers) == [0, 4]


@pytest.mark.parametrize("name", every(3, sorted(METHODS.keys() - {"ensemble"})))
def test_a_group_per_machine_keeps_traffic_inside(name: str) -> None:
    """Between machines travels less than when every worker speaks for itself, at equal options;
    an all-reduce alone is as thrifty, since it adds up inside the machines first. To a server, two
    workers of one machine send twice what their group sends."""
    # Defaults suit the number of ends; and a ring crosses between machines no oftener ungrouped.
    is_tree = METHODS[name].needs_topology == "a tree"
    same = {"period": "2", "topology": "star" if is_tree else "complete"}
    options = [f"{key}={same[key]}" for key in same if key in METHODS[name].defaults()]

    def bytes_per_step(*more: str) -> float:
        spec = ":".join(filter(None, (name, ",".join([*options, *more]))))
        cluster = cluster_of(8, workers_per_machine=2)
        run = build(bowl(64), spec, cluster, steps=16, engine="none", model_bytes=1_000_000)
        return run.run().bytes_per_step

    ratio = bytes_per_step("groups=host") / bytes_per_step()
    method = METHODS[name]
    if method.promises.waits_for == "everyone" and not method.has_server:
        assert ratio == pytest.approx(1.0)
    else:
        assert 0 < ratio < 0.8


@pytest.mark.parametrize("name", every(3, [n for n, m in METHODS.items() if not m.has_server]))
def test_what_stays_inside_a_machine_is_no_traffic(name: str) -> None:
    """Workers of one machine put nothing on its card, grouped or not."""
    cluster = cluster_of(4, workers_per_machine=4)
    assert build(bowl(), name, cluster, steps=4, engine="none").run().bytes == 0


def test_one_group_of_all_is_one_worker_with_the_big_batch() -> None:
    """Nobody is left for the method to talk to; inside, gradients are averaged exactly."""
    together = trained("local_sgd:groups=1,period=2", cluster_of(4), batch=4)
    alone = trained("local_sgd:period=2", cluster_of(1), batch=16)
    torch.testing.assert_close(leaders(together)[0], rows(alone)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["all_reduce:overlap=false", "d_psgd", "push_sum", "local_sgd"])
def test_groups_of_one_change_nothing(method: str) -> None:
    """As many groups as workers compute what the method alone computes, bit for bit."""
    grouped = f"{method}{',' if ':' in method else ':'}groups=4"
    cluster = cluster_of(4)
    assert torch.equal(rows(trained(grouped, cluster)), rows(trained(method, cluster)))


def test_two_groups_take_the_steps_of_two_larger_workers() -> None:
    """d_psgd between two groups of three is d_psgd between two workers of three times the batch."""
    groups = trained("d_psgd:groups=2", cluster_of(6), batch=4, optimiser="sgd:momentum=0.9")
    workers = trained("d_psgd", cluster_of(2), batch=12, optimiser="sgd:momentum=0.9")
    torch.testing.assert_close(leaders(groups), rows(workers), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "victim"), every(3, list(METHODS), [1, 6]))
def test_a_group_survives_the_death_of_a_member(name: str, victim: int) -> None:
    """The group goes on with those who are left, and all samples are processed."""
    cluster = NODES.changed(faults=[Fault("kill", at=0.1, worker=victim)])
    simulation = build(bowl(), f"{name}:groups=2", cluster, steps=30, engine="none")
    result = simulation.run()
    own = [account.steps for account in simulation.world.metrics.workers.values()]
    assert result.living == 7
    assert own[victim] < 15
    assert all(made > 25 for rank, made in enumerate(own) if rank != victim)
    assert result.samples >= simulation.settings.samples - 8 * 4


@pytest.mark.parametrize("name", every(3, list(METHODS)))
def test_the_other_groups_survive_the_death_of_a_leader(name: str) -> None:
    """A group without its leader has nobody to speak for it and ends; the others go on."""
    cluster = cluster_of(8, faults=[Fault("kill", at=0.1, worker=2)])
    simulation = build(bowl(), f"{name}:groups=4", cluster, steps=30, engine="none")
    simulation.run()
    own = [account.steps for account in simulation.world.metrics.workers.values()]
    assert max(own[2], own[3]) < 15
    assert all(own[rank] > 25 for rank in (0, 1, 4, 5, 6, 7))


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.promises.keeps_mean])
def test_the_mean_that_groups_keep_is_that_of_their_leaders(name: str) -> None:
    """With zero gradients the sum of the leaders (with the centre) stays where the method promises
    it; members are given their leader's point, so a sum over all rows would not."""
    simulation = build(bowl(), f"{name}:groups=2", racing(8), steps=8, engine="none")
    scatter(simulation)

    def kept() -> torch.Tensor:
        own = leaders(simulation).sum(0)
        return own + centre(simulation) if simulation.world.servers else own

    before, all_before = kept(), total(simulation)
    simulation.run()
    assert (kept() - before).abs().max() < 1e-5
    assert (total(simulation) - all_before).abs().max() > 0.1


def test_groups_must_divide_the_workers() -> None:
    """One sentence says what was given and what was expected."""
    with pytest.raises(ConfigurationError) as wrong:
        simulate(digits(), "easgd:groups=3", cluster_of(8))
    assert str(wrong.value) == (
        "groups must divide the number of workers, got groups=3 for 8 workers"
    )


@pytest.mark.parametrize("given", ["two", "-1", "hosts", "1.5"])
def test_groups_are_a_number_or_host(given: str) -> None:
    """Anything else is refused with what was given."""
    with pytest.raises(ConfigurationError, match=f"groups must be a number .* got '{given}'"):
        simulate(digits(), f"easgd:groups={given}", cluster_of(8))
