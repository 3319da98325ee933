"""What every method with servers shares: parameters cut over several of them, where these stand,
what their links carry, and their momentum."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gossamer import simulate
from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS
from gossamer.optim.momentum import explicit_momentum
from gossamer.replica import cut
from gossamer.runs.result import Result
from gossamer.sim.simulation import Simulation
from support import before_each_descent, bowl, build, centre, cluster_of, digits, pieces, rows
from tiers import every

SIZES = (3, 2, 4, 3)
WITH_SERVERS = [name for name, method in METHODS.items() if method.has_server]
MODEL_BYTES = 10**7
EVEN = (8,) * 8


def trained(method: str, cluster: Cluster, **choices: object) -> Simulation:
    """A run of true gradients on a quadratic of four parameter tensors that has ended."""
    usual = {"learning_rate": 0.05, "optimiser": "sgd", "engine": "loop", "evaluations": 1}
    simulation = build(pieces(*SIZES), method, cluster, steps=8, **(usual | choices))
    simulation.run()
    return simulation


# ---------------------------------------------------------------------- cutting


@examples(max_examples=50)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.data())
def test_slices_cover_everything_and_end_where_parameters_end(
    sizes: list[int], data: st.DataObject
) -> None:
    """As many slices as servers, none empty, one after the other, no parameter in two of them; and
    each ends as near to its share as the parameters before and after it allow."""
    servers = data.draw(st.integers(1, len(sizes)))
    slices = cut(sizes, servers)
    ends = list(itertools.accumulate(sizes))
    assert len(slices) == servers
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == ends[-1]
    positions = [ends.index(part.stop) for part in slices]
    assert positions == sorted(set(positions))
    for number, position in enumerate(positions):
        first = positions[number - 1] + 1 if number else 0
        free = ends[first : len(sizes) - servers + number + 1]
        due = ends[-1] * (number + 1) / servers
        assert abs(ends[position] - due) == min(abs(end - due) for end in free)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 100))
def test_equal_parameters_are_cut_equally(servers: int, each: int, size: int) -> None:
    """Where shares can be equal, they are."""
    slices = cut([size] * (servers * each), servers)
    assert [part.stop - part.start for part in slices] == [size * each] * servers


@pytest.mark.parametrize("task", [bowl(), digits()])
def test_too_many_servers_are_refused_in_one_sentence(task: object) -> None:
    """It says how many parameter tensors there are, and so how many servers there can be."""
    tensors = 1 if task is bowl() else 4
    with pytest.raises(ConfigurationError) as wrong:
        simulate(task, "downpour:servers=5", cluster_of(2))
    assert str(wrong.value) == (
        f"the model has {tensors} parameter tensors and cannot be cut over 5 servers; use at most "
        f"{tensors}"
    )


@pytest.mark.parametrize("optimiser", ["sgd", "sgd:momentum=0.9", "adagrad"])
def test_one_workers_result_does_not_depend_on_the_cut(optimiser: str) -> None:
    """downpour with one worker is serial training, bit for bit, over any number of servers."""
    method = f"downpour:server_optimiser={optimiser}"
    whole = centre(trained(method, cluster_of(1)))
    for servers in (2, 3, 4):
        assert torch.equal(centre(trained(f"{method},servers={servers}", cluster_of(1))), whole)


@pytest.mark.parametrize("name", WITH_SERVERS)
def test_every_server_is_used_and_the_cut_keeps_the_sum_of_work(name: str) -> None:
    """With zero gradients, parameters and bytes per step are those of one server, and each of three
    servers is told as many updates as the only one."""

    def run(servers: int) -> tuple[Simulation, Result]:
        method = f"{name}:servers={servers}"
        simulation = build(
            pieces(*EVEN), method, cluster_of(4, distribution="constant"), steps=20, engine="none",
            model_bytes=MODEL_BYTES,
        )  # fmt: skip
        return simulation, simulation.run()

    one, result_of_one = run(1)
    three, result_of_three = run(3)
    assert len(three.world.servers) == 3
    assert torch.equal(centre(one), centre(three))
    assert torch.equal(centre(one), one.model.initial.double())
    ratio = result_of_three.bytes_per_step / result_of_one.bytes_per_step
    assert ratio == pytest.approx(1.0, rel=0.05)
    versions = [replica.version for replica in three.world.replicas[4:]]
    assert versions == [versions[0]] * 3


@pytest.mark.parametrize("method", ["sync_server", "backup_workers:backups=0", "ssp:bound=0"])
def test_servers_that_wait_for_all_agree_over_any_cut(method: str) -> None:
    """In step, each server sees every worker's gradient of the same step: same bits."""
    joint = "," if ":" in method else ":"
    cluster = cluster_of(3, jitter=0.5)
    whole = centre(trained(method, cluster))
    for servers in (2, 4):
        assert torch.equal(centre(trained(f"{method}{joint}servers={servers}", cluster)), whole)


# ---------------------------------------------------------------------- links


def timed(method: str, *, seconds: float, workers: int = 16, machines: int = 1) -> Result:
    """A run without gradients, of a model whose eight parameters are equally large."""
    cluster = Cluster(
        workers=workers,
        workers_per_machine=machines,
        compute=Compute(seconds=seconds, jitter=0.05),
        network=Wires(bandwidth=1e9, latency=1e-5),
    )
    simulation = build(
        pieces(*EVEN), method, cluster, steps=25, engine="none", model_bytes=MODEL_BYTES
    )
    return simulation.run()


def test_more_servers_carry_as_many_times_more_until_computing_limits() -> None:
    """Where the server's card is the bottleneck, a step takes a model's time on it, or two where
    all push and then all fetch at once, and S servers give about S times the throughput; where
    computing is, more servers give nothing."""

    def throughput(servers: int, seconds: float) -> float:
        result = timed(f"downpour:servers={servers}", seconds=seconds)
        return result.steps / result.virtual_seconds

    alone = throughput(1, 0.01)
    assert 0.5 <= alone * MODEL_BYTES / 1e9 <= 1.0
    for servers in (2, 4):
        assert throughput(servers, 0.01) / alone == pytest.approx(servers, rel=0.2)
    for servers in (1, 8):
        assert throughput(servers, 2.0) == pytest.approx(16 / 2.0, rel=0.05)


@pytest.mark.parametrize("method", every(3, ["sync_server", "downpour", "hogwild"]))
def test_a_shard_on_the_workers_own_machine_is_reached_for_free(method: str) -> None:
    """With one shard on each of four machines a worker sends and fetches three quarters of a model;
    with servers of their own, all of it; with one machine for all, nothing."""

    def models_per_step(placement: str, servers: int, workers_per_machine: int) -> float:
        spec = f"{method}:placement={placement},servers={servers}"
        result = timed(spec, seconds=0.1, workers=4, machines=workers_per_machine)
        return result.bytes_per_step / MODEL_BYTES

    assert models_per_step("own", 4, 1) == pytest.approx(2.0, rel=0.05)
    assert models_per_step("workers", 4, 1) == pytest.approx(1.5, rel=0.05)
    assert models_per_step("workers", 8, 1) == pytest.approx(1.5, rel=0.05)
    assert models_per_step("workers", 2, 2) == pytest.approx(1.0, rel=0.05)
    assert models_per_step("workers", 1, 4) == 0


# ---------------------------------------------------------------------- a tree


def test_groups_under_servers_are_larger_workers() -> None:
    """sync_server between two machines of three is sync_server between two workers of three times
    the batch: gradients are averaged exactly inside a machine, and its leader speaks for it."""
    nodes = cluster_of(6, workers_per_machine=3)
    options = "servers=2,server_optimiser=sgd:momentum=0.9"
    tree = trained(f"sync_server:groups=host,{options}", nodes, batch=4)
    flat = trained(f"sync_server:{options}", cluster_of(2), batch=12)
    torch.testing.assert_close(centre(tree), centre(flat), rtol=1e-4, atol=1e-5)
    assert list(tree.world.speakers) == [0, 3]


@pytest.mark.parametrize("name", WITH_SERVERS)
def test_every_server_method_runs_as_a_tree(name: str) -> None:
    """Between machines a step of a group costs what a step of a worker does, so a worker's share is
    that divided by the size of its group; and every sample is processed."""
    tree = timed(f"{name}:groups=host,servers=2", seconds=0.1, workers=8, machines=4)
    flat = timed(f"{name}:servers=2", seconds=0.1, workers=8, machines=4)
    assert tree.bytes_per_step == pytest.approx(flat.bytes_per_step / 4, rel=0.1)
    assert tree.samples >= tree.settings.samples


def test_an_asynchronous_tree_applies_a_groups_mean_as_one_gradient() -> None:
    """Each update of the servers is one group's mean, so that there are as many as group steps, and
    their staleness is that of two workers."""
    simulation = build(
        pieces(*SIZES), "downpour:groups=2,servers=2", cluster_of(6), steps=40, engine="none"
    )
    updates: list[int] = []
    before_each_descent(simulation, lambda replica, read: updates.append(replica.row))
    result = simulation.run()
    assert len(updates) == 2 * result.steps / 3
    assert result.mean_staleness == pytest.approx(1.0, rel=0.05)
    assert rows(simulation).shape == (6, sum(SIZES))


# ---------------------------------------------------------------------- momentum


@pytest.mark.parametrize(
    ("method", "ends"),
    [("downpour", 4), ("softsync", 4), ("dc_asgd:groups=2", 2), ("sync_server", 1)],
)
@pytest.mark.parametrize("momentum", [0.9, 0.6])
@pytest.mark.parametrize("nesterov", ["false", "true"])
def test_lower_momentum_leaves_out_what_asynchrony_adds(
    method: str, ends: int, momentum: float, nesterov: str
) -> None:
    """The server's momentum is `explicit_momentum` for as many ends as push; a server that waits
    for all has no asynchrony and keeps its own. Nesterov's look-ahead goes with the last of it."""
    joint = "," if ":" in method else ":"

    def run(momentum: float, nesterov: str, *more: str) -> Simulation:
        optimiser = f"server_optimiser=(sgd:momentum={momentum},nesterov={nesterov})"
        return trained(f"{method}{joint}{','.join([optimiser, *more])}", cluster_of(4))

    lowered = explicit_momentum(momentum, ends)
    assert lowered == pytest.approx(max(0.0, 1 - ends * (1 - momentum)))
    by_itself = run(momentum, nesterov, "lower_momentum=true")
    by_hand = run(lowered, nesterov if lowered else "false")
    assert torch.equal(centre(by_itself), centre(by_hand))
