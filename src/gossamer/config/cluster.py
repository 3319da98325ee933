"""A cluster as a description: how long a step computes, what the network carries, what breaks."""

from __future__ import annotations

import dataclasses
import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

from gossamer.compression.coding_times import check_times
from gossamer.config.faults import Failures, Fault, check_lives, parse_fault, read_fault
from gossamer.config.network import (
    FLOWS,
    Background,
    Phases,
    Sites,
    Wires,
    check_background,
    check_phases,
    check_sites,
    check_wires,
    read_sites,
    with_trace,
)
from gossamer.config.price import Price, read_price
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import bytes_per_second, seconds, size_in_bytes
from gossamer.specs import check_range

DISTRIBUTIONS = ("constant", "normal", "lognormal", "uniform", "exponential")


@dataclass(frozen=True)
class Compute:
    """How long one gradient takes, and what the device of a worker holds."""

    seconds: float = 0.010
    """The time that one gradient takes, however many samples it has."""
    per_sample: float = 0.0
    """What each sample of the batch adds to that."""
    distribution: str = "normal"
    jitter: float = 0.05
    """Standard deviation over mean; ignored by constant and exponential."""
    unoverlapped_seconds: float = 0.0
    """Copying and applying after each gradient. A slow-down does not scale this time, and nothing
    overlaps with it."""
    forward_share: float = 1 / 3
    """The part of the time before the first bucket can be ready."""
    pause_probability: float = 0.0
    pause_seconds: float = 0.0
    """A random straggler: with this probability a step takes this much longer."""
    memory: float = 0.0
    """The bytes of the device; 0 means that nobody has said, so that everything fits."""

    def mean_seconds(self, batch: int) -> float:
        """The mean time of a gradient of so many samples, without pauses."""
        return self.seconds + self.per_sample * batch

    def at(self, batch: int) -> Compute:
        """The same for gradients of so many samples only, as one fixed time."""
        return dataclasses.replace(self, seconds=self.mean_seconds(batch), per_sample=0.0)

    def draw(self, rng: random.Random, batch: int = 0) -> float:
        """One compute time of a gradient of so many samples, before slow-downs."""
        mean, spread = self.mean_seconds(batch), self.jitter
        match self.distribution:
            case "constant":
                value = mean
            case "normal":
                value = max(0.1 * mean, rng.gauss(mean, spread * mean))
            case "lognormal":
                # These parameters give the mean and the standard deviation that were asked for.
                variance = math.log1p(spread * spread)
                value = mean * rng.lognormvariate(-variance / 2, variance**0.5)
            case "uniform":
                half = min(1.0, spread * 3**0.5)
                value = mean * rng.uniform(1 - half, 1 + half)
            case _:
                value = rng.expovariate(1 / mean)
        if self.pause_probability and rng.random() < self.pause_probability:
            value += self.pause_seconds
        return value


_RANGES: tuple[tuple[Any, ...], ...] = (
    ("", "workers", 1), ("", "workers_per_machine", 1), ("", "machines_per_rack", 0),
    ("compute", "seconds", 0), ("compute", "per_sample", 0), ("compute", "memory", 0),
    ("compute", "jitter", 0), ("compute", "forward_share", 0, 1),
    ("compute", "pause_probability", 0, 1), ("network", "oversubscription", 1),
    ("network", "latency", 0), ("network", "retransmission", 0),
    ("", "failure_detection", 0), ("", "deadline", 0),
)  # fmt: skip
"""The part of the cluster, the name of the number, its least value and what it must stay below."""


@dataclass(frozen=True)
class Cluster:
    """Workers on machines in racks, and what goes wrong."""

    name: str = "custom"
    title: str = ""
    workers: int = 8
    workers_per_machine: int = 1
    machines_per_rack: int = 0
    compute: Compute = field(default_factory=Compute)
    network: Wires = field(default_factory=Wires)
    sites: Sites = field(default_factory=Sites)
    background: Background = field(default_factory=Background)
    phases: Phases = field(default_factory=Phases)
    compression: Mapping[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """The nanoseconds that each number takes to be encoded and decoded, by compressor."""
    price: Price = field(default_factory=Price)
    failures: Failures = field(default_factory=Failures)
    failure_detection: float = 0.05
    """How long it takes until the others learn of a death."""
    deadline: float = 10.0
    """How long a peer may stay unreachable before it counts as lost."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        compute = self.compute
        if compute.distribution not in DISTRIBUTIONS:
            raise unknown_name("distribution", compute.distribution, DISTRIBUTIONS)
        mean = compute.mean_seconds(1)
        if not mean > 0:
            raise ConfigurationError(f"compute seconds must be above 0, got {mean:g}")
        check_wires(self.network, self.machines_per_rack)
        check_sites(self.sites)
        check_background(self.background, self.network, self.sites)
        check_phases(self.phases, self.sites)
        self.price.check(self.workers)
        for part, name, *bounds in _RANGES:
            check_range(name, getattr(getattr(self, part) if part else self, name), *bounds)
        for fault in self.faults:
            if fault.kind == "kill-server":
                continue  # how many servers there are the method says
            ranks = {fault.worker} if fault.worker >= 0 else frozenset().union(*fault.sides)
            if any(rank >= self.workers for rank in ranks):
                raise ConfigurationError(
                    f"the fault '{fault}' names worker {max(ranks)}, but the {self.workers} "
                    f"workers are numbered 0 to {self.workers - 1}"
                )

        self.failures.check()
        check_lives(self.faults)

    @property
    def absent_at_first(self) -> frozenset[int]:
        """The workers that arrive later."""
        return frozenset(fault.worker for fault in self.faults if fault.kind == "arrive")

    @property
    def has_newcomers(self) -> bool:
        """Whether workers come while a run is under way."""
        is_listed = any(fault.kind in ("arrive", "return") for fault in self.faults)
        return is_listed or self.failures.repair > 0

    @property
    def is_mortal(self) -> bool:
        """Whether workers may die."""
        return self.failures.are_there or any(fault.kind == "kill" for fault in self.faults)

    def changed(self, *, workers: int | None = None, faults: Sequence[Fault] = ()) -> Cluster:
        """The cluster with other workers and more faults. A lasting slow-down of a worker replaces
        its old one."""
        replaced = {(fault.kind, fault.worker) for fault in faults if fault.is_trait}
        kept = [f for f in self.faults if not f.is_trait or (f.kind, f.worker) not in replaced]
        count = self.workers if workers is None else workers
        price = self.price if count == self.workers else self.price.for_workers(count)
        return dataclasses.replace(self, workers=count, faults=(*kept, *faults), price=price)

    def fastest_alone(self) -> Cluster:
        """One worker by itself, as fast as the fastest of these, on which nothing breaks."""
        slow = {f.worker: f for f in self.faults if f.kind == "slow" and f.is_trait}
        least = min(range(self.workers), key=lambda rank: slow[rank].amount if rank in slow else 1)
        kept = (dataclasses.replace(slow[least], worker=0),) if least in slow else ()
        return dataclasses.replace(self, workers=1, faults=kept)

    def at_batch(self, batch: int) -> Cluster:
        """The cluster on which every gradient takes as long as one of so many samples."""
        return dataclasses.replace(self, compute=self.compute.at(batch))

    def machine_of(self, rank: int) -> int:
        return rank // self.workers_per_machine

    @property
    def machines(self) -> int:
        """The machines of workers."""
        return self.machine_of(self.workers - 1) + 1

    def rack_of(self, machine: int) -> int:
        return machine // self.machines_per_rack if self.machines_per_rack else 0

    def site_of(self, machine: int) -> int:
        return self.sites.site_of(machine, self.machines)

    @property
    def has_flows(self) -> bool:
        """Whether collectives share links with messages: where asked for, and where any link is
        described that a formula about equal cards does not know."""
        wires = self.network
        own = (wires.up, wires.down, wires.uplink, wires.processor_share, self.sites.names)
        return wires.collectives == FLOWS or any(own) or self.background.is_there

    def with_bandwidth_times(self, factor: float) -> Cluster:
        """The cluster with every link so many times as fast."""
        network, sites = self.network.times(factor), self.sites.times(factor)
        return dataclasses.replace(self, network=network, sites=sites)

    def as_dict(self) -> dict[str, Any]:
        """The resolved description, as `load_cluster` reads it."""
        described = dataclasses.asdict(self)
        described["faults"] = [str(fault) for fault in self.faults]
        described["price"] = self.price.as_dict()
        for name, unused in (
            ("price", Price()),
            ("sites", Sites()),
            ("background", Background()),
            ("phases", Phases()),
            ("failures", Failures()),
            ("compression", {}),
        ):
            if getattr(self, name) == unused:
                del described[name]
        return described


def clusters() -> dict[str, str]:
    """The presets that come with the package, with their one-line descriptions."""
    found: dict[str, str] = {}
    for entry in sorted(resources.files("gossamer.config").joinpath("clusters").iterdir(), key=str):
        if entry.name.endswith(".toml"):
            described = tomllib.loads(entry.read_text(encoding="utf-8"))
            found[entry.name.removesuffix(".toml")] = str(described.get("title", ""))
    return found


def load_cluster(name: str | Path | Cluster) -> Cluster:
    """A preset by name, or a TOML file by path."""
    if isinstance(name, Cluster):
        return name
    text, folder = str(name), None
    if text.endswith(".toml") or "/" in text:
        folder = Path(text).parent
        try:
            source, stem = Path(text).read_text(encoding="utf-8"), Path(text).stem
        except FileNotFoundError:
            raise ConfigurationError(f"cluster file {text!r} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigurationError(f"cluster file {text!r} cannot be read: {reason}") from None
    else:
        if text not in clusters():
            raise unknown_name("cluster", text, clusters())
        entry = resources.files("gossamer.config").joinpath("clusters", f"{text}.toml")
        source, stem = entry.read_text(encoding="utf-8"), text
    try:
        described = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"cluster {text!r} is not valid TOML: {error}") from None
    return cluster_from({"name": stem, **described}, folder)


def cluster_from(described: Mapping[str, Any], folder: Path | None = None) -> Cluster:
    """A cluster from the tables of a TOML file; every unknown key is refused. Files that it names
    are looked for in `folder`."""
    top = dict(described)
    computing = _table(top, "compute")
    if "per_sample" in computing and "seconds" not in computing:
        raise ConfigurationError(
            "[compute] has per_sample without seconds, the part of a step that no sample adds to; "
            "give both, seconds = 0 if there is no such part"
        )
    compute = _section(Compute, computing, "compute")
    network = _section(Wires, _table(top, "network"), "network")
    faults = [
        parse_fault(kind, f"{rank}={factor}")
        for key, kind in (("slow", "slow"), ("slow_link", "slow-link"))
        for rank, factor in _table(top, key).items()
    ]
    lines = top.pop("faults", [])
    if not isinstance(lines, list):
        raise ConfigurationError(f"faults must be a list such as ['kill 3@2.5s'], got {lines!r}")
    faults += [read_fault(str(line)) for line in cast(list[object], lines)]
    background = with_trace(_table(top, "background"), folder)
    parts = {
        "compute": compute, "network": network, "faults": tuple(faults),
        "sites": read_sites(_table(top, "sites")), "price": read_price(_table(top, "price")),
        "background": _section(Background, background, "background"),
        "phases": _section(Phases, _table(top, "phases"), "phases"),
        "failures": _section(Failures, _table(top, "failures"), "failures"),
        "compression": check_times(_table(top, "compression")),
    }  # fmt: skip
    return _section(Cluster, top | parts, "cluster")


def _table(top: dict[str, Any], key: str) -> Mapping[str, Any]:
    found = top.pop(key, {})
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{key} must be a table of keys and values, got {found!r}")
    return cast(Mapping[str, Any], found)


_BANDWIDTHS = ("bandwidth", "memory_bandwidth", "server_bandwidth", "up", "down", "uplink")
_TIMES = (
    "latency", "rack_latency", "retransmission", "seconds", "per_sample", "unoverlapped_seconds",
    "pause_seconds", "failure_detection", "deadline", "every", "lasts", "repeat", "jitter_lasts",
    "mtbf", "repair", "checkpoint", "restart",
)  # fmt: skip


def _section(cls: type[Any], given: Mapping[str, Any], where: str) -> Any:
    known = {entry.name for entry in dataclasses.fields(cls)}
    default = cls()
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise unknown_name(f"key of [{where}]", key, known)
        usual = getattr(default, key)
        if key in _BANDWIDTHS:
            # 0 is allowed where it is the default: inside a machine and for servers.
            value = bytes_per_second(value, key) if value or usual else 0.0
        elif key in _TIMES:
            value = seconds(value, key)
        elif key == "memory":
            value = float(size_in_bytes(value, key)) if value else 0.0
        elif type(value) is not type(usual) and (type(value), type(usual)) != (int, float):
            expected = type(usual).__name__
            raise ConfigurationError(f"[{where}] {key} must be of type {expected}, got {value!r}")
        values[key] = value
    return cls(**values)
