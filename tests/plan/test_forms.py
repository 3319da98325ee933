"""Laws of the closed forms: parts, bounds, refusals, crossings."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.config.cluster import Cluster, Compute, Wires, load_cluster
from gossamer.config.collective_costs import COLLECTIVES
from gossamer.config.faults import parse_fault
from gossamer.errors import ConfigurationError
from gossamer.plan.cost.alpha_beta import AlphaBeta, LogGP, server_way_s
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.crossing import crossings, fastest, speeds_over
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.pace import ComputeTime, expected_largest_normal, order_means
from gossamer.plan.cost.queueing import read_from_another_s, response_s
from gossamer.plan.cost.simulated_step import answer_over
from gossamer.plan.cost.step_time import Prediction, predict
from gossamer.plan.cost.workload import Piece, workload_of, workload_of_bytes
from gossamer.tasks import make_task

TASK = make_task("digits-mlp")
few = settings(max_examples=40)
names = st.sampled_from(sorted(FORMS))
sizes = st.floats(1e4, 1e9)
bandwidths = st.floats(1e6, 1e11)
jitters = st.sampled_from([0.0, 0.05, 0.3])


def cluster_of(workers: int, bandwidth: float, jitter: float = 0.0) -> Cluster:
    return Cluster(
        workers=workers, compute=Compute(distribution="normal", jitter=jitter),
        network=Wires(bandwidth=bandwidth, latency=5e-5),
    )  # fmt: skip


@few
@given(names, st.integers(1, 16), bandwidths, sizes, jitters)
@example("backup_workers", 1, 1e6, 1e4, 0.05)
def test_the_parts_of_a_step_are_its_whole_and_none_is_negative(
    method: str, workers: int, bandwidth: float, size: float, jitter: float
) -> None:
    """Computing, waiting, exposed and queueing seconds add up; a step computes at least once."""
    even = 2 * workers
    found = predict(method, cluster_of(even, bandwidth, jitter), workload_of_bytes(size))
    parts = found.parts
    pieces = (parts.compute_s, parts.waiting_s, parts.exposed_s, parts.queueing_s)
    assert all(piece >= -1e-12 for piece in pieces)
    assert math.isclose(sum(pieces) / parts.rate, found.step_seconds)
    assert found.step_seconds >= parts.compute_s * (1 - 1e-9)
    assert math.isclose(found.epoch_seconds, 50_000 / found.samples_per_second)


@few
@given(names, st.sampled_from([2, 4, 8, 16]), bandwidths, sizes, st.floats(1.1, 10.0))
def test_a_faster_network_or_a_smaller_model_never_makes_a_step_longer(
    method: str, workers: int, bandwidth: float, size: float, factor: float
) -> None:
    """Monotone in both."""
    plain = predict(method, cluster_of(workers, bandwidth), workload_of_bytes(size))
    faster = predict(method, cluster_of(workers, bandwidth * factor), workload_of_bytes(size))
    assert faster.step_seconds <= plain.step_seconds * (1 + 1e-6)


def test_sample_values_of_the_survey() -> None:
    """Times of an all-reduce of 32 members at 10 us and 10 Gbit/s, in ms."""
    link = AlphaBeta(10e-6, 0.8e-9)
    for size, tree, butterfly, ring, halving in (
        (1e4, 0.18, 0.09, 0.635, 0.116),
        (1e6, 8.1, 4.05, 2.17, 1.65),
        (1e8, 800, 400, 156, 155),
    ):
        found = [
            1e3 * link.all_reduce_s(algorithm, 32, size)
            for algorithm in ("tree", "butterfly", "ring", "halving_doubling")
        ]
        assert found == pytest.approx([tree, butterfly, ring, halving], rel=0.01)
    assert 1e3 * link.message_s(1e8) == pytest.approx(80, rel=0.01)
    assert 2e3 * link.crowded_s(32, 1e8) == pytest.approx(5120, rel=0.01)


@few
@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 64), st.integers(0, 10**8))
def test_no_all_reduce_beats_its_bounds(algorithm: str, members: int, size: int) -> None:
    """log2 P latencies and 2 B (P-1)/P bytes one after the other; halving and doubling comes within
    log2 P latencies of it for powers of two."""
    link = AlphaBeta(1e-5, 1e-9)

    def bound_s(count: int) -> float:
        return 1e-5 * math.log2(count) + 2 * size * (count - 1) / count * 1e-9

    assert link.all_reduce_s(algorithm, members, size) >= bound_s(members) - 2e-9
    whole = 1 << (members - 1).bit_length()
    rounds = whole.bit_length() - 1
    above = link.all_reduce_s("halving_doubling", whole, size)
    assert above - bound_s(whole) == pytest.approx(rounds * 1e-5, abs=1e-8)


@few
@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(2, 64), st.integers(1, 10**7))
def test_logp_without_overhead_and_gap_is_alpha_beta(
    algorithm: str, members: int, size: int
) -> None:
    """And overheads only ever add."""
    plain, link = LogGP(1e-5, 0.0, 0.0, 1e-9), AlphaBeta(1e-5, 1e-9)
    assert plain.as_link() == link
    assert plain.all_reduce_s(algorithm, members, size) == link.all_reduce_s(
        algorithm, members, size
    )
    assert plain.server_s(members, size) == pytest.approx(2 * link.crowded_s(members, size))
    busy = LogGP(1e-5, 2e-6, 5e-6, 1e-9)
    assert busy.all_reduce_s(algorithm, members, size) > link.all_reduce_s(algorithm, members, size)
    assert busy.burst_s(members, 0) == pytest.approx((members - 1) * 5e-6 + 1.4e-5)


def test_servers_share_their_load_until_the_workers_cards_decide() -> None:
    """q = p B G / S, but never less than B G."""
    link = AlphaBeta(0.0, 1e-9)
    assert server_way_s(link, 1e-9, 8, (1e6,)) == pytest.approx(8e-3)
    assert server_way_s(link, 1e-9, 8, (2.5e5,) * 4) == pytest.approx(2e-3)
    assert server_way_s(link, 1e-9, 8, (1e6 / 32,) * 32) == pytest.approx(1e-3)
    assert server_way_s(link, 1e-9, 8, (1.25e5,) * 8, on_workers=True) == pytest.approx(8.75e-4)


# ---------------------------------------------------------------------- slowest, queues


def test_the_expected_largest_of_normal_numbers() -> None:
    """Tabulated values: 0.5642 of 2, 0.8463 of 3, 1.5388 of 10, 2.5076 of 100."""
    for count, value in ((1, 0.0), (2, 0.56419), (3, 0.84628), (10, 1.53875), (100, 2.50759)):
        assert expected_largest_normal(count) == pytest.approx(value, abs=2e-4)


@settings(max_examples=15)
@given(st.integers(1, 20), st.floats(0.01, 0.5))
def test_known_order_statistics(count: int, jitter: float) -> None:
    """Exponential: harmonic numbers; uniform: equal distances; all sum to so many means."""
    exponential = order_means(Compute(seconds=2.0, distribution="exponential"), count)
    harmonic = sum(1 / k for k in range(1, count + 1))
    assert exponential[-1] == pytest.approx(2.0 * harmonic, rel=5e-3)
    uniform = order_means(Compute(seconds=1.0, distribution="uniform", jitter=jitter), count)
    half = jitter * math.sqrt(3)
    expected = [1 - half + 2 * half * k / (count + 1) for k in range(1, count + 1)]
    assert uniform == pytest.approx(expected, rel=5e-3)
    for distribution in ("normal", "lognormal"):
        compute = Compute(seconds=1.0, distribution=distribution, jitter=jitter)
        means = order_means(compute, count)
        assert sum(means) == pytest.approx(count * order_means(compute, 1)[0], rel=1e-3)
        assert list(means) == sorted(means)


def test_a_pause_that_strikes_at_random_is_waited_for_by_all() -> None:
    """With n workers of which each pauses with chance c, about n c pauses a step, at most one."""
    compute = Compute(distribution="constant", pause_probability=0.02, pause_seconds=0.09)
    expected = compute.seconds + 0.09 * (1 - 0.98**16)
    assert ComputeTime(compute).latest_s(16) == pytest.approx(expected, rel=2e-3)
    assert ComputeTime(compute).mean_s == pytest.approx(0.01 + 0.02 * 0.09)


@few
@given(st.integers(1, 50), st.floats(0.0, 10.0), st.floats(0.01, 5.0))
def test_a_closed_network_keeps_its_bounds(customers: int, think: float, service: float) -> None:
    """A round takes at least what it takes alone and what the busiest station needs for all."""
    for response in (
        response_s(customers, think, [service]), read_from_another_s(customers, think, service),
    ):  # fmt: skip
        if customers > 1:
            assert response >= service * (1 - 1e-9)
    alone = response_s(1, think, [service, service])
    crowd = response_s(customers, think, [service, service])
    assert alone == pytest.approx(2 * service)
    assert crowd + think >= max(alone + think, customers * service) * (1 - 1e-9)
    assert crowd <= 2 * customers * service * (1 + 1e-9)


# ---------------------------------------------------------------------- refusals and crossings


@pytest.mark.parametrize(
    ("method", "cluster", "reason"),
    [
        ("ad_psgd", cluster_of(5, 1e9), "asks and answers at once"),
        ("downpour:warm_start=0.1", cluster_of(4, 1e9), "pace changes"),
        ("downpour:n_push=2,n_fetch=3", cluster_of(4, 1e9), "divides"),
        ("downpour:placement=workers", cluster_of(4, 1e9), "gets ahead"),
        ("d_psgd", load_cluster("gpu-nodes-4x8"), "groups=host"),
        ("d_psgd", load_cluster("infiniband-64"), "racks"),
        ("all_reduce", load_cluster("one-slow-of-8"), "equal workers"),
    ],
)
def test_what_has_no_closed_form_is_refused_with_the_reason(
    method: str, cluster: Cluster, reason: str
) -> None:
    """Rather than answered wrongly."""
    with pytest.raises(NoClosedForm, match=reason):
        predict(method, cluster, workload_of(TASK))


def test_a_refusal_takes_its_place_in_the_row() -> None:
    """Backups must be fewer than the workers; a death is no trait of a step."""
    row = answer_over("sync_server:backups=2", cluster_of(2, 1e9), workload_of(TASK), TASK, [2, 3])
    assert [isinstance(one, NoClosedForm) for one in row.values()] == [True, False]
    mortal = cluster_of(4, 1e9).changed(faults=[parse_fault("kill", "3@1s")])
    row = answer_over("all_reduce", mortal, workload_of(TASK), TASK, [4])
    assert "changes during the run" in str(row[4])


@pytest.mark.parametrize(
    ("method", "workers", "per_machine", "slow", "expected_ms"),
    [
        # Messages inside the only machine are free, so nothing but computing is left.
        ("d_psgd", 2, 2, (), 10.0),
        ("downpour", 2, 2, (), 10.0),
        # Everybody asks and answers; averaging hides behind the next gradient.
        ("ad_psgd", 3, 1, (), 10.0),
        # Who waits for everybody, or for neighbours, goes at the pace of the slowest.
        ("all_reduce:overlap=false", 4, 1, ("0=4",), 40.6),
        ("local_sgd:period=4", 4, 1, ("0=4",), 40.15),
        ("d_psgd", 8, 1, ("0=4",), 40.0),
        # Three at 10 ms and one at 40 ms: 325 gradients a second, 12.31 ms for each of four.
        ("ensemble", 4, 1, ("0=4",), 12.31),
    ],
)
def test_what_has_no_closed_form_is_simulated(
    method: str, workers: int, per_machine: int, slow: tuple[str, ...], expected_ms: float
) -> None:
    """Workers that share a machine, odd graphs and slow workers get a time, not a dash."""
    cluster = dataclasses.replace(
        cluster_of(workers, 1e12), workers_per_machine=per_machine,
        faults=tuple(parse_fault("slow", text) for text in slow),
    )  # fmt: skip
    one = answer_over(method, cluster, workload_of(TASK), TASK, [workers])[workers]
    assert isinstance(one, Prediction)
    assert one.simulated_because
    assert 1e3 * one.step_seconds == pytest.approx(expected_ms, rel=0.03)
    assert one.as_dict()["simulated_because"] == one.simulated_because


def test_models_that_pile_up_are_told_of() -> None:
    """Push-gossip never waits, but a card that cannot keep up holds ever more messages."""
    slow = predict("push_gossip", cluster_of(4, 1e6), workload_of_bytes(1e6))
    assert slow.step_seconds == pytest.approx(0.01)
    assert "pile up" in slow.notes[0]
    assert not predict("push_gossip", cluster_of(4, 1e9), workload_of_bytes(1e6)).notes


@pytest.mark.parametrize("axis", ["workers", "bandwidth", "model_bytes"])
def test_at_a_crossing_the_order_changes(axis: str) -> None:
    """Just before it the one is faster, at it the other."""
    # Over few bytes the ring's latencies decide, over many the server's card.
    cluster, workload = cluster_of(16, 1e10), workload_of_bytes(1e5)
    grid = {
        "workers": [2, 8, 64], "bandwidth": [1e7, 1e8, 1e11], "model_bytes": [1e4, 1e6, 1e9],
    }[axis]  # fmt: skip
    methods = ["all_reduce", "sync_server"]
    found = crossings(axis, methods, grid, cluster, workload)
    assert found
    speed = speeds_over(axis, cluster, workload)
    for one in found:
        before = one.value - 1 if axis == "workers" else one.value * 0.99
        after = one.value if axis == "workers" else one.value * 1.01
        assert speed(one.faster, before) <= speed(one.slower, before) * 1.002  # type: ignore[operator]
        assert speed(one.faster, after) > speed(one.slower, after)  # type: ignore[operator]
        assert f"{one.faster} overtakes {one.slower}" in str(one)


def test_equal_methods_do_not_overtake_each_other_and_share_the_lead() -> None:
    """Local SGD and DiLoCo move the same bytes."""
    cluster, workload = cluster_of(4, 1e8), workload_of_bytes(1e6)
    methods = ["local_sgd", "diloco", "all_reduce"]
    found = crossings("workers", methods, [2, 4, 8, 16], cluster, workload)
    assert not [one for one in found if "all_reduce" not in (one.faster, one.slower)]
    assert fastest("workers", methods, [4], cluster, workload)[4] == ["local_sgd", "diloco"]


def test_bytes_alone_are_cut_into_pieces_that_add_up() -> None:
    """Equal layers: a piece is ready when its share of the bytes has been passed."""
    for size in (5e5, 3e6, 1e8):
        pieces = workload_of_bytes(size).pieces
        assert sum(one.count * one.size_bytes for one in pieces) == pytest.approx(size)
        assert pieces[-1].ready_share == 1.0
    assert sum(workload_of(TASK, model_bytes=4e6).shares(3)) == pytest.approx(1.0)
    with pytest.raises(ConfigurationError, match="model bytes"):
        workload_of_bytes(0)


@few
@given(st.floats(1e6, 3e9), bandwidths, st.integers(2, 64), st.floats(1e-4, 10.0))
def test_equal_pieces_are_reduced_as_if_one_by_one(
    size: float, bandwidth: float, workers: int, seconds: float
) -> None:
    """A model of a terabyte has as many terms as one of a hundred megabytes."""
    whole = workload_of_bytes(size)
    apart = [
        Piece(one.size_bytes, share, share)
        for one in whole.pieces
        for at in range(round(one.count))
        for share in [
            one.ready_share + at * (one.last_share - one.ready_share) / max(1, one.count - 1)
        ]
    ]
    cluster = Cluster(
        workers=workers, compute=Compute(seconds=seconds), network=Wires(bandwidth=bandwidth)
    )
    one_by_one = dataclasses.replace(whole, pieces=tuple(apart))
    found, expected = (predict("all_reduce", cluster, what) for what in (whole, one_by_one))
    assert len(whole.pieces) <= 3
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=1e-9)


def test_groups_compute_as_slowly_as_their_slowest_member() -> None:
    """The extra of a group: the point goes in, the mean comes out."""
    cluster = cluster_of(8, 1e9, 0.1)
    grouped = predict("downpour:groups=2", cluster, workload_of_bytes(1e6))
    assert grouped.parts.compute_s > ComputeTime(cluster.compute).latest_s(4)
    constant = dataclasses.replace(cluster, compute=Compute(distribution="constant"))
    less = predict("downpour:groups=2", constant, workload_of_bytes(1e6))
    assert less.parts.compute_s < grouped.parts.compute_s
