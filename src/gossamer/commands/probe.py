"""`gossamer probe`: measure the machines it is launched on, and describe them as a cluster."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import err, out, print_json, say_line, warn
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, Error
from gossamer.files import replace_text
from gossamer.own_code import absolute
from gossamer.plan.probe import ProbeFindings, describe, to_toml
from gossamer.plan.probe.description import (
    measured_as_network,
    measured_line,
    notices,
    speeds_of,
)
from gossamer.plan.probe.findings import Inquiry
from gossamer.plan.probe.probe import check, job_around
from gossamer.plan.probe.probe import probe as run_probe
from gossamer.plan.probe.toml_text import show_rate, show_time, spread
from gossamer.quantities import seconds as duration
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.launch.environment import number_of_workers
from gossamer.tasks import make_task

_INTERRUPTED = 130
_LEAST_S = 1.0
_MOST_S = 3600.0

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
    job = job_around()
    count = number_of_workers(workers, job)
    if not _LEAST_S <= seconds <= _MOST_S:
        raise ConfigurationError(
            f"--seconds must be from {_LEAST_S:g} to {_MOST_S:g}, got {seconds:g}"
        )
    settings = make_settings(
        make_task(task, data=data), "ensemble", Cluster(workers=count), batch=batch,
        threads=threads,
    )  # fmt: skip
    faults = given.RealFaultOptions(slow=slow).plan()
    check(count, transport, faults)
    is_silent = job is not None and job.rank != 0
    try:
        check_place(file, force=force)
    except ConfigurationError:
        if is_silent:
            return 2  # worker 0 prints the sentence
        raise
    inquiry = _inquiry(settings, task, data, seconds)
    if is_silent:
        return _silently(inquiry, count, transport, faults)
    view = ProbeView(inquiry.seconds)
    try:
        with view:
            findings = run_probe(inquiry, count, transport, faults, view.show)
        assert findings is not None
        cluster = describe(findings, file.stem)
        write(file, to_toml(cluster, findings), force=force)
    except KeyboardInterrupt:
        _stop()
    _show(findings, cluster, file)
    if as_json:
        print_json(_as_json(findings, cluster, file))
    return 0


def check_place(path: Path, *, force: bool) -> None:
    """Refuse a place that could not be written to, before anything is measured."""
    if path.is_dir():
        raise ConfigurationError(f"--out {path} is a folder; give the name of a file in it")
    if path.suffix != ".toml":
        raise ConfigurationError(
            f"--out must end in .toml, which is how a cluster's file is recognised, got {path}"
        )
    if path.exists() and not force:
        raise ConfigurationError(
            f"{path} exists; give --force to replace it, or another name with --out"
        )
    try:
        # Only trying tells whether the folder is writable; a temporary file leaves nothing behind.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"nothing can be written to {path.parent.absolute()}: {error.strerror or error}; "
            "choose another place with --out"
        ) from None


def write(path: Path, text: str, *, force: bool) -> None:
    """Write the file as a whole; do not replace a file that somebody else wrote meanwhile."""
    if path.exists() and not force:
        raise ConfigurationError(
            f"{path} was made by somebody else meanwhile; probe again with another --out"
        )
    replace_text(path, text)


def _inquiry(settings: Settings, task: str, data: Path | None, seconds: float) -> Inquiry:
    assert settings.batch
    assert settings.learning_rate
    assert settings.optimiser
    return Inquiry(
        absolute(task), None if data is None else str(data.resolve()), settings.batch,
        settings.learning_rate, settings.optimiser, settings.threads, seconds,
    )  # fmt: skip


def _silently(
    inquiry: Inquiry, workers: int, transport: str | None, faults: FaultPlan
) -> int:  # fmt: skip
    """Measure as a worker of another launcher's job, in which only worker 0 prints."""
    try:
        run_probe(inquiry, workers, transport, faults, lambda share, what: None)
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


class ProbeView:
    """Shows a bar on a terminal; elsewhere a line for each phase, and at most one a second."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._phase = self._last = ""
        self._shown = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            console=err, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("starting the workers", total=1.0)

    def __enter__(self) -> ProbeView:
        if err.is_terminal:
            self._bar.start()
        else:
            warn(f"measuring for about {self._seconds:g} s")
        return self

    def __exit__(self, *error: object) -> None:
        if err.is_terminal:
            self._bar.stop()

    def show(self, share: float, what: str) -> None:
        if err.is_terminal:
            self._bar.update(self._task, completed=share, description=what)
            return
        phase, now = what.partition(",")[0], time.monotonic()
        if what != self._last and (phase != self._phase or now - self._shown > 1.0):
            self._phase, self._last, self._shown = phase, what, now
            warn(f"[{100 * share:3.0f} %] {what}")


def _show(findings: ProbeFindings, cluster: Cluster, path: Path) -> None:
    speeds = speeds_of(findings)
    table = Table(title=cluster.title, title_justify="left")
    for column in ("worker", "host", "a gradient", "nine of ten", "times the typical"):
        table.add_column(column, justify="left" if column == "host" else "right")
    for rank, steps in enumerate(findings.steps):
        low, high = spread(steps.compute)
        table.add_row(
            str(rank), findings.hosts[rank].partition("/")[0], show_time(speeds.medians[rank]),
            f"{show_time(low)} to {show_time(high)}", f"{speeds.factors[rank]:.2f}",
        )  # fmt: skip
    out.print(table, markup=False)
    if (line := measured_line(findings)) is not None:
        compute = cluster.compute
        say_line(
            f"a gradient: {show_time(compute.seconds)} and {show_time(compute.per_sample)} a "
            f"sample, from batches of {', '.join(map(str, line.times))} (misses their medians by "
            f"at most {100 * line.error:.0f} %)"
        )
    links = measured_as_network(findings)
    if links:
        rate = statistics.median(link.bandwidth for link in links)
        delay = statistics.median(link.latency for link in links)
        say_line(
            f"links alone: {show_rate(rate)} per second, {show_time(delay)}; "
            + "; ".join(
                f"{crowd.senders} at once, {crowd.pattern.replace('_', ' ')}: "
                f"{show_rate(statistics.median(crowd.rates.values()))} each"
                for crowd in findings.crowds
            )
        )
    for notice in notices(findings):
        warn(f"note: {notice}")
    say_line(f"written to {path}; try `gossamer simulate --cluster {path}`")


def _as_json(findings: ProbeFindings, cluster: Cluster, path: Path) -> dict[str, Any]:
    """All findings, with the single steps summarised."""
    told = findings.as_dict()
    told["steps"] = [
        {
            "count": steps.count,
            "median": statistics.median(steps.compute),
            "low": spread(steps.compute)[0],
            "high": spread(steps.compute)[1],
            "other_mean": statistics.fmean(steps.other),
        }
        for steps in findings.steps
    ]
    return {
        "out": str(path), "cluster": cluster.as_dict(), "notices": notices(findings),
        "findings": told,
    }  # fmt: skip
