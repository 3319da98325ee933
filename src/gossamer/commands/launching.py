"""The options of the commands that start real workers, and how they become a launch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from gossamer.commands import options as given
from gossamer.config.faults import parse_faults
from gossamer.quantities import bytes_per_second, seconds
from gossamer.real.faults.fault_plan import FaultPlan

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


def with_faults(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the fault options of real workers; it gets a `FaultPlan` as `faults`."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> int:
        own = {name: options.pop(name) for name in _OPTIONS}
        return command(*arguments, faults=fault_plan(**own), **options)

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


def fault_plan(
    *, bandwidth: str | None = None, latency: str | None = None, **texts: Sequence[str] | None
) -> FaultPlan:
    """What the fault options of a command line ask of real workers."""
    return FaultPlan(
        parse_faults(**texts),
        math.inf if bandwidth is None else bytes_per_second(bandwidth, "--bandwidth"),
        0.0 if latency is None else seconds(latency, "--latency"),
    )
