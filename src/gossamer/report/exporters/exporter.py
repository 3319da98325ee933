"""What all exporters have in common: one run at a time, listened to or taken from its folder."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gossamer.errors import ConfigurationError
from gossamer.observe.callbacks import Callback
from gossamer.report.exporters.facts import Facts, labels, timed
from gossamer.runs.json_files import count, number
from gossamer.runs.kept_runs import Run


class Exporter(Callback, ABC):
    """Writes what a run measures, as it measures it.

    Used as a callback it begins a run at its first evaluation and ends it with the run; another
    run may follow. `export` writes a run that was kept. One who may be interrupted uses `with`,
    which closes what an interrupted run has left open.
    """

    def __init__(self, name: str | None = None) -> None:
        """`name` is that of the runs that are listened to; otherwise run-1, run-2 and so on."""
        self._name = name
        self._runs = 0
        self._is_open = False
        self._steps: dict[int, int] = {}

    # ------------------------------------------------------------------ what a subclass does

    @abstractmethod
    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        """A run begins; of one that is listened to, labels and settings are not known yet."""

    @abstractmethod
    def _row(self, row: Facts, step: int) -> None:
        """One evaluation, after so many gradient steps of all workers together."""

    @abstractmethod
    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        """The run is over; `status` is finished, diverged, interrupted, failed or unfinished."""

    # ------------------------------------------------------------------ listening

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        self._steps[worker] = step

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self._open()
        step = count(row.get("steps"))
        # Rows of real workers do not say; their steps so far do.
        self._row(timed(row), sum(self._steps.values()) if step is None else step)

    def on_end(self, summary: dict[str, Any]) -> None:
        self._open()
        self._close(labels(summary), timed(summary), "finished")

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._runs += 1
            number = f"-{self._runs}" if self._runs > 1 else ""
            name = f"run-{self._runs}" if self._name is None else f"{self._name}{number}"
            self._begin(name, labels(), {})

    def _close(self, about: Facts, summary: Facts, status: str) -> None:
        self._is_open = False
        self._steps.clear()
        self._end(about, summary, status)

    def close(self) -> None:
        """End a run that has not ended by itself."""
        if self._is_open:
            self._close(labels(), {}, "unfinished")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ kept runs

    def export(self, run: Run, name: str | None = None) -> None:
        """A run from its folder, as `gossamer.runs.kept_runs.read_folder` reads it."""
        about = labels(run.config, run.summary)
        batch = number(run.config.get("batch"))
        self._begin(run.name if name is None else name, about, run.config)
        for position, row in enumerate(run.history):
            step, samples = count(row.get("steps")), number(row.get("samples"))
            if step is None:
                step = position if not batch or samples is None else round(samples / batch)
            self._row(timed(row), step)
        clock = "real" if run.is_real else "virtual"
        known: Facts = {"task": run.task, "workers": run.workers, "status": run.status}
        self._end(about, known | {"clock": clock} | timed(run.summary), run.status)


def require(module: str, what: str, package: str) -> Any:
    """An optional module, or one sentence on how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigurationError(
            f"{what} needs {package}, which is not installed; use pip install {package}"
        ) from None


def check_vacant(folder: Path, *, force: bool) -> None:
    """Refuse to write among what is there already, before a run has taken its time."""
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file; name a folder to export into")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ConfigurationError(
            f"{folder} is not empty; name another folder, or force it (--force, force=True) to "
            "replace what an earlier export has left there"
        )
