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
from typing import Any

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import bytes_per_second, seconds
from gossamer.sim.collectives import COLLECTIVES
from gossamer.sim.faults import Fault, parse_fault

DISTRIBUTIONS = ("constant", "normal", "lognormal", "uniform", "exponential")


@dataclass(frozen=True)
class Compute:
    """How long one gradient takes."""

    seconds: float = 0.010
    distribution: str = "normal"
    jitter: float = 0.05
    """Standard deviation over mean; ignored by constant and exponential."""
    unoverlapped_seconds: float = 0.0
    """Copying and applying after each gradient: not scaled by slow-downs, hidden by nothing."""
    forward_share: float = 1 / 3
    """The part of the time before the first bucket can be ready."""
    pause_probability: float = 0.0
    pause_seconds: float = 0.0
    """A straggler that strikes at random: with that probability a step takes that much longer."""

    def draw(self, rng: random.Random) -> float:
        """One compute time, before slow-downs."""
        mean, spread = self.seconds, self.jitter
        match self.distribution:
            case "constant":
                value = mean
            case "normal":
                value = max(0.1 * mean, rng.gauss(mean, spread * mean))
            case "lognormal":
                # Parameters chosen so that mean and standard deviation are the ones asked for.
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
    """Of a server's own card; 0 means like everybody's."""
    rack_latency: float = 0.0
    """Added when a message leaves its rack."""
    oversubscription: float = 1.0
    """A byte that leaves its rack costs this many times its time on both cards."""
    retransmission: float = 0.2
    """How long until a dropped message is sent again."""


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
    failure_detection: float = 0.05
    """How long until the others learn of a death."""
    deadline: float = 10.0
    """How long a peer may stay unreachable before it counts as lost."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"workers must be at least 1, got {self.workers}")
        if self.workers_per_machine < 1:
            raise ConfigurationError(
                f"workers_per_machine must be at least 1, got {self.workers_per_machine}"
            )
        if self.compute.distribution not in DISTRIBUTIONS:
            raise unknown_name("distribution", self.compute.distribution, DISTRIBUTIONS)
        if self.compute.seconds <= 0 or self.compute.jitter < 0:
            raise ConfigurationError(
                "compute needs seconds above 0 and jitter of at least 0, got "
                f"seconds={self.compute.seconds:g}, jitter={self.compute.jitter:g}"
            )
        if self.network.collective not in COLLECTIVES:
            raise unknown_name("collective", self.network.collective, COLLECTIVES)
        for fault in self.faults:
            ranks = {fault.worker} if fault.worker >= 0 else frozenset().union(*fault.sides)
            if any(rank >= self.workers for rank in ranks):
                raise ConfigurationError(
                    f"the fault '{fault}' names worker {max(ranks)}, but the {self.workers} "
                    f"workers are numbered 0 to {self.workers - 1}"
                )

    def changed(self, *, workers: int | None = None, faults: Sequence[Fault] = ()) -> Cluster:
        """With other workers and more faults; a lasting slow-down replaces the old one."""
        replaced = {(fault.kind, fault.worker) for fault in faults if fault.is_trait}
        kept = [f for f in self.faults if not f.is_trait or (f.kind, f.worker) not in replaced]
        return dataclasses.replace(
            self, workers=self.workers if workers is None else workers, faults=(*kept, *faults)
        )

    def machine_of(self, rank: int) -> int:
        return rank // self.workers_per_machine

    def rack_of(self, machine: int) -> int:
        return machine // self.machines_per_rack if self.machines_per_rack else 0

    def as_dict(self) -> dict[str, Any]:
        """The resolved description, as `load_cluster` reads it."""
        described = dataclasses.asdict(self)
        described["faults"] = [str(fault) for fault in self.faults]
        return described


def clusters() -> dict[str, str]:
    """The presets that come with the package, with their one-line descriptions."""
    found: dict[str, str] = {}
    for entry in sorted(resources.files("gossamer.sim").joinpath("clusters").iterdir(), key=str):
        if entry.name.endswith(".toml"):
            described = tomllib.loads(entry.read_text(encoding="utf-8"))
            found[entry.name.removesuffix(".toml")] = str(described.get("title", ""))
    return found


def load_cluster(name: str | Path | Cluster) -> Cluster:
    """A preset by name, or a TOML file by path."""
    if isinstance(name, Cluster):
        return name
    text = str(name)
    if text.endswith(".toml") or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise ConfigurationError(f"cluster file {text!r} does not exist")
        source, stem = path.read_text(encoding="utf-8"), path.stem
    else:
        if text not in clusters():
            raise unknown_name("cluster", text, clusters())
        entry = resources.files("gossamer.sim").joinpath("clusters", f"{text}.toml")
        source, stem = entry.read_text(encoding="utf-8"), text
    try:
        described = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"cluster {text!r} is not valid TOML: {error}") from None
    return cluster_from({"name": stem, **described})


def cluster_from(described: Mapping[str, Any]) -> Cluster:
    """A cluster from the tables of a TOML file; every unknown key is refused."""
    top = dict(described)
    compute = _section(Compute, top.pop("compute", {}), "compute")
    network = _section(Wires, top.pop("network", {}), "network")
    faults: list[Fault] = []
    for rank, factor in dict(top.pop("slow", {})).items():
        faults.append(parse_fault("slow", f"{rank}={factor}"))
    for rank, factor in dict(top.pop("slow_link", {})).items():
        faults.append(parse_fault("slow-link", f"{rank}={factor}"))
    for line in list(top.pop("faults", [])):
        kind, _, rest = str(line).partition(" ")
        faults.append(parse_fault(kind, rest))
    rest = _section(Cluster, top, "cluster")
    return dataclasses.replace(rest, compute=compute, network=network, faults=tuple(faults))


_BANDWIDTHS = ("bandwidth", "memory_bandwidth", "server_bandwidth")
_TIMES = (
    "latency", "rack_latency", "retransmission", "seconds", "unoverlapped_seconds",
    "pause_seconds", "failure_detection", "deadline",
)  # fmt: skip


def _section(cls: type[Any], given: Mapping[str, Any], where: str) -> Any:
    known = {entry.name: entry for entry in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise unknown_name(f"key of [{where}]", key, known)
        if key in _BANDWIDTHS:
            value = bytes_per_second(value, key) if value else 0.0
        elif key in _TIMES:
            value = seconds(value, key)
        elif not isinstance(value, type(getattr(cls(), key))) and not (
            isinstance(value, int) and isinstance(getattr(cls(), key), float)
        ):
            expected = type(getattr(cls(), key)).__name__
            raise ConfigurationError(f"[{where}] {key} must be of type {expected}, got {value!r}")
        values[key] = value
    return cls(**values)
