"""A script in virtual time, as `simulate` and `compare` take it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gossamer.commands.console import say
from gossamer.commands.options import LengthOptions, RunOptions
from gossamer.commands.work.simulations import EngineCache
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.observe.observer import Observer
from gossamer.quantities import seconds
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.script.fork_server import ForkServer
from gossamer.sim.script.scout import Scouted, scout
from gossamer.sim.script.script_settings import Script, ScriptSettings, task_of
from gossamer.sim.script.script_simulation import ScriptSimulation
from gossamer.sim.simulation import Simulation

OUTPUTS = "outputs"
"""In a run folder: what the processes of a script have printed."""
_LOOK_AGAIN = 0.1


class ScriptRuns(EngineCache):
    """The runs of one command: they share a process that has imported torch."""

    def __init__(self, script: Script, *, shows_output: bool, needs_reports: bool = False) -> None:
        super().__init__()
        self._needs_reports = needs_reports
        self._script = script
        self._shows_output = shows_output
        self._scratch = tempfile.TemporaryDirectory(prefix="gossamer-")
        self._shown = contextlib.ExitStack()
        """What worker 0 of the run at hand prints."""
        self._server = ForkServer()
        self.place(None)

    def __enter__(self) -> ScriptRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        self._server.close()
        self._scratch.cleanup()

    def settings(
        self, methods: Sequence[str | None], cluster: Cluster, *, seed: int, compute: str,
        threads: int, model_bytes: int | None,
    ) -> list[ScriptSettings]:  # fmt: skip
        """One for each method; None is the script's own. A run of worker 0 alone says what the
        script leaves to it, so that a bad script is refused before anything is written."""
        if compute not in ("cluster", "measured"):
            seconds(compute, "--compute")
        for method in methods:
            if method is not None:
                parse_method(method).resolve(cluster.workers, 1_000_000)
        found = scout(
            self._server, self._script, cluster.workers, seed=seed, method=methods[0],
            threads=threads, outputs=Path(self._scratch.name) / "scout",
            is_timed=compute == "measured",
        )  # fmt: skip
        machines = _computing(cluster, compute, found)
        task = task_of(self._script)
        return [
            ScriptSettings(
                task, parse_method(method or found.method), machines, seed=seed, engine="none",
                threads=threads, model_bytes=model_bytes, learning_rate=found.learning_rate,
                optimiser=found.optimiser, script=self._script, steps=found.steps, compute=compute,
            )
            for method in methods
        ]  # fmt: skip

    def place(self, folder: RunFolder | None) -> None:
        self._place = (Path(self._scratch.name) if folder is None else folder.path) / OUTPUTS

    def simulation(
        self, settings: Settings, on_row: Callable[[Row], None], observers: Sequence[Observer]
    ) -> Simulation:
        assert isinstance(settings, ScriptSettings)
        place = self._place
        self._shown.close()
        if self._shows_output:
            self._shown.enter_context(shown_while_it_grows(place / "worker-0.out"))
        return ScriptSimulation(
            settings, self._server, place, on_row=on_row, observers=observers,
            needs_reports=self._needs_reports,
        )  # fmt: skip


def _computing(cluster: Cluster, compute: str, found: Scouted) -> Cluster:
    if compute == "cluster":
        return cluster
    if found.seconds_per_step is not None:
        took = found.seconds_per_step
        say(f"a step of worker 0 alone computes for {took * 1e3:.3f} ms")
    else:
        took = seconds(compute, "--compute")
    return dataclasses.replace(cluster, compute=dataclasses.replace(cluster.compute, seconds=took))


@contextmanager
def shown_while_it_grows(file: Path) -> Generator[None]:
    """Inside, what is written to this file goes to standard error, too."""
    is_over = threading.Event()

    def follow() -> None:
        at = 0
        while True:
            was_over = is_over.wait(_LOOK_AGAIN)
            with contextlib.suppress(OSError), file.open("rb") as lines:
                lines.seek(at)
                while part := lines.read(1 << 16):
                    at += len(part)
                    sys.stderr.write(part.decode(errors="replace"))
                sys.stderr.flush()
            if was_over:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def check_script_options(
    script: str, task: str, length: LengthOptions, rate: object, running: RunOptions,
    evaluations: int | None,
) -> None:  # fmt: skip
    """What a script decides by itself is not given to the command."""
    given: dict[str, tuple[object, object]] = {
        "--task": (task, "digits-mlp"), "--lr": (rate, None),
        "--evaluations": (evaluations in (None, 20), True),
    }  # fmt: skip
    for options, default in ((length, LengthOptions()), (running, RunOptions())):
        for name, value in vars(options).items():
            if name not in ("threads", "model_bytes"):
                given[f"--{name}"] = (value, getattr(default, name))
    for flag, (value, default) in given.items():
        if value != default:
            raise ConfigurationError(
                f"{flag} is for tasks, and {script} decides that by itself; leave it out, or give "
                "it to the script behind --"
            )


def check_no_script(compute: str) -> None:
    """What is for scripts only is refused with a task."""
    if compute != "cluster":
        raise ConfigurationError("--compute is for scripts; a task's compute time is the cluster's")
