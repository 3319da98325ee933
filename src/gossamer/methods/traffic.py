"""What methods send in a step and hold in memory, in models, where the number of workers or the
topology decides; the rows of the table refer to these."""

from __future__ import annotations

from gossamer.methods.method import Options
from gossamer.topology import make_topology

WAITING_MODELS = 6.0
"""Models that wait for a worker which others push to at random: hardly ever more at one time."""


def degree(workers: int, options: Options) -> float:
    graph = make_topology(options["topology"], workers)
    rounds = range(graph.period)
    sent = sum(len(graph.out_neighbours(rank, t)) for rank in graph.members for t in rounds)
    return sent / (workers * graph.period)


def most_neighbours(workers: int, options: Options) -> int:
    graph = make_topology(options["topology"], workers)
    rounds = range(graph.period)
    return max(len(graph.in_neighbours(rank, t)) for rank in graph.members for t in rounds)


def ring(workers: int) -> float:
    return 2 * (workers - 1) / workers


def warm_then_compressed(workers: int, options: Options) -> float:
    """All-reduce of gradients, then everybody's compressed momentum to everybody."""
    gathered = (workers - 1) * options.get("compressed", 1.0)
    return options["warmup"] * ring(workers) + (1 - options["warmup"]) * gathered


def two_levels(workers: int, options: Options) -> float:
    """Meetings of everybody, and between them those of a site, which are of about equal size."""
    period, inner, sites = options["period"], options["inner"], options["sites"]
    sizes = [
        sum(rank * sites // workers == site for rank in range(workers)) for site in range(sites)
    ]
    inside = sum(size * ring(size) for size in sizes) / workers
    between = period // inner - (period % inner == 0)
    return (ring(workers) + between * inside) / period


def offers(workers: int, options: Options) -> float:
    """An exchange is two models; on a bipartite graph half of the workers start one per step."""
    if workers == 1:
        return 0.0
    return 1.0 if make_topology(options["topology"], workers).sides else 2.0


def neighbours_models(workers: int, options: Options) -> float:
    """A worker holds its own model as it was sent, and the last one of each neighbour and one that
    came early."""
    return 2 * most_neighbours(workers, options) + 1


def shares_of_mass(workers: int, options: Options) -> float:
    """One share for each neighbour, the point of the gradient, and what may be on its way for the
    steps of the overlap."""
    most = most_neighbours(workers, options)
    return 2 * most * (1 + options["overlap"]) + 2
