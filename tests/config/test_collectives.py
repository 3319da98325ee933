"""The cost of collectives: sample values, closed forms, orderings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.collective_costs import (
    COLLECTIVES,
    all_gather_seconds,
    all_reduce_bytes,
    all_reduce_seconds,
    broadcast_seconds,
)
from gossamer.errors import ConfigurationError

LATENCY_S = 10e-6
SECONDS_PER_BYTE = 0.8e-9  # 10 Gbit/s

members = st.integers(1, 300)
sizes = st.integers(0, 10**9)
latencies = st.floats(0, 1e-2)
rates = st.floats(1e-12, 1e-6)


def milliseconds(algorithm: str, size_bytes: int) -> float:
    return 1e3 * all_reduce_seconds(algorithm, 32, size_bytes, LATENCY_S, SECONDS_PER_BYTE)


@pytest.mark.parametrize(
    ("algorithm", "size_bytes", "expected_ms"),
    [
        ("tree", 10**4, 0.18),
        ("butterfly", 10**4, 0.09),
        ("ring", 10**4, 0.635),
        ("halving_doubling", 10**4, 0.116),
        ("tree", 10**6, 8.1),
        ("butterfly", 10**6, 4.05),
        ("ring", 10**6, 2.17),
        ("halving_doubling", 10**6, 1.65),
        ("tree", 10**8, 800),
        ("butterfly", 10**8, 400),
        ("ring", 10**8, 156),
        ("halving_doubling", 10**8, 155),
    ],
)
def test_thirty_two_members_on_ten_gigabit_take_the_known_times(algorithm, size_bytes, expected_ms):
    """Values worked out by hand for P = 32, L = 10 us, G = 0.8 ns/B, to their three digits."""
    assert milliseconds(algorithm, size_bytes) == pytest.approx(expected_ms, rel=0.005)


@given(exponent=st.integers(0, 10), size=sizes, latency=latencies, rate=rates)
def test_powers_of_two_cost_the_textbook_forms(exponent, size, latency, rate):
    """For P = 2^k the four algorithms and their halves have the closed forms of the literature."""
    p = 2**exponent
    expected = {
        "ring": 2 * (p - 1) * (latency + size / p * rate),
        "tree": 2 * exponent * (latency + size * rate),
        "butterfly": exponent * (latency + size * rate),
        "halving_doubling": 2 * latency * exponent + 2 * size * rate * (p - 1) / p,
    }
    for algorithm, seconds in expected.items():
        assert all_reduce_seconds(algorithm, p, size, latency, rate) == pytest.approx(seconds)
    half = (p - 1) * (latency + size / p * rate)
    assert all_gather_seconds(p, size, latency, rate) == pytest.approx(half)
    assert broadcast_seconds(p, size, latency, rate) == pytest.approx(
        exponent * (latency + size * rate)
    )


@given(count=members, size=sizes, latency=latencies, rate=rates)
def test_members_beyond_a_power_of_two_cost_one_exchange_before_and_after(
    count, size, latency, rate
):
    """T(P) = T(2^floor(log2 P)) + 2 (L + B G), unless P is a power of two."""
    core = 2 ** int(math.log2(count))
    extra = 0 if core == count else 2 * (latency + size * rate)
    for algorithm in ("butterfly", "halving_doubling"):
        base = all_reduce_seconds(algorithm, core, size, latency, rate)
        seconds = all_reduce_seconds(algorithm, count, size, latency, rate)
        assert seconds == pytest.approx(base + extra)


@pytest.mark.parametrize("algorithm", COLLECTIVES)
def test_one_member_alone_pays_nothing(algorithm):
    """P = 1: no message is sent."""
    assert all_reduce_seconds(algorithm, 1, 10**9, 1.0, 1.0) == 0
    assert all_reduce_bytes(algorithm, 1, 10**9) == 0
    assert broadcast_seconds(1, 10**9, 1.0, 1.0) == 0
    assert all_gather_seconds(1, 10**9, 1.0, 1.0) == 0


@given(exponent=st.integers(3, 10))
def test_butterfly_wins_for_small_vectors_and_ring_for_large_ones(exponent):
    """butterfly < ring as B -> 0 and ring < butterfly as B -> infinity (P >= 8)."""

    def seconds(algorithm: str, size: int) -> float:
        return all_reduce_seconds(algorithm, 2**exponent, size, LATENCY_S, SECONDS_PER_BYTE)

    assert seconds("butterfly", 100) < seconds("ring", 100)
    assert seconds("ring", 10**10) < seconds("butterfly", 10**10)


@given(exponent=st.integers(1, 10), size=sizes, latency=latencies, rate=rates)
def test_halving_doubling_is_within_a_factor_two_of_both_lower_bounds(
    exponent, size, latency, rate
):
    """max(L log2 P, 2BG(P-1)/P) <= T <= 2 L log2 P + 2 B G, and never above ring or tree."""
    p = 2**exponent
    seconds = all_reduce_seconds("halving_doubling", p, size, latency, rate)
    rounding = 1 + 1e-12
    assert max(latency * exponent, 2 * size * rate * (p - 1) / p) <= seconds * rounding
    assert seconds <= (2 * latency * exponent + 2 * size * rate) * rounding
    assert seconds <= all_reduce_seconds("ring", p, size, latency, rate) * rounding
    assert seconds <= all_reduce_seconds("tree", p, size, latency, rate) * rounding


@given(count=members, size=sizes)
def test_every_algorithm_but_butterfly_carries_two_vectors_fewer_than_twice_the_members(
    count, size
):
    """Summed over members 2(P-1)B bytes, rounded up per member; no algorithm carries fewer."""
    for algorithm in ("ring", "tree", "halving_doubling"):
        total = all_reduce_bytes(algorithm, count, size) * count
        assert 2 * (count - 1) * size <= total < 2 * (count - 1) * size + count
    assert all_reduce_bytes("butterfly", count, size) >= all_reduce_bytes("ring", count, size)


@pytest.mark.parametrize(
    ("count", "vectors"), [(2, 1), (4, 2), (8, 3), (1024, 10), (3, (2 + 2) / 3), (6, (8 + 4) / 6)]
)
def test_butterfly_members_send_the_whole_vector_at_every_step(count, vectors):
    """log2 P vectors each; beyond a power of two one vector in and one out, averaged over all."""
    assert all_reduce_bytes("butterfly", count, 3_000_000) == round(vectors * 3_000_000)


def test_an_unknown_algorithm_is_refused_with_the_nearest_name():
    """One sentence that offers the right name, from both functions that take one."""
    with pytest.raises(ConfigurationError, match="did you mean 'butterfly'"):
        all_reduce_seconds("buterfly", 4, 1, 0.0, 0.0)
    with pytest.raises(ConfigurationError, match="did you mean 'ring'"):
        all_reduce_bytes("rings", 4, 1)


@pytest.mark.parametrize(("count", "size"), [(0, 1), (-2, 1), (4, -1)])
def test_impossible_members_and_sizes_are_refused(count, size):
    """At least one member and zero bytes."""
    with pytest.raises(ConfigurationError, match="give 1 member or more"):
        all_reduce_seconds("ring", count, size, 0.0, 0.0)
    with pytest.raises(ConfigurationError, match="give 1 member or more"):
        broadcast_seconds(count, size, 0.0, 0.0)
