"""Laws of the topologies: doubly stochastic, connected, and mixing as fast as they predict."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.topology import TOPOLOGIES, Topology, make_topology
from tiers import every

EVEN_ONLY = {"bipartite_ring", "bipartite_exponential", "one_peer_bipartite"}
DIRECTED = {"exponential", "one_peer_exponential"}
DEGREES = [f"random_regular:degree={degree}" for degree in (2, 6, 8)]
INNER = ["complete", "star", "random_regular:degree=6"]
SPECS = [*TOPOLOGIES, *DEGREES, *(f"matchings:graph={graph}" for graph in INNER)]

few_examples = settings(max_examples=50)
specs = st.sampled_from(SPECS)
counts = st.integers(1, 17)


def made(spec: str, n: int, seed: int = 0) -> Topology:
    """A topology of about n workers: one more where n is refused."""
    try:
        return make_topology(spec, n, seed=seed)
    except ConfigurationError:
        return make_topology(spec, n + 1, seed=seed)


def product_over_a_period(topology: Topology) -> np.ndarray:
    product = np.eye(len(topology.members))
    for step in range(topology.period):
        product = topology.matrix(step) @ product
    return product


def assert_sound(topology: Topology) -> None:
    """Doubly stochastic in every round, and everyone is reached by the links of all rounds."""
    reached, size = {topology.members[0]}, 0
    while len(reached) > size:
        size = len(reached)
        for step in range(topology.period):
            reached |= {peer for rank in reached for peer in topology.out_neighbours(rank, step)}
    assert reached == set(topology.members)
    for step in range(topology.period):
        w = topology.matrix(step)
        assert (w >= 0).all()
        np.testing.assert_allclose([w.sum(axis=0), w.sum(axis=1)], 1.0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
@given(counts, st.integers(0, 5))
@few_examples
def test_every_topology_is_doubly_stochastic_and_connected_over_a_period(spec, n, seed):
    """Rows and columns of W sum to 1, so mixing keeps the mean and ends in consensus."""
    topology = made(spec, n, seed)
    assert_sound(topology)
    assert topology.mixing_rate() < 1 - 1e-6


@given(specs, counts, st.integers(-20, 20))
@few_examples
def test_links_weights_and_matrix_tell_the_same_story(spec, n, step):
    """j hears from i iff i sends to j; weights cover exactly those, in rank order, and repeat."""
    topology = made(spec, n)
    w = topology.matrix(step)
    for i, rank in enumerate(topology.members):
        heard, sent = topology.in_neighbours(rank, step), topology.out_neighbours(rank, step)
        weights = topology.weights(rank, step)
        assert rank not in heard
        assert list(weights) == sorted({*heard, rank})
        assert [w[i, topology.members.index(peer)] for peer in weights] == list(weights.values())
        assert np.count_nonzero(w[i]) == len(weights)
        assert topology.neighbours(rank, step) == tuple(sorted({*heard, *sent}))
        assert all(rank in topology.in_neighbours(peer, step) for peer in sent)
        assert sent == topology.out_neighbours(rank, step + topology.period)
    assert topology.is_directed or (w == w.T).all()


@given(specs, st.integers(2, 9), st.lists(st.integers(0, 99), min_size=18, unique=True))
@few_examples
def test_positions_of_the_sorted_ranks_define_the_graph(spec, n, ranks):
    """Ranks with gaps, in any order, give the graph of 0..n-1 with its numbers exchanged."""
    dense = made(spec, n)
    gapped = make_topology(spec, ranks[: len(dense.members)])
    assert gapped.members == tuple(sorted(ranks[: len(dense.members)]))
    np.testing.assert_array_equal(gapped.matrix(1), dense.matrix(1))
    name_of = dict(zip(dense.members, gapped.members, strict=True))
    for rank in dense.members:
        there = tuple(name_of[peer] for peer in dense.out_neighbours(rank, 1))
        assert gapped.out_neighbours(name_of[rank], 1) == there


@pytest.mark.parametrize("spec", SPECS)
def test_one_worker_is_alone_and_two_share_an_edge(spec):
    """n = 1: all weight on itself, nothing left to mix; n = 2: one edge, weights 1/2, exact."""
    one, two = make_topology(spec, [7]), make_topology(spec, [3, 9])
    assert one.neighbours(7) == ()
    assert one.weights(7) == {7: 1.0}
    assert (one.period, one.mixing_rate(), one.spectral_gap()) == (1, 0.0, 1.0)
    assert two.out_neighbours(3) == two.in_neighbours(3) == (9,)
    assert two.weights(9) == {3: 0.5, 9: 0.5}
    assert two.mixing_rate() == 0.0
    if spec not in DIRECTED:
        assert one.pair_rate() == 0.0
        assert two.pair_rate() == pytest.approx(0.0, abs=1e-12)


@given(st.sampled_from(sorted(DIRECTED | {"complete", "ring", "torus", "random_regular"})), counts)
@few_examples
def test_regular_graphs_weigh_everyone_equally(spec, n):
    """With equal degrees every share is 1/(degree + 1), the worker's own included."""
    topology = made(spec, n)
    for rank in topology.members:
        shares = topology.weights(rank)
        assert all(share == pytest.approx(1 / len(shares)) for share in shares.values())


def test_irregular_graphs_use_metropolis_hastings_weights():
    """A link weighs 1/(1 + larger degree) and the worker keeps the rest."""
    star = make_topology("star", 5)
    assert star.weights(0) == pytest.approx(dict.fromkeys(range(5), 0.2))
    assert star.weights(3) == pytest.approx({0: 0.2, 3: 0.8})
    assert make_topology("grid", 9).weights(0) == pytest.approx({0: 0.5, 1: 0.25, 3: 0.25})


def test_torus_and_grid_are_as_square_as_the_count_allows():
    """12 is 3 x 4; a prime is one row, where deaths make it one: a ring, and of the grid a path."""
    assert make_topology("torus", 12).neighbours(0) == (1, 3, 4, 8)
    assert make_topology("grid", 12).neighbours(0) == (1, 4)
    assert make_topology("grid", 12).neighbours(5) == (1, 4, 6, 9)
    assert make_topology("torus", 8).restricted(range(7)).neighbours(6) == (0, 5)
    assert make_topology("grid", 8).restricted(range(7)).neighbours(6) == (5,)


@pytest.mark.parametrize("n", range(2, 65, 2))
def test_static_exponential_gap_is_exact_for_even_counts(n):
    """The spectral gap is 2 / (1 + ceil(log2 n)) for even n."""
    gap = make_topology("exponential", n).spectral_gap()
    assert gap == pytest.approx(2 / (1 + math.ceil(math.log2(n))), abs=1e-9)


@pytest.mark.parametrize("n", range(2, 34))
def test_one_peer_exponential_is_exact_iff_a_power_of_two(n):
    """The product over floor(log2(n-1)) + 1 rounds is the average exactly when n = 2^k."""
    topology = make_topology("one_peer_exponential", n)
    assert topology.period == math.floor(math.log2(n - 1)) + 1
    hops = [topology.out_neighbours(0, k) for k in range(topology.period)]
    assert hops == [(2**k,) for k in range(topology.period)]
    is_power = n & (n - 1) == 0
    assert (topology.mixing_rate() == 0.0) == is_power
    assert np.allclose(product_over_a_period(topology), 1 / n, atol=1e-12) == is_power


@pytest.mark.parametrize(("n", "gap"), [(8, 0.1953), (16, 0.0508), (32, 0.0128)])
def test_ring_gap_has_its_known_values(n, gap):
    """With weights 1/3 the gap is (2/3)(1 - cos(2 pi / n)); the lowest eigenvalue is -1/3."""
    ring = make_topology("ring", n)
    assert ring.spectral_gap() == pytest.approx(gap, abs=6e-5)
    assert ring.spectral_gap() == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / n)))
    assert np.linalg.eigvalsh(ring.matrix())[0] == pytest.approx(-1 / 3)


@pytest.mark.parametrize(("spec", "n"), every(4, list(SPECS), [5, 8, 12, 16]))
def test_random_values_mix_at_the_predicted_rate(spec, n):
    """Over many rounds the disagreement falls by `mixing_rate` a round; 0.0: gone in a period."""
    topology = made(spec, n)
    matrices = [topology.matrix(step) for step in range(topology.period)]
    apart = np.random.default_rng(n).normal(size=(len(topology.members), 3))
    logarithm, periods = 0.0, math.ceil(300 / topology.period)
    for period in range(periods):
        apart -= apart.mean(axis=0)  # its rounding, which no round makes smaller
        apart /= np.linalg.norm(apart)
        for matrix in matrices:
            apart = matrix @ apart
        left = np.linalg.norm(apart)
        np.testing.assert_allclose(apart.mean(axis=0), 0.0, atol=1e-12)
        if topology.mixing_rate() == 0.0:
            assert left < 1e-12
            return
        logarithm += math.log(left) if period >= periods // 3 else 0.0  # once the slowest leads
    logarithm /= (periods - periods // 3) * topology.period
    assert math.exp(logarithm) == pytest.approx(topology.mixing_rate(), rel=0.01)


@pytest.mark.parametrize("n", [8, 12, 32])
def test_alternating_pairs_on_an_even_ring_mix_by_a_cosine(n):
    assert make_topology("matchings", n).mixing_rate() == pytest.approx(math.cos(2 * math.pi / n))


@pytest.mark.parametrize("n", range(3, 14))
def test_pair_rate_has_its_closed_forms(n):
    """Ring 1 - (1 - cos(2 pi / n)) / n, which is 0.9634 for 8; complete 1 - 1/(n-1)."""
    assert make_topology("complete", n).pair_rate() == pytest.approx(1 - 1 / (n - 1), abs=1e-12)
    ring = make_topology("ring", n).pair_rate()
    assert ring == pytest.approx(1 - (1 - math.cos(2 * math.pi / n)) / n)
    assert n != 8 or ring == pytest.approx(0.9634, abs=5e-5)


def test_pair_rate_of_a_schedule_is_that_of_all_its_edges():
    """Cutting a graph into matchings does not change which edges there are."""
    for spec in ("ring", "torus", "star"):
        schedule = make_topology(f"matchings:graph={spec}", 12)
        assert schedule.pair_rate() == pytest.approx(make_topology(spec, 12).pair_rate())


@pytest.mark.parametrize(("spec", "steps"), [("complete", 20), ("ring", 60)])
def test_simulated_pair_averages_decay_at_pair_rate(spec, steps):
    """E||disagreement||^2 falls by rho per average: on a ring at least so, on complete exactly."""
    topology = make_topology(spec, 8)
    generator = np.random.default_rng(0)
    edges = [(i, j) for i in topology.members for j in topology.neighbours(i) if i < j]
    slowest = np.cos(2 * np.pi * np.arange(8) / 8)
    x = np.tile(slowest, (4000, 1))
    runs, decay = np.arange(len(x)), []
    for _ in range(steps):
        i, j = np.array(edges)[generator.integers(len(edges), size=len(x))].T
        x[runs, i] = x[runs, j] = (x[runs, i] + x[runs, j]) / 2
        decay.append(float((x**2).sum(axis=1).mean() / (slowest**2).sum()))
    rho = topology.pair_rate()
    assert decay[0] == pytest.approx(rho, rel=0.01)
    assert decay[-1] <= rho**steps * 1.05
    if spec == "complete":
        assert decay[-1] == pytest.approx(rho**steps, rel=0.05)


@given(st.sampled_from(sorted(EVEN_ONLY)), st.integers(1, 20), st.data())
@few_examples
def test_bipartite_links_only_join_odd_and_even_positions(spec, half, data):
    """Active workers face passive ones only, so no circle of waiting initiators can close."""
    whole = make_topology(spec, 2 * half)
    live = data.draw(st.sets(st.sampled_from(whole.members), min_size=1))
    for topology in (whole, whole.restricted(live)):
        odd, even = frozenset(topology.members[1::2]), frozenset(topology.members[::2])
        assert topology.sides == (odd, even)
        for step in range(topology.period):
            for rank in topology.members:
                assert (even if rank in odd else odd).issuperset(topology.neighbours(rank, step))


@given(specs, counts)
@few_examples
def test_sides_exist_exactly_when_there_is_no_odd_circle(spec, n):
    """A graph splits in two iff -max is also an eigenvalue of its adjacency matrix."""
    topology = made(spec, n)
    adjacency = sum(topology.matrix(step) for step in range(topology.period))
    adjacency = ((adjacency + adjacency.T) > 0) & ~np.eye(len(topology.members), dtype=bool)
    eigenvalues = np.linalg.eigvalsh(adjacency.astype(float))
    assert (topology.sides is not None) == bool(np.isclose(-eigenvalues[0], eigenvalues[-1]))


def test_bipartite_exponential_takes_the_odd_distances():
    """1, 3, 5, 9 and 17 ahead and back, as in the AD-PSGD multi-hop graph."""
    ahead = {1, 3, 5, 9, 17, 33}
    expected = sorted(ahead | {64 - distance for distance in ahead})
    assert make_topology("bipartite_exponential", 64).neighbours(0) == tuple(expected)
    schedule = make_topology("one_peer_bipartite", 64)
    assert [schedule.neighbours(1, step) for step in range(4)] == [(2,), (0,), (4,), (62,)]
    assert schedule.period == len(expected)


@given(st.sampled_from(["ring", "star", "complete", "grid", "random_regular", None]), counts)
@few_examples
def test_one_peer_schedules_pair_everyone_with_at_most_one(graph, n):
    """Rounds are matchings with weights 1/2-1/2 and together use every edge of a graph once."""
    schedule = made(f"matchings:graph={graph}" if graph else "one_peer_bipartite", n)
    whole = make_topology(graph or "bipartite_exponential", schedule.members)
    for rank in schedule.members:
        partners = [schedule.neighbours(rank, step) for step in range(schedule.period)]
        assert sorted(peer for pair in partners for peer in pair) == list(whole.neighbours(rank))
        for step, pair in enumerate(partners):
            expected = {rank: 0.5, pair[0]: 0.5} if pair else {rank: 1.0}
            assert schedule.weights(rank, step) == expected


@pytest.mark.parametrize("n", [4, 8, 16])
def test_matchings_of_the_complete_graph_are_exact_for_powers_of_two(n):
    """Greedy colours in order pair p with p xor c, which is the hypercube: exact, n - 1 rounds."""
    schedule = make_topology("matchings:graph=complete", n)
    assert schedule.period == n - 1
    assert schedule.mixing_rate() == 0.0


@given(st.integers(3, 40), st.integers(2, 12), st.integers(0, 99))
@few_examples
def test_random_regular_is_regular_and_given_by_its_seed(n, degree, seed):
    """Every worker has `degree` neighbours (or all others); equal seeds give equal graphs."""
    n += n * min(degree, n - 1) % 2
    topology = make_topology(f"random_regular:degree={degree}", n, seed=seed)
    assert {len(topology.neighbours(rank)) for rank in range(n)} == {min(degree, n - 1)}
    shifted = make_topology(f"random_regular:degree={degree}", range(1, n + 1), seed=seed)
    np.testing.assert_array_equal(shifted.matrix(), topology.matrix())


def test_random_regular_differs_by_seed_and_mixes_like_an_expander():
    """Seeds matter, and 64 workers of degree 4 come near 2 sqrt(3) as second eigenvalue."""
    graphs = [make_topology("random_regular", 64, seed=seed) for seed in range(5)]
    assert len({tuple(graph.neighbours(rank) for rank in range(64)) for graph in graphs}) == 5
    for graph in graphs:
        assert graph.mixing_rate() < (1 + 2 * math.sqrt(3)) / 5 + 0.04


@given(st.sampled_from([*SPECS, "random_regular:degree=3"]), st.integers(1, 8), st.data())
@few_examples
def test_training_goes_on_with_whoever_is_alive(spec, half, data):
    """After any deaths the recipe still gives a connected, doubly stochastic topology."""
    whole = make_topology(spec, 2 * half, seed=3)
    live = data.draw(st.sets(st.sampled_from(whole.members), min_size=1))
    left = whole.restricted(live)
    assert left.members == tuple(sorted(live))
    assert (left.name, left.options, left.seed) == (whole.name, whole.options, whole.seed)
    assert_sound(left)
    assert left.restricted(whole.members) == whole


def test_an_odd_rest_gets_the_nearest_graph_that_exists():
    """A bipartite ring loses its wrap-around link only; an odd degree becomes the next even one."""
    path = make_topology("bipartite_ring", 6).restricted({0, 1, 3, 4, 5})
    assert [path.neighbours(rank) for rank in path.members] == [(1,), (0, 3), (1, 4), (3, 5), (4,)]
    regular = make_topology("random_regular:degree=3", 10).restricted(range(9))
    assert {len(regular.neighbours(rank)) for rank in regular.members} == {4}


@pytest.mark.parametrize("spec", SPECS)
def test_topologies_travel_as_their_recipe(spec):
    """A pickled topology is small and comes back equal; another seed makes another one."""
    topology = make_topology(spec, 64, seed=5)
    assert pickle.loads(pickle.dumps(topology)) == topology != make_topology(spec, 64, seed=6)
    assert len(pickle.dumps(topology)) < 1000


def test_a_spec_with_its_default_written_out_is_the_same_topology():
    """Defaults belong to the recipe, so leaving one out changes nothing."""
    assert make_topology("random_regular", 9) == make_topology("random_regular:degree=4", 9)
    assert make_topology("matchings", 9) == make_topology("matchings:graph=ring", 9)


@pytest.mark.parametrize("spec", TOPOLOGIES)
def test_asking_about_one_worker_builds_no_matrix(spec, monkeypatch):
    """Links and weights of one worker among 1024 come without n x n work."""
    monkeypatch.setattr(np, "zeros", None)
    topology = make_topology(spec, 1024)
    shares = topology.weights(511, 3)
    assert set(shares) == {511, *topology.in_neighbours(511, 3)}
    assert math.fsum(shares.values()) == pytest.approx(1.0)


REFUSALS = """
rnig 4
    unknown topology 'rnig'; did you mean 'ring'?
ring:degree=4 4
    topology ring has no option 'degree=4'; write ring
random_regular:degre=3 8
    topology random_regular has no option 'degre=3'; write random_regular:degree=4
random_regular:degree=1 8
    random_regular needs a degree from 2 on, got '1'; try degree=4
random_regular:degree=three 8
    random_regular needs a degree from 2 on, got 'three'; try degree=4
random_regular:degree=3 7
    random_regular:degree=3 needs an even number of workers, got 7; use 6 or 8, or degree=4
bipartite_ring 5
    bipartite_ring needs an even number of workers, got 5; use 4 or 6, or topology=star
matchings:graph=bipartite_exponential 3
    bipartite_exponential needs an even number of workers, got 3; use 2 or 4, or topology=star
torus 7
    torus needs full rows of workers, got 7; use 6 or 8, or topology=ring
matchings:graph=exponential 8
    matchings needs a static graph with links both ways, got exponential; try torus
matchings:graph=tours 8
    unknown topology 'tours'; did you mean 'torus'?
ring 0
    a topology needs distinct ranks from 0 on, got []; name each worker once
"""


@pytest.mark.parametrize("refusal", REFUSALS.strip().replace("\n    ", " ").split("\n"))
def test_bad_input_is_refused_with_a_sentence_that_helps(refusal):
    """What failed, what was got, what to do."""
    spec, workers, sentence = refusal.split(" ", maxsplit=2)
    with pytest.raises(ConfigurationError) as refused:
        make_topology(spec, int(workers))
    assert str(refused.value) == sentence


def test_questions_that_have_no_answer_are_refused():
    """A stranger has no neighbours here, and one-way links have no pair averages."""
    ring = make_topology("ring", [0, 2, 4])
    for ask in (ring.neighbours, ring.weights):
        with pytest.raises(ConfigurationError, match="worker 3 is not in this ring of 3 workers"):
            ask(3)
    with pytest.raises(ConfigurationError, match="got one_peer_exponential; try ring"):
        make_topology("one_peer_exponential", 8).pair_rate()
    with pytest.raises(ConfigurationError, match="distinct ranks"):
        ring.restricted([])
