"""`gossamer probe`: measure the machines it is launched on, and describe them as a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

from gossamer.commands import options as given
from gossamer.commands.console import out, print_json, say_line, warn
from gossamer.commands.work.measurement import Measurement, PlannedProbe, check_place
from gossamer.errors import ConfigurationError, Error
from gossamer.quantities import seconds as duration

_INTERRUPTED = 130

SecondsOption = Annotated[
    float,
    given.shown(
        "How long to measure, all phases together: 20, 90s, 5m.",
        metavar="TIME",
        parser=lambda text: duration(text, "--seconds"),
    ),
]
OutOption = Annotated[
    Path, given.shown("Where the description goes.", "--out", metavar="FILE.toml")
]
ForceOption = Annotated[bool, given.shown("Replace the file if it exists.", "--force")]


def probe(
    workers: given.ProcessesOption = None,
    task: given.TaskOption = "digits-mlp",
    transport: given.AnyTransportOption = None,
    seconds: SecondsOption = 20.0,
    slow: given.AlwaysSlowOption = None,
    batch: given.BatchOption = None,
    threads: given.ThreadsOption = 1,
    data: given.DataOption = None,
    file: OutOption = Path("cluster.toml"),
    force: ForceOption = False,
    compression: Annotated[
        bool, given.shown("Measure every compressor of this machine, too.", "--compression")
    ] = False,
    as_json: given.JsonOption = False,
) -> int:
    """Measure these machines and describe them as a cluster.

    \b
    gossamer probe -n 4 --task digits-mlp --out cluster.toml
    gossamer simulate --cluster cluster.toml --method ad_psgd

    Steps of the task on all workers at once, latency and bandwidth of each pair alone, and of many
    senders at once. To measure several hosts, launch it there as a training would be:

    \b
    torchrun --nnodes 4 --nproc-per-node 1 ... -m gossamer probe
    mpirun -n 4 --host node0,node1,node2,node3 gossamer probe
    gossamer run -n 1 --nnodes 4 --node-rank 0 --rendezvous node0:29400 -m gossamer probe
    """
    planned = PlannedProbe(
        task, workers, transport=transport, seconds=seconds,
        faults=given.RealFaultOptions(slow=slow).plan(), batch=batch, threads=threads, data=data,
    )  # fmt: skip
    try:
        check_place(file, force=force)
    except ConfigurationError:
        if planned.is_silent:
            return 2  # worker 0 prints the sentence
        raise
    if planned.is_silent:
        return _silently(planned)
    try:
        found = planned.run(file.stem, is_shown=True)
        if compression:
            warn("measuring what compressors take")
            found.measure_compression()
        found.save(file, force=force)
    except KeyboardInterrupt:
        _stop()
    _show(found, file)
    if as_json:
        print_json({"out": str(file), **found.as_dict()})
    return 0


def _silently(planned: PlannedProbe) -> int:
    """Measure as a worker of another launcher's job, in which only worker 0 prints."""
    try:
        planned.run("measured", is_shown=False)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except ConfigurationError:
        raise  # worker 0 does not know of this error
    except Error:
        return 1
    return 0


def _stop() -> NoReturn:
    warn("interrupted; nothing was written")
    sys.exit(_INTERRUPTED)


def _show(found: Measurement, path: Path) -> None:
    out.print(found.worker_table(), markup=False)
    for line in filter(None, (found.sizes_told(), found.links_told())):
        say_line(line)
    for notice in found.notices:
        warn(f"note: {notice}")
    say_line(f"written to {path}; try `gossamer simulate --cluster {path}`")
