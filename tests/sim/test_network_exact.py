"""Shared network cards against an exact simulation, and the laws of max-min fairness."""

from __future__ import annotations

from math import inf
from unittest import mock

from exact_network import LINK, exact
from heap_clock import HeapClock
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.sim import network as network_module
from gossamer.sim.network import Network
from tiers import wide


@st.composite
def scripts(draw, cards: int = 5, flows: int = 14, links: int = 0):
    """Capacities, flows (start, source, target, size, lifetime), changes of capacity; then the
    capacities of links and, for each flow, those that it passes and its cap, if it has one."""
    count = draw(st.integers(1, cards))
    card = st.integers(0, count - 1)
    capacity = st.integers(1, 24) | st.just(8)
    pair = st.tuples(capacity, capacity)
    times = st.integers(0, 3000) | st.sampled_from([0, 500, 1000])
    lifetime = st.none() | st.none() | st.integers(1, 3000)
    flow = st.tuples(times, card, card, st.integers(0, 4000) | st.just(1000), lifetime)
    change = st.tuples(times, card, pair)
    started = draw(st.lists(flow, min_size=1, max_size=flows))
    between = draw(st.lists(capacity, min_size=links, max_size=links))
    passed = st.lists(st.integers(0, links - 1), unique=True, max_size=2) if links else st.just([])
    cap = st.none() | capacity if links else st.none()
    return (
        draw(st.lists(pair, min_size=count, max_size=count)),
        started,
        draw(st.lists(change, max_size=3, unique_by=lambda change: change[:2])),
        between,
        [draw(st.tuples(passed, cap)) for _ in started],
    )


def ways(script, network: Network) -> list[dict]:
    """What each flow passes besides its two cards, as arguments of `start`."""
    links = [network.add_link(float(capacity * LINK)) for capacity in script[3]]
    return [
        {
            "through": tuple(links[link] for link in passed),
            "cap": inf if cap is None else float(cap * LINK),
        }
        for passed, cap in script[4]
    ]


def play(script, seed: int | None = None):
    """The script on a Network: when each flow ended (None: aborted), and the bytes per card."""
    capacities, flows, changes = script[:3]
    clock = HeapClock(seed)
    network = Network(
        clock,
        [float(out * LINK) for out, _ in capacities],
        [float(to * LINK) for _, to in capacities],
    )
    ended: list[int | None] = [None] * len(flows)
    between = ways(script, network)

    def start(index: int) -> None:
        _, source, target, size, lifetime = flows[index]

        def done() -> None:
            assert ended[index] is None
            ended[index] = clock.now

        flow = network.start(source, target, size, done, **between[index])
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


@given(script=scripts(), large=st.sampled_from([1, network_module.LARGE_COMPONENT]))
@settings(max_examples=30)
def test_flows_end_when_an_exact_simulation_says(script, large):
    """Random starts, aborts and changes of capacity: ends to 1 ns, bytes to a few per flow."""
    assert_exact(script, large)


@given(script=scripts(links=3), large=st.sampled_from([1, network_module.LARGE_COMPONENT]))
@settings(max_examples=30)
def test_shared_links_and_caps_are_filled_as_an_exact_simulation_says(script, large):
    """Likewise where flows pass up to two links that others pass, too, and some have a cap."""
    assert_exact(script, large)


@wide
@given(script=scripts(7, 30, links=4), large=st.sampled_from([1, 4, 1000]))
@settings(max_examples=1500)
def test_many_scripts_of_shared_links_and_caps_are_filled_exactly(script, large):
    """The same with more of everything."""
    assert_exact(script, large)


def assert_exact(script, large) -> None:
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
@settings(max_examples=30)
def test_the_order_of_events_within_an_instant_does_not_matter(script, seed):
    """Ties shuffled by any seed give the same ends, as long as nothing is aborted or changed."""
    capacities, flows, _, *rest = script
    script = capacities, [(*flow[:4], None) for flow in flows], [], *rest
    for ordered, shuffled in zip(play(script)[0], play(script, seed)[0], strict=True):
        assert abs(ordered - shuffled) <= 1


@given(script=scripts())
@settings(max_examples=30)
def test_the_same_script_gives_the_same_run(script):
    """Bit for bit: ends and bytes."""
    assert play(script) == play(script)


@given(script=scripts())
@settings(max_examples=25)
def test_bytes_sent_are_bytes_received_and_those_of_the_flows(script):
    """Sums over cards agree; finished flows count whole, aborted ones at most their size."""
    flows = script[1]
    ended, sent, received = play(script)
    assert sum(sent) == sum(received)
    for card in range(len(sent)):
        own = [index for index, flow in enumerate(flows) if flow[1] == card]
        whole = sum(flows[index][3] for index in own if ended[index] is not None)
        assert whole <= sent[card] <= sum(flows[index][3] for index in own)


@given(script=scripts(cards=8, flows=24), large=st.sampled_from([1, 4, 1000]), gone=st.data())
@settings(max_examples=25)
def test_every_flow_has_a_full_port_on_which_nobody_is_faster(script, large, gone):
    """The max-min property, after everyone has started and after some have been aborted."""
    capacities, flows = script[:2]
    clock = HeapClock()
    outward = [float(out * LINK) for out, _ in capacities]
    inward = [float(to * LINK) for _, to in capacities]
    with mock.patch.object(network_module, "LARGE_COMPONENT", large):
        network = Network(clock, outward, inward)
        live = [network.start(flow[1], flow[2], 10**9, lambda: None) for flow in flows]
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


@given(script=scripts(cards=8, flows=24), large=st.sampled_from([1, 4, 1000]))
@settings(max_examples=25)
def test_caps_equal_to_the_rate_of_the_cards_change_no_bit(script, large):
    """On equal cards: the same ends, bytes and number of events."""
    capacities, flows, _, links, between = script
    equal = [(8, 8)] * len(capacities)
    capped = [(passed, 8) for passed, _ in between]
    with mock.patch.object(network_module, "LARGE_COMPONENT", large):
        assert play((equal, flows, [], links, between)) == play((equal, flows, [], links, capped))
