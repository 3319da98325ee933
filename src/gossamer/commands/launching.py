"""The options of the commands that start real workers, and how they become a launch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from gossamer.commands import options as given
from gossamer.config.faults import parse_fault
from gossamer.errors import ConfigurationError
from gossamer.quantities import bytes_per_second, seconds
from gossamer.real.faults.injection import Injection, Kill, Pause
from gossamer.real.faults.links import Links, Spell

CountOption = Annotated[
    int, typer.Option("-n", "--workers", help="Workers on this host, a process each.")
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--workers",
        help="A process each on this host: 2, or as many as torchrun or mpirun has started.",
    ),
]
TransportOption = Annotated[
    str | None, typer.Option("--transport", help="shm or torch; by default what suits.")
]
AnyTransportOption = Annotated[
    str | None,
    typer.Option(
        "--transport", help="shm, torch or, under mpirun and srun, mpi; by default what suits."
    ),
]
AlwaysSlowOption = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="WORKER=FACTOR", help="Slow this worker down by FACTOR: 0=4."),
]
OutputOption = Annotated[
    str,
    typer.Option("--output", help="labelled; rank0 shows worker 0 only; folder: a file for each."),
]
TolerateOption = Annotated[
    bool,
    typer.Option(
        "--tolerate-deaths", help="A worker killed by a signal is no failure if the others finish."
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="TIME",
        parser=lambda text: seconds(text, "--deadline"),
        help="After this time print who waits for what, and exit with code 3: 90s, 5m.",
    ),
]
HostsOption = Annotated[int, typer.Option("--nnodes", help="How many hosts take part.")]
HostOption = Annotated[int, typer.Option("--node-rank", help="Which of them this is.")]
RendezvousOption = Annotated[
    str | None,
    typer.Option("--rendezvous", metavar="HOST:PORT", help="Where they meet: node 0's."),
]
SecretFileOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", help="By what several hosts know each other; else in GOSSAMER_SECRET."
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(
        "--patience",
        metavar="TIME",
        parser=lambda text: seconds(text, "--patience"),
        help="How long hosts wait for each other: 90s, 5m.",
    ),
]


BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--bandwidth", metavar="BANDWIDTH", help="Every worker's card carries no more: 100Mbit."
    ),
]
LatencyOption = Annotated[
    str | None,
    typer.Option("--latency", metavar="TIME", help="Every message takes at least so long: 1ms."),
]
DropOption = Annotated[list[str] | None, typer.Option("--drop", hidden=True)]
PartitionOption = Annotated[list[str] | None, typer.Option("--partition", hidden=True)]
_UNKNOWN = {
    "drop": "real transports lose no message, and what a lost packet costs them is time; use "
    "--delay, or gossamer simulate",
    "partition": "real workers have no deadline after which one that they cannot reach counts as "
    "lost; use --delay for a while, or gossamer simulate",
}


@dataclass(frozen=True)
class RealFaults:
    """What the fault options of a command line said, for real workers."""

    injection: Injection = field(default_factory=Injection)
    lines: tuple[str, ...] = ()
    """As a simulated cluster writes them."""


def with_faults(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the fault options of real workers; it gets them as `faults`."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> int:
        own = {name: options.pop(name) for name in _OPTIONS}
        return command(*arguments, faults=faults_of(**own), **options)

    known = list(inspect.signature(command, eval_str=True).parameters.values())
    at = next(number for number, parameter in enumerate(known) if parameter.name == "faults")
    known[at : at + 1] = [
        inspect.Parameter(name, known[at].kind, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    cast(Any, wrapped).__signature__ = inspect.Signature(known)
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in known}
    return wrapped


_OPTIONS: dict[str, Any] = {
    "slow": AlwaysSlowOption,
    "pause": given.PauseOption,
    "kill": given.KillOption,
    "bandwidth": BandwidthOption,
    "latency": LatencyOption,
    "slow_link": given.SlowLinkOption,
    "delay": given.DelayOption,
    "drop": DropOption,
    "partition": PartitionOption,
}
_Texts = Sequence[str] | None


def faults_of(
    *, slow: _Texts = None, pause: _Texts = None, kill: _Texts = None,
    bandwidth: str | None = None, latency: str | None = None, slow_link: _Texts = None,
    delay: _Texts = None, **unknown: _Texts,
) -> RealFaults:  # fmt: skip
    for kind, texts in unknown.items():
        if texts:
            raise ConfigurationError(f"--{kind} is simulated only: {_UNKNOWN[kind]}")
    asked = {"slow": slow, "pause": pause, "kill": kill, "slow-link": slow_link, "delay": delay}
    parsed = {kind: [parse_fault(kind, t) for t in texts or ()] for kind, texts in asked.items()}
    for fault in parsed["slow"]:
        if not fault.is_trait:
            raise ConfigurationError(
                f"a real worker is slow from the start to the end, got --{fault}; write it as "
                f"{fault.worker}={fault.amount:g}"
            )
    links = Links(
        math.inf if bandwidth is None else bytes_per_second(bandwidth, "--bandwidth"),
        0.0 if latency is None else seconds(latency, "--latency"),
        tuple(Spell(f.amount, f.at, f.lasts, f.worker) for f in parsed["slow-link"]),
        tuple(Spell(f.amount, f.at, f.lasts) for f in parsed["delay"]),
    )
    injection = Injection(
        {fault.worker: fault.amount for fault in parsed["slow"]},
        [Pause(fault.worker, fault.at, fault.lasts) for fault in parsed["pause"]],
        [Kill(fault.worker, fault.at) for fault in parsed["kill"]],
        links,
    )
    return RealFaults(injection, tuple(str(f) for faults in parsed.values() for f in faults))
