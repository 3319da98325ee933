"""Shared network cards: worked examples, the number of events, and bad input."""

from __future__ import annotations

from unittest import mock

import pytest
from heap_clock import HeapClock
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.sim import network as network_module
from gossamer.sim.fair_share import Lane, Port, fair_rates
from gossamer.sim.network import Network

TEN_GIGABIT = 1.25


def nothing() -> None:
    pass


@given(senders=st.integers(1, 40), size=st.integers(1, 10**7))
@settings(max_examples=30)
def test_a_server_with_k_senders_takes_k_times_as_long(senders, size):
    """k equal transfers into one card all end at k B / bandwidth."""
    clock = HeapClock()
    network = Network(clock, [TEN_GIGABIT] * (senders + 1), [TEN_GIGABIT] * (senders + 1))
    ends: list[int] = []
    for sender in range(1, senders + 1):
        network.start(sender, 0, size, lambda: ends.append(clock.now))
    clock.run()
    assert ends == [pytest.approx(senders * size / TEN_GIGABIT, abs=1)] * senders
    assert network.bytes_received[0] == senders * size


def test_opposite_flows_do_not_slow_each_other():
    """Full duplex: A to B and B to A take as long as one of them alone."""
    clock = HeapClock()
    network = Network(clock, [TEN_GIGABIT] * 2, [TEN_GIGABIT] * 2)
    ends: list[int] = []
    network.start(0, 1, 1_000_000, lambda: ends.append(clock.now))
    network.start(1, 0, 1_000_000, lambda: ends.append(clock.now))
    clock.run()
    assert ends == [800_000, 800_000]


def test_a_slow_sender_leaves_its_share_to_the_others():
    """Into a card of 8: a sender of 1 gets 1, two senders of 8 get 3.5 each."""
    clock = HeapClock()
    network = Network(clock, [8.0, 1.0, 8.0, 8.0], [8.0] * 4)
    flows = [network.start(sender, 0, 7_000, nothing) for sender in (1, 2, 3)]
    clock.run(until_ns=0)
    assert [flow.lane.rate for flow in flows] == [1.0, 3.5, 3.5]


def test_a_link_that_becomes_slow_slows_the_rest_of_its_flow():
    """Half at 2 bytes/ns and half at 0.5 take 250 + 1,000 ns."""
    clock = HeapClock()
    network = Network(clock, [2.0, 2.0], [2.0, 2.0])
    ends: list[int] = []
    network.start(0, 1, 1_000, lambda: ends.append(clock.now))
    clock.at(250, lambda: network.set_capacity(1, egress=2.0, ingress=0.5))
    clock.run()
    assert ends == [1250]


def test_ends_are_rounded_up_to_a_nanosecond():
    """1 byte at 1.25 bytes/ns takes 0.8 ns and ends at 1."""
    clock = HeapClock()
    network = Network(clock, [TEN_GIGABIT] * 2, [TEN_GIGABIT] * 2)
    ends: list[int] = []
    network.start(0, 1, 1, lambda: ends.append(clock.now))
    network.start(1, 0, 10, lambda: ends.append(clock.now))
    clock.run()
    assert ends == [1, 8]


def test_an_empty_transfer_ends_at_once_but_not_inside_start():
    """Size 0 calls back through the clock, in the same instant; aborted before, it does not."""
    clock = HeapClock()
    network = Network(clock, [1.0], [1.0])
    ends: list[str] = []
    network.start(0, 0, 0, lambda: ends.append("first"))
    network.abort(network.start(0, 0, 0, lambda: ends.append("second")))
    assert ends == []
    clock.run()
    assert ends == ["first"]
    assert clock.now == 0


def test_an_aborted_flow_counts_what_it_sent_and_frees_its_share():
    """Two flows of 1,000 at half of 1 byte/ns; one dies at 400: the other ends at 1,200."""
    clock = HeapClock()
    network = Network(clock, [1.0] * 3, [1.0] * 3)
    ends: list[int] = []
    network.start(1, 0, 1_000, lambda: ends.append(clock.now))
    doomed = network.start(2, 0, 1_000, lambda: ends.append(-1))
    clock.at(400, network.abort, doomed)
    clock.at(500, network.abort, doomed)
    clock.run()
    assert ends == [1_200]
    assert network.bytes_sent == [0, 1_000, 200]
    assert network.bytes_received == [1_200, 0, 0]


def test_an_abort_in_the_nanosecond_of_the_end_counts_no_more_than_the_size():
    """1 byte at 8 bytes/ns has long passed when it is aborted at 1 ns."""
    clock = HeapClock()
    network = Network(clock, [8.0], [8.0])
    flows = []
    clock.at(1, lambda: network.abort(flows[0]))
    flows.append(network.start(0, 0, 1, nothing))
    clock.run()
    assert network.bytes_sent == network.bytes_received == [1]


def test_a_callback_may_abort_a_flow_that_ends_with_its_own():
    """Whoever is told first may end the others of that instant; their bytes have passed."""
    clock = HeapClock()
    network = Network(clock, [1.0] * 3, [1.0] * 3)
    told: list[int] = []
    flows = []

    def done(index: int) -> None:
        told.append(index)
        network.abort(flows[1 - index])

    flows += [network.start(sender, 0, 500, lambda i=sender - 1: done(i)) for sender in (1, 2)]
    clock.run()
    assert told == [0]
    assert network.bytes_received[0] == 1_000


def test_a_card_held_back_by_its_partners_is_divided_once_they_leave():
    """0 sends to 1 and 2, each with two more senders: 1/3 each; 1 loses its others: 2/3 and 1/3."""
    clock = HeapClock()
    with mock.patch.object(network_module, "LARGE_COMPONENT", 1):
        network = Network(clock, [1.0] * 7, [1.0] * 7)
        first, second = (network.start(0, server, 10**6, nothing) for server in (1, 2))
        leaving = [network.start(sender, 1, 10**6, nothing) for sender in (3, 4)]
        for sender in (5, 6):
            network.start(sender, 2, 10**6, nothing)
        clock.run(until_ns=0)
        assert [first.lane.rate, second.lane.rate] == pytest.approx([1 / 3, 1 / 3])
        for flow in leaving:
            network.abort(flow)
        clock.run(until_ns=0)
    assert [first.lane.rate, second.lane.rate] == pytest.approx([2 / 3, 1 / 3])


# --- the number of events ---


class RateCounter:
    """Counts the lanes that are given a rate: the work of all settling."""

    def __init__(self) -> None:
        self.lanes = 0

    def __call__(self, ports: list[Port]) -> dict[Lane, float]:
        rates = fair_rates(ports)
        self.lanes += len(rates)
        return rates


@pytest.fixture
def counter():
    counter = RateCounter()
    with mock.patch.object(network_module, "fair_rates", counter):
        yield counter


@pytest.mark.parametrize("gap_ns", [0, 700])
@pytest.mark.parametrize("slowest", [TEN_GIGABIT, TEN_GIGABIT / 100])
def test_a_crowd_of_1024_senders_costs_a_few_events_each(counter, gap_ns, slowest):
    """Starting together or one by one, with or without a slow link: O(1) events per flow."""
    count = 1_024
    clock = HeapClock()
    egress = [TEN_GIGABIT] * (count - 1) + [slowest, TEN_GIGABIT]
    network = Network(clock, egress, egress)
    ends: list[int] = []
    for sender in range(count):
        size = 100_000 + 13 * sender

        def start(sender: int = sender, size: int = size) -> None:
            network.start(sender, count, size, lambda: ends.append(clock.now))

        clock.at(sender * gap_ns, start)
    clock.run()
    assert len(ends) == count
    assert clock.scheduled - count <= 4 * count
    assert clock.cancelled <= count
    assert counter.lanes <= 4 * count


def test_flows_that_share_with_nobody_are_never_settled(counter):
    """A ring of transfers: one event per flow and no division of any card."""
    count = 64
    clock = HeapClock()
    network = Network(clock, [TEN_GIGABIT] * count, [TEN_GIGABIT] * count)
    for card in range(count):
        network.start(card, (card + 1) % count, 1_000 + card, nothing)
    clock.run()
    assert clock.scheduled == count
    assert counter.lanes == 0


def test_a_card_whose_crowd_has_gone_needs_no_settling_again(counter):
    """After three flows that ended together, a flow alone costs one event and no division."""
    clock = HeapClock()
    network = Network(clock, [1.0] * 4, [1.0] * 4)
    for sender in (1, 2, 3):
        network.start(sender, 0, 1_000, nothing)
    clock.run()
    before = clock.scheduled, counter.lanes
    assert counter.lanes > 0
    network.start(1, 0, 1_000, nothing)
    clock.run()
    assert (clock.scheduled - before[0], counter.lanes - before[1]) == (1, 0)


def test_many_senders_to_several_servers_do_not_cost_their_product(counter):
    """96 workers spread over 8 servers: far below the 768 lanes that every event would touch."""
    workers, servers = 96, 8
    clock = HeapClock(seed=1)
    network = Network(
        clock, [TEN_GIGABIT] * (workers + servers), [TEN_GIGABIT] * (workers + servers)
    )
    ends: list[int] = []

    def start(worker: int) -> None:
        for server in range(workers, workers + servers):
            network.start(worker, server, 100_000, lambda: ends.append(clock.now))

    for worker in range(workers):
        clock.at(worker * 1_000, start, worker)
    clock.run()
    flows = workers * servers
    assert len(ends) == flows
    assert counter.lanes <= 64 * flows
    assert clock.scheduled <= 8 * flows


# --- bad input ---


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("inf"), float("nan")])
def test_a_capacity_must_be_positive_and_finite(capacity):
    """Refused at construction and when changed."""
    with pytest.raises(ConfigurationError, match="give a positive finite number"):
        Network(HeapClock(), [1.0, capacity], [1.0, 1.0])
    network = Network(HeapClock(), [1.0], [1.0])
    with pytest.raises(ConfigurationError, match="give a positive finite number"):
        network.set_capacity(0, egress=1.0, ingress=capacity)


def test_capacities_come_in_pairs_and_sizes_are_not_negative():
    """One egress and one ingress for every card; 0 bytes or more."""
    with pytest.raises(ConfigurationError, match="got 2 for egress and 1 for ingress"):
        Network(HeapClock(), [1.0, 1.0], [1.0])
    with pytest.raises(ConfigurationError, match="cannot have -5 bytes"):
        Network(HeapClock(), [1.0], [1.0]).start(0, 0, -5, nothing)
