"""The closed forms beside the simulator, in time only, on equal workers."""

from __future__ import annotations

import dataclasses

import pytest

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.methods import METHODS
from gossamer.plan.cost.agreement import FAST, SLOW, TOLERANCE, WORKERS, compare_step, equal_cluster
from gossamer.plan.cost.crossing import crossings
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.step_time import predict
from gossamer.plan.cost.workload import workload_of
from gossamer.tasks import make_task
from tiers import every, only

DRAWN = ("pull_gossip", "ad_psgd")
SETTLED = [name for name in FORMS if name not in DRAWN]
TASK = make_task("digits-logistic")


def test_every_method_of_the_registry_has_a_form() -> None:
    """Those that are made for compression are simulated, as everything that is compressed, and so
    are those whose workers learn from whomever they look at."""
    simulated = {name for name, row in METHODS.items() if row.default_compressor}
    assert set(FORMS) == set(METHODS) - simulated - {"codistill", "pbt"}


@pytest.mark.parametrize(
    ("method", "workers", "bandwidth"), every(4, SETTLED, WORKERS, [FAST, SLOW])
)
def test_a_predicted_step_is_the_simulated_one(method: str, workers: int, bandwidth: float) -> None:
    """Equal workers and constant compute times: within 5 %, where nothing is drawn within 0.1 %."""
    found = compare_step(method, equal_cluster(workers, bandwidth), TASK, steps=4)
    assert abs(found.error) < 1e-3, found


@pytest.mark.parametrize("bandwidth", [FAST, SLOW])
@pytest.mark.parametrize(("workers", "steps"), [(2, 40), (4, 200), (8, 40)])
@pytest.mark.parametrize("method", DRAWN)
def test_a_predicted_step_is_the_mean_of_those_that_draw_their_partners(
    method: str, workers: int, steps: int, bandwidth: float
) -> None:
    """Within 5 % of a short run, of which some is chance."""
    found = compare_step(method, equal_cluster(workers, bandwidth), TASK, steps=steps)
    assert abs(found.error) < TOLERANCE, found


AXES = {
    "bandwidth": ("local_sgd:period=8", "d_psgd", [1e8, 1e10]),
    "workers": ("sync_server", "all_reduce", [4, 8, 16, 32]),
    "batch": ("local_sgd:period=8", "d_psgd", [4, 128]),
}


@pytest.mark.parametrize("axis", only(["batch"], AXES))
def test_methods_cross_where_the_simulation_turns(axis: str) -> None:
    """A fifteenth below the crossing of the closed forms the one is simulated as the faster, and a
    fifteenth above it the other; by bandwidth, number of workers and batch."""
    slower, faster, values = AXES[axis]
    wires = {"collective": "tree", "latency": 0.85e-3} if axis == "workers" else {"latency": 1e-4}
    size = 3e5 if axis == "workers" else 1e7
    cluster = Cluster(
        workers=8, compute=Compute(0.004, per_sample=0.000375, distribution="constant"),
        network=Wires(**wires),
    )  # fmt: skip
    whole = workload_of(TASK, model_bytes=size, batch=16)
    found = crossings(axis, [slower, faster], values, cluster, whole)
    (turn,) = (one.value for one in found if one.faster == faster)
    leads = list[bool]()
    for value in (turn / 1.07, turn * 1.07):
        where = cluster.changed(workers=round(value)) if axis == "workers" else cluster
        if axis == "bandwidth":
            where = dataclasses.replace(where, network=Wires(bandwidth=value, **wires))
        work = dataclasses.replace(whole, batch=round(value) if axis == "batch" else 16)
        steps = [
            compare_step(one, where, TASK, model_bytes=size, workload=work, steps=8).simulated_s
            for one in (slower, faster)
        ]
        leads.append(steps[1] < steps[0])
    assert leads == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [FAST, 3e8, 1e8, SLOW / 8])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("method", [*DRAWN, "ad_psgd:topology=bipartite_ring"])
def test_a_predicted_step_is_the_mean_of_long_runs_with_drawn_partners(
    method: str, workers: int, bandwidth: float
) -> None:
    """Within 5 %, also between a fast network and a slow one."""
    assert compare_step(method, equal_cluster(workers, bandwidth), TASK).is_close


@pytest.mark.parametrize(("method", "bandwidth"), every(
    3,
    [
        "all_reduce:overlap=false",
        "all_reduce:stale=1",
        "local_sgd:period=4,state=averaged",
        "d_psgd:topology=exponential",
        "d_psgd:topology=star",
        "d_psgd:overlap=false",
        "d_psgd:adapt=before,topology=torus",
        "push_sum:overlap=1",
        "push_sum:topology=exponential",
        "push_gossip:period=2",
        "ad_psgd:paper",
        "easgd:synchronous",
        "easgd:period=1",
        "ssp:bound=0",
        "ssp:bound=2",
        "bounded_delay:bound=0",
        "sync_server:servers=2",
        "sync_server:servers=2,placement=workers",
        "downpour:n_push=4,n_fetch=4",
        "downpour:n_push=1,n_fetch=4",
        "downpour:n_push=2,n_fetch=4",
        "downpour:n_push=4,n_fetch=2",
        "all_reduce:groups=4",
        "d_psgd:groups=4",
        "downpour:groups=4",
    ],
    [FAST, 2e8, SLOW],
))  # fmt: skip
def test_options_change_prediction_and_simulation_alike(method: str, bandwidth: float) -> None:
    """Overlap, periods, topologies, shards and groups, on eight workers."""
    found = compare_step(method, equal_cluster(8, bandwidth), TASK, steps=12)
    assert found.is_close, found


@pytest.mark.parametrize("model_bytes", [60e6, 600e6])
@pytest.mark.parametrize("collective", ["ring", "tree", "halving_doubling", "butterfly"])
@pytest.mark.parametrize("workers", [4, 7])
def test_pieces_of_a_gradient_are_reduced_while_the_rest_is_computed(
    workers: int, collective: str, model_bytes: float
) -> None:
    """All collectives, models of several buckets, and a cost that nothing hides."""
    cluster = equal_cluster(workers, 2.5e9, collective=collective)
    compute = dataclasses.replace(cluster.compute, unoverlapped_seconds=0.002)
    found = compare_step(
        "all_reduce", dataclasses.replace(cluster, compute=compute), make_task("digits-mlp"),
        model_bytes=model_bytes, steps=2,
    )  # fmt: skip
    assert abs(found.error) < 1e-3, found
    assert len(workload_of(make_task("digits-mlp"), model_bytes=model_bytes).pieces) > 1


@pytest.mark.parametrize("method", ["all_reduce", "local_sgd", "d_psgd:groups=host"])
def test_several_workers_on_a_machine_share_its_memory_and_its_card(method: str) -> None:
    """Four machines of four workers; collectives, and messages between whole machines."""
    cluster = Cluster(
        workers=16, workers_per_machine=4, compute=Compute(distribution="constant"),
        network=Wires(bandwidth=1e9, latency=2e-5, memory_bandwidth=5e9),
    )  # fmt: skip
    assert abs(compare_step(method, cluster, TASK, steps=4).error) < 1e-3


def test_collectives_between_racks_pay_for_the_way() -> None:
    """The rack's latency and oversubscription, in both worlds."""
    cluster = Cluster(
        workers=8, machines_per_rack=4, compute=Compute(distribution="constant"),
        network=Wires(bandwidth=1e8, rack_latency=1e-3, oversubscription=3.0),
    )  # fmt: skip
    found = compare_step("all_reduce", cluster, TASK, steps=2)
    assert abs(found.error) < 1e-3
    inside = dataclasses.replace(cluster, machines_per_rack=8)
    workload = workload_of(TASK, model_bytes=1e6)
    assert predict("all_reduce", inside, workload).step_seconds < found.simulated_s / 2


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [FAST, 1.25e8])
@pytest.mark.parametrize("jitter", [0.05, 0.2])
@pytest.mark.parametrize(
    "method",
    ["all_reduce", "local_sgd", "sync_server", "downpour", "hogwild", "easgd", "pull_gossip"],
)
def test_forms_for_compute_times_that_vary_agree_too(
    method: str, jitter: float, bandwidth: float
) -> None:
    """Slowest of many and queues at cards: within 5 % of long runs of 16 workers."""
    found = compare_step(method, equal_cluster(16, bandwidth, jitter=jitter), TASK, steps=160)
    assert found.is_close, found
