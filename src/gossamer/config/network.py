"""The network of a cluster as it is: cards, racks, sites, other traffic; slowness that is shared.

A card is what a machine has. Machines stand in racks, whose uplink all of them share, and at sites,
between which a matrix says how fast one flow can be and how long its first byte takes.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gossamer.config.collective_costs import COLLECTIVES
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import bytes_per_second, counted, seconds
from gossamer.specs import check_range

CLOSED_FORM, FLOWS = "closed_form", "flows"
CARDS, UPLINKS, SITES = "cards", "uplinks", "sites"
GROUPS = ("worker", "machine", "rack", "site", "all")
_MOST_TRACE_LINES = 100_000
_SHORTEST_S = 1e-6
_Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Wires:
    """What the network carries."""

    bandwidth: float = 1.25e9
    """Bytes per second of one card, each way."""
    latency: float = 50e-6
    collective: str = "ring"
    memory_bandwidth: float = 0.0
    """Inside a machine; 0 means free."""
    server_bandwidth: float = 0.0
    """What a server's own card carries per second; 0 means: as much as a worker's."""
    rack_latency: float = 0.0
    """Added when a message leaves its rack."""
    oversubscription: float = 1.0
    """A byte that leaves its rack costs this many times its time on both cards."""
    retransmission: float = 0.2
    """How long it takes until a dropped message is sent again."""
    up: float = 0.0
    """What a worker's card sends per second; 0 means: `bandwidth`."""
    down: float = 0.0
    """What a worker's card receives per second; 0 means: `bandwidth`."""
    uplink: float = 0.0
    """What a rack's uplink carries per second each way, for all that leaves or enters the rack;
    0 means: it is never full."""
    collectives: str = CLOSED_FORM
    """How collectives use the cards: each by its formula beside everything else, or as flows."""
    processor_share: float = 0.0
    """The part of computing that a machine loses while its card sends or receives."""

    @property
    def egress(self) -> float:
        return self.up or self.bandwidth

    @property
    def ingress(self) -> float:
        return self.down or self.bandwidth

    def times(self, factor: float) -> Wires:
        """The same with every bandwidth multiplied; memory is no network."""
        names = ("bandwidth", "server_bandwidth", "up", "down", "uplink")
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Sites:
    """Where machines stand, and what lies between two places. Rows send, columns receive."""

    names: tuple[str, ...] = ()
    machines: tuple[int, ...] = ()
    """How many machines each site has, in order; other numbers of machines are spread alike."""
    bandwidth: _Matrix = ()
    """The most that one flow can have; 0 on the diagonal means: as the cards."""
    latency: _Matrix = ()
    """Instead of the network's."""
    shared: tuple[tuple[str, str], ...] = ()
    """The pairs, each written once, whose entry is one pipe each way for all flows together."""
    servers: str = ""
    """The site of the servers; the first one if it is left out."""

    def site_of(self, machine: int, machines: int) -> int:
        """The number of a machine's site; numbers from `machines` on are those of servers."""
        if not self.names:
            return 0
        if machine >= machines:
            return self.names.index(self.servers) if self.servers else 0
        place = machine * sum(self.machines) // machines
        for site, count in enumerate(self.machines):
            place -= count
            if place < 0:
                return site
        return len(self.machines) - 1

    def is_shared(self, one: int, other: int) -> bool:
        pair = (self.names[one], self.names[other])
        return one != other and (pair in self.shared or pair[::-1] in self.shared)

    def times(self, factor: float) -> Sites:
        scaled = tuple(tuple(factor * entry for entry in row) for row in self.bandwidth)
        return dataclasses.replace(self, bandwidth=scaled)


@dataclass(frozen=True)
class Background:
    """What others send over the same links: a share of each, which varies in time."""

    on: str = CARDS
    """Which links: cards, uplinks (of racks), or sites (the shared pipes between them)."""
    load: float = 0.0
    """The share of a link that a burst takes."""
    every: float = 0.0
    """Mean seconds between two bursts on one link, exponentially distributed; 0: none."""
    lasts: float = 0.0
    """Mean seconds of a burst, exponentially distributed."""
    trace: tuple[tuple[float, float], ...] = ()
    """Instead of bursts: from a second on this share, on all links alike."""
    repeat: float = 0.0
    """After so many seconds the trace begins again; 0: its last share stays."""

    @property
    def is_there(self) -> bool:
        return bool(self.trace) or (self.load > 0 and self.every > 0 and self.lasts > 0)


@dataclass(frozen=True)
class Phases:
    """What slows a group of workers together."""

    shared_by: str = "rack"
    """Those whose workers are slow at the same time: worker, machine, rack, site or all."""
    every: float = 0.0
    """Mean seconds between two slow phases of a group, exponentially distributed; 0: none."""
    lasts: float = 0.0
    """Mean seconds of a slow phase, exponentially distributed."""
    factor: float = 1.0
    """How many times longer a gradient takes that begins in a slow phase."""
    jitter: float = 0.0
    """Standard deviation of a further factor, log-normal with mean 1."""
    jitter_lasts: float = 1.0
    """How many seconds that factor stays before it is drawn again."""

    @property
    def are_there(self) -> bool:
        has_phases = self.every > 0 and self.lasts > 0 and self.factor != 1
        return has_phases or self.jitter > 0


# ---------------------------------------------------------------------------------- checks


def check_wires(wires: Wires, machines_per_rack: int) -> None:
    if wires.collective not in COLLECTIVES:
        raise unknown_name("collective", wires.collective, COLLECTIVES)
    if not wires.bandwidth > 0:
        raise ConfigurationError(f"bandwidth must be above 0, got {wires.bandwidth:g}")
    if wires.collectives not in (CLOSED_FORM, FLOWS):
        raise unknown_name("collectives", wires.collectives, (CLOSED_FORM, FLOWS))
    check_range("processor_share", wires.processor_share, 0, 1)
    for name in ("up", "down", "uplink"):
        check_range(name, getattr(wires, name), 0)
    if wires.uplink and not machines_per_rack:
        raise ConfigurationError("uplink is that of a rack; say how many machines_per_rack")
    if wires.uplink and wires.oversubscription > 1:
        raise ConfigurationError(
            "uplink and oversubscription both say what leaving a rack costs; give one of them"
        )


def check_sites(sites: Sites) -> None:
    names = sites.names
    if not names:
        if sites != Sites():
            raise ConfigurationError('[sites] needs names, such as names = ["oregon", "tokyo"]')
        return
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"[sites] names {twice!r} twice; give each site a name of its own")
    if len(sites.machines) != len(names) or any(count < 1 for count in sites.machines):
        raise ConfigurationError(
            f"[sites] machines must be {counted(len(names), 'number')} from 1 on, one for each "
            f"site, got {list(sites.machines)}"
        )
    for what, matrix in (("bandwidth", sites.bandwidth), ("latency", sites.latency)):
        _check_matrix(what, matrix, names)
    if sites.shared and not sites.bandwidth:
        raise ConfigurationError("[sites] shared needs the bandwidth of the pipes; give the matrix")
    for name in (*(name for pair in sites.shared for name in pair), sites.servers):
        if name and name not in names:
            raise unknown_name("site", name, names)


def _check_matrix(what: str, matrix: _Matrix, names: tuple[str, ...]) -> None:
    count = len(names)
    if matrix and (len(matrix) != count or any(len(row) != count for row in matrix)):
        lengths = ", ".join(str(len(row)) for row in matrix)
        raise ConfigurationError(
            f"[sites] {what} must be a square matrix with {counted(count, 'row')} of {count}, one "
            f"for each site, got {counted(len(matrix), 'row')} of {lengths}"
        )
    for one, row in enumerate(matrix):
        for other, entry in enumerate(row):
            least_fits = entry > 0 or (entry == 0 and (one == other or what == "latency"))
            if not (least_fits and math.isfinite(entry)):
                least = "above 0" if what == "bandwidth" else "at least 0"
                raise ConfigurationError(
                    f"[sites] {what} from {names[one]} to {names[other]} must be {least} and "
                    f"finite, got {entry:g}"
                )


def check_background(background: Background, wires: Wires, sites: Sites) -> None:
    if background.on not in (CARDS, UPLINKS, SITES):
        raise unknown_name("links of [background] on", background.on, (CARDS, UPLINKS, SITES))
    check_range("background load", background.load, 0, 1)
    for name in ("every", "lasts", "repeat"):
        _check_time(f"background {name}", getattr(background, name))
    _check_trace(background)
    if background.trace and background.load:
        raise ConfigurationError("[background] has a trace and a load; give one of them")
    if background.load and not background.is_there:
        raise ConfigurationError("[background] load needs every and lasts, both above 0")
    if not background.is_there:
        return
    if background.on == UPLINKS and not wires.uplink:
        raise ConfigurationError(
            'background on = "uplinks" needs racks with an uplink; set machines_per_rack and '
            "[network] uplink"
        )
    if background.on == SITES and not sites.shared:
        raise ConfigurationError(
            'background on = "sites" needs pipes between them; set [sites] shared = true'
        )


def _check_time(where: str, value: float) -> None:
    """Every change is an event, and a run of seconds has no time for nanoseconds."""
    check_range(where, value, 0)
    if 0 < value < _SHORTEST_S:
        raise ConfigurationError(f"{where} must be 0 or at least 1us, got {value:g} s")


def _check_trace(background: Background) -> None:
    before = -math.inf
    for number, (moment, share) in enumerate(background.trace, 1):
        if not before < moment < math.inf or moment < 0:
            raise ConfigurationError(
                f"background trace: the times must grow from 0 on, got {moment:g} as the "
                f"{number}. time"
            )
        if not 0 <= share < 1:
            raise ConfigurationError(
                f"background trace: a share must be at least 0 and below 1, got {share:g} at "
                f"{moment:g} s"
            )
        before = moment
    if background.repeat and background.trace and background.repeat <= before:
        raise ConfigurationError(
            f"background repeat must be longer than the trace, whose last time is {before:g} s, "
            f"got {background.repeat:g} s"
        )


def check_phases(phases: Phases, sites: Sites) -> None:
    if phases.shared_by not in GROUPS:
        raise unknown_name("group of [phases] shared_by", phases.shared_by, GROUPS)
    check_range("phases jitter", phases.jitter, 0)
    for name in ("every", "lasts", "jitter_lasts"):
        _check_time(f"phases {name}", getattr(phases, name))
    for name in ("factor", "jitter_lasts"):
        value = getattr(phases, name)
        if not 0 < value < math.inf:
            raise ConfigurationError(f"phases {name} must be above 0 and finite, got {value:g}")
    if phases.factor != 1 and not (phases.every and phases.lasts):
        raise ConfigurationError("[phases] factor needs every and lasts, both above 0")
    if phases.are_there and phases.shared_by == "site" and not sites.names:
        raise ConfigurationError('phases shared_by = "site" needs sites; add a table [sites]')


# ---------------------------------------------------------------------------------- reading


def read_sites(given: Mapping[str, Any]) -> Sites:
    """The table [sites] of a file; `as_dict` of a cluster reads back."""
    known = [entry.name for entry in dataclasses.fields(Sites)]
    for key in given:
        if key not in known:
            raise unknown_name("key of [sites]", key, known)
    names = tuple(_text(name, "names") for name in _list(given.get("names", ()), "names"))
    counts = _list(given.get("machines", [1] * len(names)), "machines")
    if any(type(count) is not int for count in counts):
        raise ConfigurationError(f"[sites] machines must be whole numbers, got {counts}")
    return Sites(
        names=names,
        machines=tuple(cast(Sequence[int], counts)),
        bandwidth=_matrix(given.get("bandwidth", ()), "bandwidth", _rate),
        latency=_matrix(given.get("latency", ()), "latency", seconds),
        shared=_pairs(given.get("shared", ()), names),
        servers=_text(given.get("servers", ""), "servers"),
    )


def _rate(entry: str | float, where: str) -> float:
    return bytes_per_second(entry, where) if entry else 0.0


def _matrix(given: object, what: str, read: Callable[[str | float, str], float]) -> _Matrix:
    return tuple(
        tuple(read(cast(float, entry), f"[sites] {what}") for entry in _list(row, what))
        for row in _list(given, what)
    )


def _pairs(given: object, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    if isinstance(given, bool):
        after = enumerate(names, 1)
        return tuple((one, other) for at, one in after for other in names[at:]) if given else ()
    pairs = [_list(pair, "shared") for pair in _list(given, "shared")]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigurationError(
            '[sites] shared must be true or pairs such as [["oregon", "tokyo"]]'
        )
    return tuple((_text(one, "shared"), _text(other, "shared")) for one, other in pairs)


def _list(given: object, what: str) -> Sequence[object]:
    if not isinstance(given, list | tuple):
        raise ConfigurationError(f"[sites] {what} must be a list, got {given!r}")
    return cast(Sequence[object], given)


def _text(given: object, what: str) -> str:
    if not isinstance(given, str):
        raise ConfigurationError(f"[sites] {what} must be a name in quotes, got {given!r}")
    return given


def with_trace(given: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The table [background], with the trace read from its file, which stands beside the
    description."""
    trace = given.get("trace", ())
    if isinstance(trace, str):
        trace = _read_trace(Path(trace) if folder is None else folder / trace)
    elif not (isinstance(trace, list | tuple) and all(map(_is_moment, cast(list[Any], trace)))):
        raise ConfigurationError(
            f"background trace must be the name of a file, or pairs of seconds and share, got "
            f"{trace!r}"
        )
    pairs = tuple((float(at), float(share)) for at, share in cast(list[Any], trace))
    return {**given, "trace": pairs}


def _is_moment(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(cast(list[Any], pair)) == 2
        and all(type(value) in (int, float) for value in cast(list[Any], pair))
    )


def _read_trace(path: Path) -> list[tuple[float, float]]:
    """Lines of seconds and share; a first line of words and empty lines are skipped."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [row for row in csv.reader(file) if row][: _MOST_TRACE_LINES + 1]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no table of numbers"
        raise ConfigurationError(f"trace file {str(path)!r} cannot be read: {reason}") from None
    found: list[tuple[float, float]] = []
    for number, row in enumerate(lines, 1):
        try:
            moment, share = map(float, row)
        except ValueError:
            if number == 1 and not any(_is_number(word) for word in row):
                continue
            raise ConfigurationError(
                f"trace file {str(path)!r}, entry {number}: expected seconds and a share such as "
                f"1.5,0.3, got {','.join(row)[:60]!r}"
            ) from None
        found.append((moment, share))
    if not found or len(found) > _MOST_TRACE_LINES:
        raise ConfigurationError(
            f"trace file {str(path)!r} must have 1 to {_MOST_TRACE_LINES} lines of seconds,share, "
            f"got {'none' if not found else 'more'}"
        )
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
