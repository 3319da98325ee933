"""Shared network cards: an exact simulation to compare with, laws, and the number of events."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from heapq import heappop, heappush
from math import ceil
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.sim import network as network_module
from gossamer.sim.network import Network
from gossamer.sim.sharing import ROUNDING_NS, Lane, Port, fair_rates

TEN_GIGABIT = 1.25
LINK = Fraction(1, 8)
"""Capacities are multiples of this, so that the reference can be exact."""


class Event:
    def __init__(self, clock: HeapClock, callback: Callable[..., None], arguments: tuple) -> None:
        self.clock = clock
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.clock.cancelled += 1


class HeapClock:
    """A clock that counts; events of one instant come in order, or shuffled by a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self.now = 0
        self.scheduled = 0
        self.cancelled = 0
        self._heap: list[tuple[int, float, int, Event]] = []
        self._tie = (lambda: 0.0) if seed is None else random.Random(seed).random

    def at(self, delay_ns: int, callback: Callable[..., None], *arguments: object) -> Event:
        assert isinstance(delay_ns, int)
        assert delay_ns >= 0
        self.scheduled += 1
        event = Event(self, callback, arguments)
        heappush(self._heap, (self.now + delay_ns, self._tie(), self.scheduled, event))
        return event

    def run(self, until_ns: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until_ns:
            self.now, _, _, event = heappop(self._heap)
            if not event.is_cancelled:
                event.callback(*event.arguments)


def nothing() -> None:
    pass


# --- a cluster's script, and two ways of playing it ---


@st.composite
def scripts(draw, cards: int = 5, flows: int = 14):
    """Capacities, flows (start, source, target, size, lifetime) and changes of capacity."""
    count = draw(st.integers(1, cards))
    card = st.integers(0, count - 1)
    capacity = st.integers(1, 24) | st.just(8)
    pair = st.tuples(capacity, capacity)
    times = st.integers(0, 3000) | st.sampled_from([0, 500, 1000])
    lifetime = st.none() | st.none() | st.integers(1, 3000)
    flow = st.tuples(times, card, card, st.integers(0, 4000) | st.just(1000), lifetime)
    change = st.tuples(times, card, pair)
    return (
        draw(st.lists(pair, min_size=count, max_size=count)),
        draw(st.lists(flow, min_size=1, max_size=flows)),
        draw(st.lists(change, max_size=3, unique_by=lambda change: change[:2])),
    )


def play(script, seed: int | None = None):
    """The script on a Network: when each flow ended (None: aborted), and the bytes per card."""
    capacities, flows, changes = script
    clock = HeapClock(seed)
    network = Network(
        clock,
        [float(out * LINK) for out, _ in capacities],
        [float(to * LINK) for _, to in capacities],
    )
    ended: list[int | None] = [None] * len(flows)

    def start(index: int) -> None:
        _, source, target, size, lifetime = flows[index]

        def done() -> None:
            assert ended[index] is None
            ended[index] = clock.now

        flow = network.start(source, target, size, done)
        if lifetime is not None:
            clock.at(lifetime, network.abort, flow)

    def change(card: int, egress: int, ingress: int) -> None:
        network.set_capacity(card, egress=float(egress * LINK), ingress=float(ingress * LINK))

    for index, flow in enumerate(flows):
        clock.at(flow[0], start, index)
    for time, card, pair in changes:
        clock.at(time, change, card, *pair)
    clock.run()
    return ended, network.bytes_sent, network.bytes_received


def water_filling(capacities: dict, flows: dict[int, tuple]) -> dict[int, Fraction]:
    """Textbook max-min: freeze the flows of the port with the smallest share, repeat."""
    rates: dict[int, Fraction] = {}
    left = dict(capacities)
    while len(rates) < len(flows):
        crowds: dict[tuple, list[int]] = {}
        for index, ports in flows.items():
            if index not in rates:
                for port in ports:
                    crowds.setdefault(port, []).append(index)
        share, narrowest = min((left[port] / len(crowd), port) for port, crowd in crowds.items())
        for index in crowds[narrowest]:
            rates[index] = share
            for port in flows[index]:
                left[port] -= share
    return rates


def exact(script):
    """The script in exact fractions, all rates anew at every event; ends are rounded up.

    Returns when each flow ended (None: aborted) and the bytes it carried.
    """
    capacities, flows, changes = script
    limits = {}
    for card, (egress, ingress) in enumerate(capacities):
        limits["out", card], limits["in", card] = egress * LINK, ingress * LINK
    actions = [(flow[0], "start", index) for index, flow in enumerate(flows)]
    actions += [(flow[0] + flow[4], "stop", i) for i, flow in enumerate(flows) if flow[4]]
    actions += [(time, "change", (card, pair)) for time, card, pair in changes]
    actions.sort(key=lambda action: action[0])
    ended: list[int | None] = [None] * len(flows)
    remaining: dict[int, Fraction] = {}
    carried = [Fraction(flow[3]) for flow in flows]
    now, rounding = 0, Fraction(ROUNDING_NS)
    while actions or remaining:
        ports = {i: (("out", flows[i][1]), ("in", flows[i][2])) for i in remaining}
        rates = water_filling(limits, ports)
        moments = [now + max(0, ceil(remaining[i] / rates[i] - rounding)) for i in remaining]
        then = min(moments + [action[0] for action in actions[:1]])
        for index, rate in rates.items():
            remaining[index] -= rate * (then - now)
            if remaining[index] <= rate * rounding:
                ended[index] = then
                del remaining[index]
        now = then
        while actions and actions[0][0] == now:
            _, verb, what = actions.pop(0)
            if verb == "start":
                remaining[what] = Fraction(flows[what][3])
                if remaining[what] == 0:
                    ended[what] = now
                    del remaining[what]
            elif verb == "stop":
                carried[what] -= remaining.pop(what, 0)
            else:
                card, (egress, ingress) = what
                limits["out", card], limits["in", card] = egress * LINK, ingress * LINK
    return ended, carried


@given(script=scripts(), large=st.sampled_from([1, network_module.LARGE_COMPONENT]))
@settings(max_examples=50, deadline=None)
def test_flows_end_when_an_exact_simulation_says(script, large):
    """Random starts, aborts and changes of capacity: ends to 1 ns, bytes to a few per flow."""
    with mock.patch.object(network_module, "LARGE_COMPONENT", large):
        ended, sent, received = play(script)
    expected_ends, carried = exact(script)
    for flow, got, expected, moved in zip(script[1], ended, expected_ends, carried, strict=True):
        if got is None or expected is None:
            # Ending and aborting in the same nanosecond may go either way.
            stop = flow[0] + (flow[4] or 0)
            assert got == expected or stop in (got, expected)
        else:
            assert abs(got - expected) <= 1
        sent[flow[1]] -= moved
        received[flow[2]] -= moved
    assert max(map(abs, sent + received)) <= 4 * len(script[1])


@given(script=scripts(), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_the_order_of_events_within_an_instant_does_not_matter(script, seed):
    """Ties shuffled by any seed give the same ends, as long as nothing is aborted or changed."""
    capacities, flows, _ = script
    script = capacities, [(*flow[:4], None) for flow in flows], []
    for ordered, shuffled in zip(play(script)[0], play(script, seed)[0], strict=True):
        assert abs(ordered - shuffled) <= 1


@given(script=scripts())
@settings(max_examples=30, deadline=None)
def test_the_same_script_gives_the_same_run(script):
    """Bit for bit: ends and bytes."""
    assert play(script) == play(script)


@given(script=scripts())
@settings(max_examples=40, deadline=None)
def test_bytes_sent_are_bytes_received_and_those_of_the_flows(script):
    """Sums over cards agree; finished flows count whole, aborted ones at most their size."""
    _, flows, _ = script
    ended, sent, received = play(script)
    assert sum(sent) == sum(received)
    for card in range(len(sent)):
        own = [index for index, flow in enumerate(flows) if flow[1] == card]
        whole = sum(flows[index][3] for index in own if ended[index] is not None)
        assert whole <= sent[card] <= sum(flows[index][3] for index in own)


# --- laws of a moment ---


@given(script=scripts(cards=8, flows=40), large=st.sampled_from([1, 4, 1000]), gone=st.data())
@settings(max_examples=50, deadline=None)
def test_every_flow_has_a_full_port_on_which_nobody_is_faster(script, large, gone):
    """The max-min property, after everyone has started and after some have been aborted."""
    capacities, flows, _ = script
    clock = HeapClock()
    outward = [float(out * LINK) for out, _ in capacities]
    inward = [float(to * LINK) for _, to in capacities]
    with mock.patch.object(network_module, "LARGE_COMPONENT", large):
        network = Network(clock, outward, inward)
        live = [network.start(flow[1], flow[2], 10**9, nothing) for flow in flows]
        clock.run(until_ns=0)
        assert_max_min(live, outward, inward)
        for flow in gone.draw(st.lists(st.sampled_from(live), unique=True)):
            network.abort(flow)
            live.remove(flow)
        clock.run(until_ns=0)
    assert_max_min(live, outward, inward)


def assert_max_min(flows, outward, inward) -> None:
    on_port: dict[tuple, list[float]] = {}
    for flow in flows:
        for port in (("out", flow.source), ("in", flow.target)):
            on_port.setdefault(port, []).append(flow.lane.rate)
    capacity = {(way, card): (outward if way == "out" else inward)[card] for way, card in on_port}
    for port, rates in on_port.items():
        assert sum(rates) <= capacity[port] * (1 + 1e-9)
    for flow in flows:
        ports = (("out", flow.source), ("in", flow.target))
        assert any(
            sum(on_port[port]) >= capacity[port] * (1 - 1e-9)
            and flow.lane.rate >= max(on_port[port]) * (1 - 1e-9)
            for port in ports
        )


@given(senders=st.integers(1, 40), size=st.integers(1, 10**7))
@settings(max_examples=30, deadline=None)
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
