"""The communication graph of a method, as it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.report.page.data import TopologyData
from gossamer.topology import TOPOLOGIES, Topology, make_topology

_MOST_NODES = 4096
_MOST_WORKERS = 64
_MOST_EDGES = 400
_RANDOM_PEER = frozenset({"pull_gossip", "push_gossip", "codistill", "pbt"})

Edges = list[list[int]]


def server_side(method: str) -> MethodSpec | None:
    """The spec of a method with servers; None for any other text."""
    try:
        spec = parse_method(method)
    except ConfigurationError:
        return None
    return spec if spec.method.has_server else None


def drawn_topology(
    method: str, workers: int, options: Mapping[str, Any], collective: str, per_machine: int = 1
) -> TopologyData | None:
    """The graph of a method; None if its spec or the number of workers is unknown."""
    try:
        spec = parse_method(method)
    except ConfigurationError:
        return None
    per_replica = spec.shape.machines
    workers //= per_replica
    if not 1 <= workers <= _MOST_NODES:
        return None
    groups = -(-workers // per_machine) if spec.groups == "host" else int(spec.groups)
    ends = groups if 0 < groups < workers else workers
    speakers = [group * (workers // ends) for group in range(ends)]
    nodes = [str(rank) for rank in range(workers)]
    if spec.method.has_server:
        servers = range(workers, workers + spec.servers)
        nodes += [f"server {number}" for number in range(spec.servers)]
        edges = [[rank, server] for rank in speakers for server in servers]
        drawn = TopologyData(name="star", note=_about_servers(spec), nodes=nodes, edges=edges)
    else:
        drawn = _among_workers(spec, nodes, speakers, options, collective)
    if ends < workers:
        drawn["edges"] += _inside_groups(workers, speakers)
        drawn["note"] += (
            f" Two levels: each of {ends} groups of {workers // ends} averages exactly inside, and"
            " its first worker exchanges with the other groups."
        )
    if per_replica > 1:
        drawn["note"] += (
            f" Each of the {workers} is a replica of {per_replica} machines, and every machine "
            "exchanges with those that hold the same layers."
        )
    return _thinned(drawn, workers)


def _about_servers(spec: MethodSpec) -> str:
    centre = "the centre" if spec.method.family == "elastic" else "the parameters"
    cut = "" if spec.servers == 1 else f" cut over {spec.servers} servers"
    place = " on the workers' machines" if spec.placement == "workers" else ""
    return f"Workers exchange with {centre}{cut}{place} only, never with each other."


def _among_workers(
    spec: MethodSpec, nodes: list[str], speakers: Sequence[int], options: Mapping[str, Any],
    collective: str,
) -> TopologyData:  # fmt: skip
    if spec.name == "ensemble":
        return TopologyData(name="none", note="Workers never exchange.", nodes=nodes, edges=[])
    if spec.name in _RANDOM_PEER:
        note = "Each exchange is with a random peer; the lines show all pairs that may exchange."
        edges = _edges(make_topology("complete", speakers))
        return TopologyData(name="random peer", note=note, nodes=nodes, edges=edges)
    named = options.get("topology", spec.method.defaults().get("topology"))
    if isinstance(named, str):
        graph = _made(named, speakers)
        if graph is None:
            return TopologyData(name=named, note="", nodes=nodes, edges=[])
        return TopologyData(
            name=named, note=_about(graph, spec.name), nodes=nodes, edges=_edges(graph)
        )
    return _collective(collective, nodes, speakers)


def _collective(collective: str, nodes: list[str], speakers: Sequence[int]) -> TopologyData:
    """The links that the all-reduce algorithm of the cluster uses."""
    note = (
        f"All workers average together; the all-reduce algorithm is {collective.replace('_', ' ')}."
    )
    count = len(speakers)
    if collective == "ring":
        edges = _edges(make_topology("ring", speakers))
    elif collective == "tree":
        # In a binomial tree the parent of a member lacks the member's lowest set bit.
        edges = [[speakers[at & (at - 1)], speakers[at]] for at in range(1, count)]
    else:
        hops = [1 << power for power in range((count - 1).bit_length())]
        pairs = {(at, at ^ hop) for at in range(count) for hop in hops if at < at ^ hop < count}
        edges = [[speakers[one], speakers[other]] for one, other in sorted(pairs)]
    return TopologyData(name=collective, note=note, nodes=nodes, edges=edges)


def _made(named: str, speakers: Sequence[int]) -> Topology | None:
    try:
        return make_topology(named, speakers)
    except ConfigurationError:
        return None


def _about(graph: Topology, method: str) -> str:
    sentence = f"{TOPOLOGIES[graph.name][0].upper()}{TOPOLOGIES[graph.name][1:]}."
    sentence = sentence.replace("`", "")
    if graph.period > 1:
        sentence += f" The lines of all {graph.period} rounds are drawn together."
    if method == "ad_psgd":
        sentence += " Each exchange is with a random neighbour."
    return sentence


def _edges(graph: Topology) -> Edges:
    """All pairs that are ever linked, each once."""
    pairs = {
        (min(rank, peer), max(rank, peer))
        for step in range(graph.period)
        for rank in graph.members
        for peer in graph.out_neighbours(rank, step)
    }
    return [list(pair) for pair in sorted(pairs)]


def _inside_groups(workers: int, speakers: Sequence[int]) -> Edges:
    size = workers // len(speakers)
    return [[first, first + other] for first in speakers for other in range(1, size)]


def _thinned(drawn: TopologyData, workers: int) -> TopologyData:
    edges = drawn["edges"]
    if workers > _MOST_WORKERS and len(edges) > _MOST_EDGES:
        # The lines are chosen evenly, so that the drawing keeps the shape of the graph.
        kept = [edges[at * len(edges) // _MOST_EDGES] for at in range(_MOST_EDGES)]
        drawn["note"] += f" {_MOST_EDGES} of its {len(edges)} lines are drawn."
        drawn["edges"] = kept
    return drawn
