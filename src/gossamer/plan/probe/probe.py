"""A probe from its launch to its findings, with workers of our own or as one of another job."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError, RunFailed
from gossamer.plan.probe.channel import PATIENCE_S
from gossamer.plan.probe.conductor import Progress, conduct, take_part
from gossamer.plan.probe.findings import Inquiry, ProbeFindings
from gossamer.plan.probe.program import FOLDER, INQUIRY
from gossamer.real.faults.injection import Injection
from gossamer.real.launch.environment import LAUNCHERS, Environment, connect, discover
from gossamer.real.launch.launcher import Launch, Launcher
from gossamer.real.train.job import FileEntries
from gossamer.real.train.starting import program_of
from gossamer.real.transports.local import LocalTransport

DEFAULT_WORKERS = 2
_PROGRAM = program_of("gossamer.plan.probe.program")
_LOOK_S = 0.1
_INTERRUPTED = 130


def job_around() -> Environment | None:
    """The job that this process is a worker of, whoever started it."""
    here = discover()
    return None if here.kind == "alone" else here


def number_of_workers(asked: int | None) -> int:
    """As asked, as many as the launcher around this process has started, or two."""
    here = job_around()
    if here is None:
        if asked is not None and asked < 1:
            raise ConfigurationError(f"-n must be at least 1, got {asked}")
        return DEFAULT_WORKERS if asked is None else asked
    if asked not in (None, here.size):
        raise ConfigurationError(
            f"{LAUNCHERS[here.kind]} has started {here.size} workers, got -n {asked}; leave it out"
        )
    return here.size


def check(workers: int, transport: str | None, injection: Injection) -> None:
    """Refuse what could not be started."""
    if job_around() is not None:
        injection.check(workers)
        return
    if transport == "mpi":
        raise ConfigurationError(
            f"the mpi transport needs workers started by MPI; run `mpirun -n {workers} gossamer "
            "probe`"
        )
    Launch(_PROGRAM, workers, transport=transport, injection=injection)


def probe(
    inquiry: Inquiry, workers: int, transport: str | None, injection: Injection,
    on_progress: Progress,
) -> ProbeFindings | None:  # fmt: skip
    """What was found; None on a worker of another launcher's job that is not its first."""
    if job_around() is not None:
        return _take_part(inquiry, transport, injection, on_progress)
    with tempfile.TemporaryDirectory(prefix="gossamer-probe-") as name:
        plan = Launch(
            _PROGRAM, workers, transport=transport, injection=injection, tolerates_deaths=True,
            deadline_s=inquiry.seconds + 3 * PATIENCE_S,
            environment={
                INQUIRY: inquiry.to_json(), FOLDER: name,
                "OMP_NUM_THREADS": str(inquiry.threads),
            },
        )  # fmt: skip
        launcher = Launcher(plan)
        with _Reader(Path(name), on_progress) as reader:
            try:
                status = launcher.run()
            except OSError as error:
                raise ConfigurationError(
                    f"the workers cannot be started over {plan.chosen_transport}: "
                    f"{error.strerror or error}; `gossamer doctor` says what is missing, "
                    "and --transport chooses another"
                ) from error
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if reader.found is None:
            bad = next((str(end) for end in launcher.ended if end.status != 0), "the workers ended")
            raise RunFailed(reader.failure or f"{bad} before all was measured; nothing was written")
        return ProbeFindings.from_dict(reader.found)


def _take_part(
    inquiry: Inquiry, name: str | None, injection: Injection, on_progress: Progress
) -> ProbeFindings | None:
    if injection.slow:
        os.environ["GOSSAMER_FAULTS"] = injection.to_json()
    try:
        transport = connect(name) or LocalTransport()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigurationError(
            f"this worker cannot reach the others: {reason}; see that the hosts find each other "
            "by name and that no firewall is between them, and try `gossamer doctor --try`"
        ) from error
    if transport.rank != 0:
        take_part(transport, inquiry)
        return None
    return conduct(transport, inquiry, on_progress)


class _Reader:
    """Reads what worker 0 writes down while it conducts."""

    def __init__(self, folder: Path, on_progress: Progress) -> None:
        self._entries = FileEntries(folder, 0)
        self._on_progress = on_progress
        self._over = threading.Event()
        self.found: dict[str, Any] | None = None
        self.failure: str | None = None
        """What worker 0 gave up over."""

    def __enter__(self) -> _Reader:
        self._thread = threading.Thread(target=self._follow, name="gossamer probe", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._catch_up()

    def _follow(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._catch_up()

    def _catch_up(self) -> None:
        for entry in self._entries.new():
            kind = entry.pop("kind")
            if kind == "progress":
                self._on_progress(entry["share"], entry["what"])
            elif kind == "failure":
                self.failure = entry["sentence"]
            else:
                self.found = entry
