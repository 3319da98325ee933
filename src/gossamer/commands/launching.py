"""The options of the commands that start real workers, and how they become a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from gossamer.errors import ConfigurationError
from gossamer.real.injection import Injection, Kill, Pause
from gossamer.sim.faults import FOREVER, parse_fault

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
AlwaysSlowOption = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="WORKER=FACTOR", help="It computes so many times slower."),
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
        "--deadline", metavar="SECONDS", help="Then say who waits for what, and end with 3."
    ),
]
HostsOption = Annotated[int, typer.Option("--nnodes", help="How many hosts take part.")]
HostOption = Annotated[int, typer.Option("--node-rank", help="Which of them this is.")]
RendezvousOption = Annotated[
    str | None,
    typer.Option("--rendezvous", metavar="HOST:PORT", help="Where they meet: node 0's."),
]
PatienceOption = Annotated[
    float,
    typer.Option("--patience", metavar="SECONDS", help="How long hosts wait for each other."),
]


def injection_of(
    slow: Sequence[str] | None, pause: Sequence[str] | None, kill: Sequence[str] | None
) -> Injection:
    """The fault options of a command line, for real workers."""
    factors: dict[int, float] = {}
    for text in slow or ():
        fault = parse_fault("slow", text)
        if fault.at > 0 or fault.lasts != FOREVER:
            raise ConfigurationError(
                f"a real worker is slow from the start to the end, got --slow {text}; write it as "
                f"{fault.worker}={fault.amount:g}"
            )
        factors[fault.worker] = fault.amount
    pauses = [parse_fault("pause", text) for text in pause or ()]
    kills = [parse_fault("kill", text) for text in kill or ()]
    return Injection(
        factors,
        [Pause(fault.worker, fault.at, fault.lasts) for fault in pauses],
        [Kill(fault.worker, fault.at) for fault in kills],
    )
