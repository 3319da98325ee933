"""The runs of a script in virtual time that one command makes."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gossamer.commands.work.simulations import EngineCache
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.methods import parse_method
from gossamer.observe.observer import Observer
from gossamer.quantities import seconds
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.script.fork_server import ForkServer
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.sim.script.scout import Scouted, scout
from gossamer.sim.script.script_settings import Script, ScriptSettings, task_of
from gossamer.sim.script.script_simulation import ScriptSimulation
from gossamer.sim.simulation import Simulation

OUTPUTS = "outputs"
"""In a run folder: what the processes of a script have printed."""
Show = Callable[[Path], contextlib.AbstractContextManager[None]]


class ScriptRuns(EngineCache):
    """The runs of one command: they share a process that has imported torch."""

    def __init__(
        self, script: Script, *, show: Show | None = None, needs_reports: bool = False
    ) -> None:
        """`show` shows what is written to a file while it grows, here by worker 0."""
        super().__init__()
        self._needs_reports = needs_reports
        self._script = script
        self._show = show
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
        self, settings: Settings, on_row: Callable[[Row], None], observers: Sequence[Observer],
        piece: RunPiece | None = None,
    ) -> Simulation:  # fmt: skip
        """The processes of a script cannot be written to disk, so there is no piece."""
        assert isinstance(settings, ScriptSettings)
        place = self._place
        self._shown.close()
        if self._show is not None:
            self._shown.enter_context(self._show(place / "worker-0.out"))
        return ScriptSimulation(
            settings, self._server, place, on_row=on_row, observers=observers,
            needs_reports=self._needs_reports,
        )  # fmt: skip


def _computing(cluster: Cluster, compute: str, found: Scouted) -> Cluster:
    if compute == "cluster":
        return cluster
    if found.seconds_per_step is not None:
        took = found.seconds_per_step
    else:
        took = seconds(compute, "--compute")
    known = dataclasses.replace(cluster.compute, seconds=took, per_sample=0.0)
    return dataclasses.replace(cluster, compute=known)
