"""A probe from its launch to its findings, with workers of its own or inside another job."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

from gossamer.errors import ConfigurationError, RunFailed
from gossamer.plan.probe.channel import PATIENCE_S
from gossamer.plan.probe.conductor import Progress, conduct, take_part
from gossamer.plan.probe.findings import Inquiry, ProbeFindings
from gossamer.plan.probe.program import FOLDER, INQUIRY
from gossamer.real.faults.fault_plan import FAULTS_VARIABLE, FaultPlan
from gossamer.real.launch.environment import Environment, connect, discover
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.train.worker_log import FileEntries, LogReader
from gossamer.real.train.worker_main import INTERRUPTED, program_of
from gossamer.real.transports.local import LocalTransport
from gossamer.runs.result import Row

_PROGRAM = program_of("gossamer.plan.probe.program")


def job_around() -> Environment | None:
    """The job of torchrun, mpirun or another launcher to which this process belongs, if any."""
    here = discover()
    return None if here.kind == "alone" else here


def check(workers: int, transport: str | None, faults: FaultPlan) -> None:
    """Refuse a probe that could not be started."""
    if job_around() is not None:
        faults.check(workers)
    else:
        _launch_of(workers, transport, faults)


def _launch_of(workers: int, transport: str | None, faults: FaultPlan) -> Launch:
    return Launch(
        _PROGRAM, workers, transport=transport, faults=faults, tolerates_deaths=True,
        under_mpirun="gossamer probe",
    )  # fmt: skip


def probe(
    inquiry: Inquiry, workers: int, transport: str | None, faults: FaultPlan,
    on_progress: Progress,
) -> ProbeFindings:  # fmt: skip
    """Start the workers, or be one of another launcher's job, and return the findings."""
    if job_around() is not None:
        return _take_part(inquiry, transport, faults, on_progress)
    with tempfile.TemporaryDirectory(prefix="gossamer-probe-") as name:
        plan = dataclasses.replace(
            _launch_of(workers, transport, faults), deadline_s=inquiry.seconds + 3 * PATIENCE_S,
            environment={
                INQUIRY: inquiry.to_json(), FOLDER: name,
                "OMP_NUM_THREADS": str(inquiry.threads),
            },
        )  # fmt: skip
        launcher = Launcher(plan)
        reader = _ProbeReader(Path(name), on_progress)
        with reader:
            try:
                status = launcher.run()
            except OSError as error:
                raise ConfigurationError(
                    f"the workers cannot be started over {plan.chosen_transport}: "
                    f"{error.strerror or error}; `gossamer doctor` says what is missing, "
                    "and --transport chooses another"
                ) from error
        reader.catch_up()
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if reader.found is None:
            bad = next((str(end) for end in launcher.ended if end.status != 0), "the workers ended")
            raise RunFailed(reader.failure or f"{bad} before all was measured; nothing was written")
        return ProbeFindings.from_dict(reader.found)


def _take_part(
    inquiry: Inquiry, name: str | None, faults: FaultPlan, on_progress: Progress
) -> ProbeFindings:
    if faults.faults:
        os.environ[FAULTS_VARIABLE] = faults.to_json()
    try:
        transport = connect(name) or LocalTransport()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigurationError(
            f"this worker cannot reach the others: {reason}; see that the hosts find each other "
            "by name and that no firewall is between them, and try `gossamer doctor --try`"
        ) from error
    if transport.rank != 0:
        found = take_part(transport, inquiry)
        if found is None:
            raise RunFailed("worker 0 gave up before all was measured, and says why")
        return found
    return conduct(transport, inquiry, on_progress)


class _ProbeReader(LogReader):
    """Reads the log that worker 0 writes during the probe."""

    def __init__(self, folder: Path, on_progress: Progress) -> None:
        super().__init__([FileEntries(folder, 0)])
        self._on_progress = on_progress
        self.found: Row | None = None
        self.failure: str | None = None
        """Why worker 0 gave up."""

    def _note(self, rank: int, kind: str, entry: Row) -> None:
        if kind == "progress":
            self._on_progress(entry["share"], entry["what"])
        elif kind == "failure":
            self.failure = entry["sentence"]
        else:
            self.found = entry
