"""`gossamer.probe`: measure these machines, and describe them as a cluster."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gossamer.commands.work.answer import Answer, shows_progress
from gossamer.compression.coding_times import measure_all
from gossamer.config.cluster import Cluster
from gossamer.config.settings import loaded_task, make_settings
from gossamer.errors import ConfigurationError
from gossamer.files import replace_text
from gossamer.observe.progress import LiveView, is_watched, warn
from gossamer.own_code import absolute, check_main_guard
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
from gossamer.tasks import Task

_LEAST_S = 1.0
_MOST_S = 3600.0


class Measurement(Answer):
    """What was measured, and the cluster that describes it to every function that takes one."""

    def __init__(self, findings: ProbeFindings, name: str) -> None:
        self.findings = findings
        self.cluster: Cluster = describe(findings, name)

    @property
    def title(self) -> str:
        return self.cluster.title

    @property
    def notices(self) -> list[str]:
        """What a reader of the description must know."""
        return notices(self.findings)

    def table(self) -> list[dict[str, Any]]:
        """One dictionary for each worker."""
        found, speeds = self.findings, speeds_of(self.findings)
        return [
            {
                "worker": rank,
                "host": found.hosts[rank].partition("/")[0],
                "gradient_seconds": speeds.medians[rank],
                "low": spread(steps.compute)[0],
                "high": spread(steps.compute)[1],
                "times_the_typical": speeds.factors[rank],
            }
            for rank, steps in enumerate(found.steps)
        ]

    def as_dict(self) -> dict[str, Any]:
        """All findings, with the single steps summarised."""
        told = self.findings.as_dict()
        told["steps"] = [
            {
                "count": steps.count,
                "median": statistics.median(steps.compute),
                "low": spread(steps.compute)[0],
                "high": spread(steps.compute)[1],
                "other_mean": statistics.fmean(steps.other),
            }
            for steps in self.findings.steps
        ]
        return {"cluster": self.cluster.as_dict(), "notices": self.notices, "findings": told}

    def measure_compression(self) -> None:
        """Measure what every compressor takes here, with the threads of the workers; what the
        cluster knows is charged in virtual time."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.findings.inquiry.threads)
        try:
            times = {
                entry: (float(f"{encode:.3g}"), float(f"{decode:.3g}"))
                for entry, (encode, decode) in measure_all().items()
            }
        finally:
            torch.set_num_threads(before)
        self.cluster = dataclasses.replace(self.cluster, compression=times)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the description, a .toml file that every command takes; return its path."""
        place = Path(path)
        check_place(place, force=force)
        write(place, to_toml(self.cluster, self.findings), force=force)
        return place

    def _shown(self) -> tuple[Table, list[str]]:
        links = [line for line in (self.sizes_told(), self.links_told()) if line]
        told = [*links, *(f"note: {notice}" for notice in self.notices)]
        return self.worker_table(), told or [self.title]

    def _draw(self, place: Path) -> bool:
        return False

    def worker_table(self) -> Table:
        """A row for each worker: how long its gradients take."""
        table = Table(title=self.cluster.title, title_justify="left")
        for column in ("worker", "host", "a gradient", "nine of ten", "times the typical"):
            table.add_column(column, justify="left" if column == "host" else "right")
        for row in self.table():
            table.add_row(
                str(row["worker"]), row["host"], show_time(row["gradient_seconds"]),
                f"{show_time(row['low'])} to {show_time(row['high'])}",
                f"{row['times_the_typical']:.2f}",
            )  # fmt: skip
        return table

    def sizes_told(self) -> str:
        """How the time of a gradient follows the batch; empty where one size was measured."""
        line, compute = measured_line(self.findings), self.cluster.compute
        if line is None:
            return ""
        return (
            f"a gradient: {show_time(compute.seconds)} and {show_time(compute.per_sample)} a "
            f"sample, from batches of {', '.join(map(str, line.times))} (misses their medians by "
            f"at most {100 * line.error:.0f} %)"
        )

    def links_told(self) -> str:
        """What the links carry, alone and crowded; empty where none was measured."""
        links = measured_as_network(self.findings)
        if not links:
            return ""
        rate = statistics.median(link.bandwidth for link in links)
        delay = statistics.median(link.latency for link in links)
        return f"links alone: {show_rate(rate)} per second, {show_time(delay)}; " + "; ".join(
            f"{crowd.senders} at once, {crowd.pattern.replace('_', ' ')}: "
            f"{show_rate(statistics.median(crowd.rates.values()))} each"
            for crowd in self.findings.crowds
        )


def probe(
    task: str | Task = "digits-mlp",
    workers: int | None = None,
    *,
    transport: str | None = None,
    seconds: str | float = 20.0,
    faults: FaultPlan | None = None,
    batch: int | None = None,
    threads: int = 1,
    compression: bool = False,
    name: str = "measured",
    progress: bool | None = None,
    data: Path | str | None = None,
) -> Measurement:
    """Measure gradients of a task and the links between workers, and describe them as a cluster.

    It starts so many processes of this machine (2), which make the task themselves, from its name:
    a `Task` of your own must be a global name of a file, as for `train`. Under torchrun, mpirun,
    srun or `gossamer run` every process calls this, and all get the answer. With `compression` each
    process measures the compressors, too.

        here = gossamer.probe(workers=4)
        gossamer.compare(methods=["all_reduce", "ad_psgd"], cluster=here.cluster)
        here.save("here.toml")
    """
    planned = PlannedProbe(
        task, workers, transport=transport, seconds=seconds, faults=faults, batch=batch,
        threads=threads, data=data,
    )  # fmt: skip
    found = planned.run(name, is_shown=shows_progress(progress))
    if compression:
        found.measure_compression()
    return found


class PlannedProbe:
    """A probe that was checked; nothing has been started yet."""

    def __init__(
        self,
        task: str | Task,
        workers: int | None,
        *,
        transport: str | None,
        seconds: str | float,
        faults: FaultPlan | None,
        batch: int | None,
        threads: int,
        data: Path | str | None,
    ) -> None:
        check_main_guard("probe")
        self.job = job_around()
        self._workers = number_of_workers(workers, self.job)
        self._transport, self._faults = transport, faults or FaultPlan()
        length = duration(seconds, "--seconds")
        if not _LEAST_S <= length <= _MOST_S:
            raise ConfigurationError(
                f"--seconds must be from {_LEAST_S:g} to {_MOST_S:g}, got {length:g}"
            )
        made = loaded_task(task, data).importable()
        settings = make_settings(
            made, "ensemble", Cluster(workers=self._workers), batch=batch, threads=threads
        )
        check(self._workers, transport, self._faults)
        assert settings.batch
        assert settings.learning_rate
        assert settings.optimiser
        self._inquiry = Inquiry(
            absolute(made.spec), None if made.data is None else str(made.data), settings.batch,
            settings.learning_rate, settings.optimiser, threads, length,
        )  # fmt: skip

    @property
    def is_silent(self) -> bool:
        """Whether this is a worker of another launcher's job in which only worker 0 speaks."""
        return self.job is not None and self.job.rank != 0

    def run(self, name: str, *, is_shown: bool) -> Measurement:
        """Measure. Under another launcher all workers get the answer, and worker 0 shows how far
        it is."""
        with ExitStack() as stack:
            show = _ignore
            if is_shown and not self.is_silent:
                show = stack.enter_context(ProbeView(self._inquiry.seconds)).show
            findings = run_probe(self._inquiry, self._workers, self._transport, self._faults, show)
        return Measurement(findings, name)


def _ignore(share: float, what: str) -> None:
    pass


class ProbeView:
    """Shows a bar where somebody watches, else a line for each phase, and at most one a second."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._phase = self._last = ""
        self._shown = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), auto_refresh=False
        )
        self._task = self._bar.add_task("starting the workers", total=1.0)
        self._view = LiveView(self._bar.get_renderable)

    def __enter__(self) -> ProbeView:
        self._view.__enter__()
        if not is_watched():
            warn(f"measuring for about {self._seconds:g} s")
        return self

    def __exit__(self, *error: object) -> None:
        self._view.__exit__(*error)

    def show(self, share: float, what: str) -> None:
        if is_watched():
            self._bar.update(self._task, completed=share, description=what)
            self._view.changed()
            return
        phase, now = what.partition(",")[0], time.monotonic()
        if what != self._last and (phase != self._phase or now - self._shown > 1.0):
            self._phase, self._last, self._shown = phase, what, now
            warn(f"[{100 * share:3.0f} %] {what}")


def check_place(
    path: Path, *, force: bool, option: str = "--out", ending: str = ".toml", what: str = "cluster"
) -> None:
    """Refuse a place that could not be written to, before anything is measured."""
    if path.is_dir():
        raise ConfigurationError(f"{option} {path} is a folder; give the name of a file in it")
    if path.suffix != ending:
        raise ConfigurationError(
            f"{option} must end in {ending}, which is how a {what}'s file is recognised, got {path}"
        )
    if path.exists() and not force:
        raise ConfigurationError(
            f"{path} exists; give --force to replace it, or another name with {option}"
        )
    try:
        # Only trying tells whether the folder is writable; a temporary file leaves nothing behind.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"nothing can be written to {path.parent.absolute()}: {error.strerror or error}; "
            f"choose another place with {option}"
        ) from None


def write(path: Path, text: str, *, force: bool) -> None:
    """Write the file as a whole; do not replace a file that somebody else wrote meanwhile."""
    if path.exists() and not force:
        raise ConfigurationError(
            f"{path} was made by somebody else meanwhile; probe again with another --out"
        )
    replace_text(path, text)
