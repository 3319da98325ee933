"""Which hosts are near each other: sites and racks, found in what was measured between pairs.

Hosts belong together if all pairs among them are near and all pairs across are far: several times
longer until the first byte, or several times fewer bytes per second. Only the shortest round trips
count, because everything that makes one longer is chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gossamer.config.network import Sites
from gossamer.plan.probe.findings import Crowd, MeasuredLink, ProbeFindings

SITE_GAP = 3.0
"""Another site is this many times as far, or has as many times fewer bytes per second."""
SITE_S = 0.5e-3
"""Where distance tells sites apart, another site is at least this much farther."""
RACK_GAP = 1.4
"""Another rack is this many times as far."""
FULL = 0.8
"""Flows share a link if together they get less than this share of what each gets alone."""

Groups = list[list[str]]
_Pairs = Mapping[frozenset[str], float]


def regions_of(hosts: Sequence[str], links: Sequence[MeasuredLink]) -> Groups:
    """The hosts that are near each other, in order of rank; one group if none is apart."""
    names = list(dict.fromkeys(hosts))
    trips = _between_hosts(hosts, links, lambda link: link.shortest)
    slowness = _between_hosts(hosts, links, lambda link: 1 / link.bandwidth)
    if len(names) < 3 or not trips:
        return [names]
    far = _split(names, trips, SITE_GAP)
    # A host whose card is slow is far from all others, too; only several can be a site.
    thin = [group for group in [_split(names, slowness, SITE_GAP)] if min(map(len, group)) > 1]
    racks = [group for group in [_split(names, trips, RACK_GAP)] if min(map(len, group)) > 1]
    is_far = len(far) > 1 and max(trips.values()) - min(trips.values()) > SITE_S
    found = [far] if is_far else [*thin, *racks]
    several = next((groups for groups in found if len(groups) > 1), None)
    if several is not None:
        return several
    differ = max(trips.values()) > SITE_GAP * min(trips.values()) + SITE_S
    return [[name] for name in names] if differ else [names]


def _between_hosts(
    hosts: Sequence[str], links: Sequence[MeasuredLink], measure: Callable[[MeasuredLink], float]
) -> _Pairs:
    """The least of each pair of hosts: others may have disturbed the other measurements."""
    found: dict[frozenset[str], float] = {}
    for link in links:
        pair = frozenset((hosts[link.source], hosts[link.target]))
        if len(pair) == 2:
            found[pair] = min(measure(link), found.get(pair, float("inf")))
    return found


def _split(names: list[str], pairs: _Pairs, gap: float) -> Groups:
    """Cut where the distances of pairs leave the largest gap; one group if that is no clear cut."""
    ordered = sorted(pairs.values())
    steps = [(far / near, near) for near, far in itertools.pairwise(ordered)]
    widest, limit = max(steps, default=(1.0, 0.0))
    if widest < gap:
        return [names]
    groups: Groups = []
    for name in names:
        near = [
            group for group in groups
            if any(pairs.get(frozenset((name, other)), limit + 1) <= limit for other in group)
        ]  # fmt: skip
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), name])
    is_clear = all(
        (pairs.get(frozenset((one, other)), limit) <= limit)
        for group in groups
        for one in group
        for other in group
        if one != other
    )
    if not is_clear:
        return [names]
    ordered_groups = (sorted(group, key=names.index) for group in groups)
    return sorted(ordered_groups, key=lambda group: names.index(group[0]))


# ---------------------------------------------------------------------------------- crowds


def across(hosts: Sequence[str], groups: Groups, *, senders: int | None = None) -> dict[int, int]:
    """One worker of each host, or of so many, sends to a host of its own in the next group."""
    first = {name: hosts.index(name) for name in dict.fromkeys(hosts)}
    found: dict[int, int] = {}
    if len(groups) < 2:
        return found
    for group, following in zip(groups, groups[1:] + groups[:1], strict=True):
        for one, other in list(zip(group, following, strict=False))[:senders]:
            found[first[one]] = first[other]
    return found


@dataclass(frozen=True)
class FlowsAcross:
    """What flows from one group to another get."""

    alone: float
    """Bytes per second of a flow that was alone on its way."""
    together: float
    """Bytes per second of several at once, in sum."""
    flows: int

    @property
    def is_shared(self) -> bool:
        return self.flows > 1 and self.together < FULL * self.flows * self.alone


def flows_across(findings: ProbeFindings, groups: Groups) -> Iterator[FlowsAcross]:
    """Each way from a group to the next one, where both crowds were measured."""
    alone, together = (_rates(findings.crowds, pattern) for pattern in ("one_across", "across"))
    for group in groups:
        ranks = [rank for rank, host in enumerate(findings.hosts) if host in group]
        single = [alone[rank] for rank in ranks if rank in alone]
        several = [together[rank] for rank in ranks if rank in together]
        if single and several:
            yield FlowsAcross(single[0], sum(several), len(several))


def _rates(crowds: Sequence[Crowd], pattern: str) -> Mapping[int, float]:
    return next((crowd.rates for crowd in crowds if crowd.pattern == pattern), {})


# ---------------------------------------------------------------------------------- description


def are_in_order(findings: ProbeFindings, groups: Groups) -> bool:
    """Whether the workers of each group follow each other, as a description needs it."""
    order = [number for host in findings.hosts for number, g in enumerate(groups) if host in g]
    return order == sorted(order)


def are_racks(findings: ProbeFindings, groups: Groups) -> bool:
    """Whether the groups are no sites: alike in size, close, and one flow crosses at full rate."""
    sizes = {len(group) for group in groups}
    inside, outside = links_of(findings, groups)
    if len(sizes) > 1 or sizes == {1} or not (inside and outside):
        return False
    distance = min(one.shortest for one in outside) - min(one.shortest for one in inside)
    fast = max(one.bandwidth for one in inside)
    return distance < SITE_S and max(one.bandwidth for one in outside) > fast / SITE_GAP


def links_of(
    findings: ProbeFindings, groups: Groups
) -> tuple[list[MeasuredLink], list[MeasuredLink]]:
    """The links between hosts of one group, and those from group to group."""
    number = {host: at for at, group in enumerate(groups) for host in group}
    inside: list[MeasuredLink] = []
    outside: list[MeasuredLink] = []
    for link in findings.links:
        one, other = findings.hosts[link.source], findings.hosts[link.target]
        if one != other:
            (inside if number[one] == number[other] else outside).append(link)
    return inside, outside


def sites_of(findings: ProbeFindings, groups: Groups, per_machine: int) -> Sites:
    """The groups as sites. Between two of them counts the best that two hosts got, for others may
    have used the way at that time; through a shared pipe, what all got together."""
    number = {host: at for at, group in enumerate(groups) for host in group}
    best: dict[tuple[int, int], float] = {}
    nearest: dict[tuple[int, int], float] = {}
    for link in findings.links:
        one, other = findings.hosts[link.source], findings.hosts[link.target]
        if one != other:
            pair = (number[one], number[other])
            best[pair] = max(link.bandwidth, best.get(pair, 0.0))
            nearest[pair] = min(link.shortest, nearest.get(pair, float("inf")))
    found = list(flows_across(findings, groups))
    is_shared = bool(found) and all(one.is_shared for one in found)
    places = range(len(groups))
    if is_shared:
        for place, one in zip(places, found, strict=False):
            best[place, (place + 1) % len(groups)] = one.together
    usual_rate, usual_s = min(best.values()), max(nearest.values())
    names = tuple(f"site{place}" for place in places)
    return Sites(
        names=names,
        machines=tuple(
            sum(host in group for host in findings.hosts) // per_machine for group in groups
        ),
        bandwidth=tuple(
            tuple(0.0 if a == b else best.get((a, b), usual_rate) for b in places) for a in places
        ),
        latency=tuple(
            tuple(nearest.get((a, b), 0.0 if a == b else usual_s) for b in places) for a in places
        ),
        shared=tuple((names[a], names[b]) for a in places for b in places if a < b)
        if is_shared
        else (),
    )
