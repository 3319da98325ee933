"""The reference for shared links: progressive filling in exact fractions, anew at every event."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from gossamer.sim.fair_share import ROUNDING_NS

LINK = Fraction(1, 8)
"""Capacities are multiples of this, so that the reference can be exact."""


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
    capacities, flows, changes, links, between = script
    limits = {}
    for card, (egress, ingress) in enumerate(capacities):
        limits["out", card], limits["in", card] = egress * LINK, ingress * LINK
    passes = []
    for index, (passed, cap) in enumerate(between):
        own = [("out", flows[index][1]), ("in", flows[index][2])]
        own += [("link", link) for link in passed]
        if cap is not None:
            # A cap is a link that nobody else uses.
            limits["cap", index] = cap * LINK
            own.append(("cap", index))
        passes.append(own)
    limits |= {("link", link): capacity * LINK for link, capacity in enumerate(links)}
    actions = [(flow[0], "start", index) for index, flow in enumerate(flows)]
    actions += [(flow[0] + flow[4], "stop", i) for i, flow in enumerate(flows) if flow[4]]
    actions += [(time, "change", (card, pair)) for time, card, pair in changes]
    actions.sort(key=lambda action: action[0])
    ended: list[int | None] = [None] * len(flows)
    remaining: dict[int, Fraction] = {}
    carried = [Fraction(flow[3]) for flow in flows]
    now, rounding = 0, Fraction(ROUNDING_NS)
    while actions or remaining:
        rates = water_filling(limits, {i: passes[i] for i in remaining})
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
