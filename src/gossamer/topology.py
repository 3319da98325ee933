"""Who exchanges with whom, in which round, with which weight: pure data, no communication.

A topology is a recipe (a name, its options, a seed) applied to the sorted ranks that take part.
The positions in that order define the graph, so ranks may have gaps, and after a death the same
recipe is applied to fewer ranks. Every mixing matrix W is doubly stochastic (x <- W x keeps the
mean) and either symmetric or circulant. Hence W is normal: its singular values are the moduli of
its eigenvalues.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import cast, overload

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.specs import parse_spec

TOPOLOGIES: dict[str, str] = {
    "complete": "everyone with everyone: the exact average in every round",
    "ring": "the two neighbours on a circle",
    "star": "everyone with the first worker only",
    "chain": "a ring that is cut open: the longest of all trees",
    "binary_tree": "each with the two below it, the first worker on top: the most hops are few",
    "torus": "four neighbours on the most nearly square grid, with wrap-around (no prime above 3)",
    "grid": "up to four neighbours on the same grid, without wrap-around",
    "random_regular": "`degree` random neighbours (default 4; all others when there are fewer)",
    "exponential": "sends 1, 2, 4, 8, ... ahead, all in every round (directed)",
    "one_peer_exponential": "sends 1, 2, 4, 8, ... ahead, one a round; exact for powers of two",
    "bipartite_ring": "a ring on which odd positions face even ones",
    "bipartite_exponential": "1, 3, 5, 9, 17, ... ahead and back: odd positions face even ones",
    "one_peer_bipartite": "the pairs of bipartite_exponential, one distance a round",
    "matchings": "the edges of `graph` (default ring) in rounds of disjoint pairs",
}

_DEFAULTS = {"random_regular": {"degree": "4"}, "matchings": {"graph": "ring"}}
_DIRECTED = frozenset({"exponential", "one_peer_exponential"})
_NEED_EVEN = frozenset({"bipartite_ring", "bipartite_exponential", "one_peer_bipartite"})
_STATIC_BOTH_WAYS = TOPOLOGIES.keys() - _DIRECTED - {"one_peer_bipartite", "matchings"}

NEEDS = {
    "a tree": ("binary_tree", "chain", "star"),
    "a fixed graph with links both ways": tuple(sorted(_STATIC_BOTH_WAYS)),
}
"""What a method may need of its topology, and those that are it, whoever dies."""

_Options = tuple[tuple[str, str], ...]


class Others(Sequence[int]):
    """All members but one, in order. Every worker has such a list, and they share the memory."""

    __slots__ = ("_members", "_without")

    def __init__(self, members: Sequence[int], without: int) -> None:
        """`without` is a position in `members`."""
        self._members = members
        self._without = without

    def __len__(self) -> int:
        return len(self._members) - 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return self._members[at + (at >= self._without)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast(Sequence[object], other))

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Topology:
    """A recipe applied to `members`. `make_topology` makes equal topologies of equal arguments.

    `step` counts the rounds, which repeat after `period`; any integer is a valid step.
    """

    name: str
    members: tuple[int, ...]
    period: int
    is_directed: bool
    options: tuple[tuple[str, str], ...]
    seed: int
    _rounds: tuple[_Links, ...] = field(repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        # Only the recipe is pickled. It is small, and a process makes one object of it.
        return _topology, (self.name, self.options, self.members, self.seed)

    def out_neighbours(self, rank: int, step: int = 0) -> Sequence[int]:
        """The ranks that `rank` sends to in that round, sorted, without itself."""
        return self._linked(rank, step, 1)

    def in_neighbours(self, rank: int, step: int = 0) -> Sequence[int]:
        """The ranks that `rank` receives from in that round, sorted, without itself."""
        return self._linked(rank, step, -1 if self.is_directed else 1)

    def neighbours(self, rank: int, step: int = 0) -> Sequence[int]:
        """The ranks that share a link of either direction with `rank` in that round."""
        out = self._linked(rank, step, 1)
        if not self.is_directed:
            return out
        return tuple(sorted({*out, *self._linked(rank, step, -1)}))

    def weights(self, rank: int, step: int = 0) -> dict[int, float]:
        """The row of W: the share of each in-neighbour and of `rank` itself, in rank order."""
        row = self._row(self._position(rank), step)
        return {self.members[position]: share for position, share in row.items()}

    def matrix(self, step: int = 0) -> NDArray[np.float64]:
        """W of that round, rows and columns in the order of `members`."""
        w = np.zeros((len(self.members), len(self.members)))
        for position in range(len(self.members)):
            row = self._row(position, step)
            w[position, list(row)] = list(row.values())
        return w

    def mixing_rate(self) -> float:
        """Predicted factor on the norm of the disagreement per round, 0.0 for an exact average.

        It is the second largest |eigenvalue| of the product over one period, to the power 1/period,
        because that is the mean factor over many periods. The product of a schedule is not normal,
        so its singular values only bound the worst single period.
        """
        product = np.eye(len(self.members))
        for step in range(self.period):
            product = self.matrix(step) @ product
        second = float(np.abs(np.linalg.eigvals(product - 1 / len(self.members))).max())
        # The period-th root would turn rounding noise into slow mixing.
        return 0.0 if second < 1e-7 else second ** (1 / self.period)

    def spectral_gap(self) -> float:
        """1 minus the second largest |eigenvalue| of W; of a schedule, its mean per round."""
        return 1.0 - self.mixing_rate()

    @cached_property
    def least_eigenvalue(self) -> float:
        """The least eigenvalue of W in the first round; it is real where links go both ways."""
        return float(np.linalg.eigvalsh(self.matrix())[0])

    def pair_rate(self) -> float:
        """Expected factor on the squared disagreement when one uniformly random edge averages.

        rho = 1 - lambda_2(Laplacian) / (2 |E|), over the edges of a whole period.
        """
        if self.is_directed:
            raise ConfigurationError(f"pair_rate needs links both ways, got {self.name}; try ring")
        if len(self.members) == 1:
            return 0.0
        laplacian = np.zeros((len(self.members), len(self.members)))
        for position, rank in enumerate(self.members):
            there = [self._position(peer) for peer in self._ever_linked(rank)]
            laplacian[position, there] = -1.0
            laplacian[position, position] = len(there)
        return 1.0 - float(np.linalg.eigvalsh(laplacian)[1] / np.trace(laplacian))

    @cached_property
    def sides(self) -> tuple[frozenset[int], frozenset[int]] | None:
        """(active, passive) when every link of every round joins the two, None otherwise.

        The first member is passive, so odd positions are active wherever parity decides.
        """
        size = len(self.members)
        if self.name == "complete" and size > 2:
            return None  # three of them form a triangle
        distance = _breadth_first(self.members[0], self._ever_linked)
        for rank in self.members:
            if any((distance[rank] - distance[peer]) % 2 == 0 for peer in self._ever_linked(rank)):
                return None
        active = frozenset(rank for rank in self.members if distance[rank] % 2)
        return active, frozenset(self.members) - active

    def restricted(self, live: Collection[int]) -> Topology:
        """The same recipe for the ranks that are alive now, whatever their number.

        With an odd number, bipartite graphs lose their wrap-around links, and random regular
        graphs take an even degree.
        """
        return _topology(self.name, self.options, _ranks(live), self.seed)

    def among(self, live: frozenset[int]) -> Topology:
        """`restricted`, which answers at once while all workers ask for the same set."""
        if live not in self._asked:
            same = len(live) == len(self.members) and live.issuperset(self.members)
            self._asked.clear()
            self._asked[live] = self if same else self.restricted(live)
        return self._asked[live]

    @cached_property
    def _asked(self) -> dict[frozenset[int], Topology]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[int, int], Sequence[int]]:
        return {}

    def _linked(self, rank: int, step: int, sign: int) -> Sequence[int]:
        if self.name == "complete":
            return Others(self.members, self._position(rank))
        if (known := self._known.get((rank, sign))) is not None:
            return known
        there = self._rounds[step % self.period].linked(self._position(rank), sign)
        ranks = tuple(self.members[position] for position in there)
        # The answer of a static graph never changes and may be long. The rounds of a schedule have
        # short answers, and keeping all of them would cost more than it saves.
        if self.period == 1:
            self._known[rank, sign] = ranks
        return ranks

    def _ever_linked(self, rank: int) -> set[int]:
        """The neighbours of `rank` over a whole period."""
        return {peer for step in range(self.period) for peer in self.neighbours(rank, step)}

    def _position(self, rank: int) -> int:
        position = bisect_left(self.members, rank)
        if position == len(self.members) or self.members[position] != rank:
            raise ConfigurationError(
                f"worker {rank} is not in this {self.name} of {len(self.members)} workers; "
                "ask for a member, or make the topology with it"
            )
        return position

    def _row(self, position: int, step: int) -> dict[int, float]:
        """Metropolis-Hastings shares by position: 1/(degree + 1) wherever degrees are equal."""
        links = self._rounds[step % self.period]
        degree = links.degree(position)
        row = {
            there: 1.0 / (1 + max(degree, links.degree(there)))
            for there in (*links.linked(position, -1), position)
        }
        row[position] += 1.0 - math.fsum(row.values())
        return dict(sorted(row.items()))


def paired(members: Collection[int], turn: int) -> dict[int, int]:
    """Everyone's partner in a random pairing that all who know the members draw alike. Of an odd
    number one has none."""
    order = list(_ranks(members))
    random.Random(f"pairs/{turn}").shuffle(order)
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return dict(pairs) | {second: first for first, second in pairs}


def make_topology(spec: str, members: int | Sequence[int], *, seed: int = 0) -> Topology:
    """A topology for a number of workers or for given ranks, from `name` or `name:option=value`.

    `make_topology("random_regular:degree=3", 8)`, `make_topology("matchings:graph=torus", 16)`.
    """
    if isinstance(members, int):
        return _of_all(spec, members, seed)
    name, options = _parse(spec)
    ranks = _ranks(members)
    _check(name, dict(options), len(ranks))
    return _topology(name, options, ranks, seed)


# Every worker asks for the topology of all, and naming thousands of ranks takes its time.
@lru_cache(maxsize=128)
def _of_all(spec: str, members: int, seed: int) -> Topology:
    return make_topology(spec, tuple(range(members)), seed=seed)


# This is cached because after a death every simulated worker asks for the same new topology.
@lru_cache(maxsize=128)
def _topology(name: str, options: _Options, members: tuple[int, ...], seed: int) -> Topology:
    rounds = _rounds(name, dict(options), len(members), seed)
    return Topology(name, members, len(rounds), name in _DIRECTED, options, seed, rounds)


def _ranks(members: Collection[int]) -> tuple[int, ...]:
    ranks = tuple(sorted(set(members)))
    if not ranks or len(ranks) < len(members) or ranks[0] < 0:
        raise ConfigurationError(
            f"a topology needs distinct ranks from 0 on, got {list(members)}; name each worker once"
        )
    return ranks


def _parse(spec: str) -> tuple[str, _Options]:
    """Name and all options of `name:option=value,...`; an inner graph is a spec of its own."""
    name, given = parse_spec(spec, "topology")
    if name not in TOPOLOGIES:
        raise unknown_name("topology", name, TOPOLOGIES)
    options = _DEFAULTS.get(name, {})
    for part in (f"{key}={value}" for key, value in given.items() if key not in options):
        example = name + "".join(f":{known}={usual}" for known, usual in options.items())
        raise ConfigurationError(f"topology {name} has no option {part!r}; write {example}")
    return name, tuple(sorted((options | given).items()))


def _check(name: str, options: dict[str, str], n: int) -> None:
    others = f"got {n}; use {n - 1} or {n + 1}"
    evens = f"needs an even number of workers, {others}"
    if name in _NEED_EVEN and n % 2 and n > 1:
        raise ConfigurationError(f"{name} {evens}, or topology=star")
    is_prime = n > 3 and all(n % rows for rows in range(2, math.isqrt(n) + 1))
    if name in ("torus", "grid") and is_prime:
        raise ConfigurationError(f"{name} needs full rows of workers, {others}, or topology=ring")
    if name == "random_regular":
        given = options["degree"]
        if not (given.isdecimal() and int(given) > 1):
            raise ConfigurationError(
                f"{name} needs a degree from 2 on, got {given!r}; try degree=4"
            )
        degree = min(int(given), n - 1)
        if n * degree % 2:
            raise ConfigurationError(f"{name}:degree={degree} {evens}, or degree={degree + 1}")
    if name == "matchings":
        inner, inner_options = _parse(options["graph"])
        if inner not in _STATIC_BOTH_WAYS:
            raise ConfigurationError(
                f"matchings needs a static graph with links both ways, got {inner}; try torus"
            )
        _check(inner, dict(inner_options), n)


@dataclass(frozen=True)
class _Circulant:
    """One round in which everybody sends the same hops ahead, around a circle."""

    size: int
    hops: Collection[int]

    def degree(self, position: int) -> int:
        return len(self.hops)

    def linked(self, position: int, sign: int) -> tuple[int, ...]:
        """The receivers of a position (sign 1) or its senders (sign -1)."""
        return tuple(sorted((position + sign * hop) % self.size for hop in self.hops))


@dataclass(frozen=True)
class _Undirected:
    """One round as the sorted neighbours of every position; links go both ways."""

    neighbours: tuple[tuple[int, ...], ...]

    def degree(self, position: int) -> int:
        return len(self.neighbours[position])

    def linked(self, position: int, sign: int) -> tuple[int, ...]:
        return self.neighbours[position]


_Links = _Circulant | _Undirected


def _rounds(name: str, options: dict[str, str], n: int, seed: int) -> tuple[_Links, ...]:
    """The recipes: the links of each round of a period, over positions 0 to n - 1."""
    # 1, 2, 4, ... below n. The appendix of the SGP paper stops one earlier, which is not exact.
    powers = [1 << power for power in range((n - 1).bit_length())]
    odd_hops = [hop for far in (1, *(1 + p for p in powers[1:])) if far < n for hop in (far, -far)]
    match name:
        case _ if n == 1:
            return (_Circulant(1, ()),)
        case "complete":
            return (_Circulant(n, range(1, n)),)
        case "ring":
            return (_Circulant(n, {1, n - 1}),)
        case "star":
            return (_undirected(n, ((0, leaf) for leaf in range(1, n))),)
        case "chain":
            return (_undirected(n, ((here, here + 1) for here in range(n - 1))),)
        case "binary_tree":
            return (_undirected(n, (((below - 1) // 2, below) for below in range(1, n))),)
        case "torus" | "grid":
            return (_lattice(n, wraps=name == "torus"),)
        case "random_regular":
            return (_random_regular(n, int(options["degree"]), seed),)
        case "exponential":
            return (_Circulant(n, powers),)
        case "one_peer_exponential":
            return tuple(_Circulant(n, (hop,)) for hop in powers)
        case "bipartite_ring":
            return (_odd_to_even(n, (1, -1)),)
        case "bipartite_exponential":
            return (_odd_to_even(n, odd_hops),)
        case "one_peer_bipartite":
            # Among 8 workers, 5 ahead is 3 back: the same pairs need not take two rounds.
            return tuple(dict.fromkeys(_odd_to_even(n, (hop,)) for hop in odd_hops))
        case _:
            inner, inner_options = _parse(options["graph"])
            return _matchings(n, *_rounds(inner, dict(inner_options), n, seed))


def _undirected(n: int, edges: Iterable[tuple[int, int]]) -> _Undirected:
    neighbours: list[set[int]] = [set() for _ in range(n)]
    for one, other in edges:
        neighbours[one].add(other)
        neighbours[other].add(one)
    return _Undirected(tuple(tuple(sorted(each)) for each in neighbours))


def _edges(n: int, links: _Links) -> list[tuple[int, int]]:
    return [(one, other) for one in range(n) for other in links.linked(one, 1) if one < other]


def _breadth_first(start: int, linked: Callable[[int], Iterable[int]]) -> dict[int, int]:
    """Distance in hops from `start` to everyone who can be reached."""
    distance = {start: 0}
    queue = [start]
    for here in queue:
        for there in linked(here):
            if there not in distance:
                distance[there] = distance[here] + 1
                queue.append(there)
    return distance


def _lattice(n: int, *, wraps: bool) -> _Undirected:
    rows = next(rows for rows in range(math.isqrt(n), 0, -1) if n % rows == 0)
    columns = n // rows
    right = [(p, p - p % columns + (p + 1) % columns) for p in range(n)]
    down = [(p, (p + columns) % n) for p in range(n) if rows > 1]
    # The links that wrap around are those that lead back to a lower position.
    return _undirected(n, ((here, there) for here, there in right + down if wraps or here < there))


def _odd_to_even(n: int, hops: Iterable[int]) -> _Undirected:
    edges = ((odd, odd + hop) for hop in hops for odd in range(1, n, 2))
    # Going around the circle keeps the parities apart only when n is even.
    return _undirected(n, ((p, q % n) for p, q in edges if n % 2 == 0 or 0 <= q < n))


def _random_regular(n: int, degree: int, seed: int) -> _Links:
    """A regular circulant, then random pairs of edges a-b, c-d become a-d, c-b.

    Every swap keeps all degrees. So this works for any degree, unlike pairing random stubs.
    """
    degree = min(degree, n - 1)
    # An odd number of link ends, possible only after a death, cannot be paired. A larger degree
    # keeps the mixing.
    degree += n * degree % 2
    if degree == n - 1:
        return _Circulant(n, range(1, n))
    ahead = (*range(1, degree // 2 + 1), *([n // 2] if degree % 2 else []))
    edges = _edges(n, _Circulant(n, {hop for far in ahead for hop in (far, n - far)}))
    present = {*edges, *((other, one) for one, other in edges)}
    # The streams of numpy's generators change between versions, and all workers must agree.
    generator = random.Random(seed)
    while True:
        for _ in range(10 * len(edges)):
            first, second = generator.randrange(len(edges)), generator.randrange(len(edges))
            (a, b), (c, d) = edges[first], edges[second][:: generator.choice((1, -1))]
            if len({a, b, c, d}) == 4 and not present & {(a, d), (c, b)}:
                present -= {(a, b), (b, a), (c, d), (d, c)}
                present |= {(a, d), (d, a), (c, b), (b, c)}
                edges[first], edges[second] = (a, d), (c, b)
        links = _undirected(n, edges)
        if len(_breadth_first(0, links.neighbours.__getitem__)) == n:
            return links


def _matchings(n: int, links: _Links) -> tuple[_Links, ...]:
    """Colour the edges greedily; every colour is a round of disjoint pairs.

    In this order the complete graph of 2^k gets the pairs p, p xor c, so a period is an exact mean.
    """
    taken = [0] * n  # one bit per colour
    colours: dict[int, list[tuple[int, int]]] = {}
    for one, other in _edges(n, links):
        free = ~(taken[one] | taken[other])
        colour = free & -free
        taken[one] |= colour
        taken[other] |= colour
        colours.setdefault(colour, []).append((one, other))
    return tuple(_undirected(n, pairs) for pairs in colours.values())
