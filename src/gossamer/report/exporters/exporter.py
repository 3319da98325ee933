"""The base of all exporters: one run at a time, as a callback or from the run's folder."""

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
    """Writes the figures of a run while it measures them.

    As a callback it begins a run at the first evaluation and ends it with the run; another run may
    follow. `export` writes a run from its folder. `with` closes a run that was interrupted.
    """

    def __init__(self, folder: Path | str | None, name: str | None, *, force: bool) -> None:
        """`folder` must be empty unless `force` is set; it is made when there is something to
        write. `name` is the name of a run that is followed; by default run-1, run-2 and so on."""
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            _check_vacant(self._folder, force=force)
        self._name = name
        self._last = (0, 0.0)
        """The steps and the seconds of the last evaluation."""
        self._runs = 0
        self._is_open = False
        self._steps: dict[int, int] = {}

    # ------------------------------------------------------------------ what a subclass does

    @abstractmethod
    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        """A run begins; as a callback the exporter does not know labels and settings yet."""

    @abstractmethod
    def _row(self, row: Facts, step: int) -> None:
        """One evaluation, after this many gradient steps of all workers together."""

    @abstractmethod
    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        """The run is over; `status` is finished, diverged, interrupted, failed or unfinished."""

    # ------------------------------------------------------------------ as a callback

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        self._steps[worker] = step

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self._open()
        step = count(row.get("steps"))
        # Rows of real workers have no steps, so the steps reported so far are added up.
        self._add(timed(row), sum(self._steps.values()) if step is None else step)

    def on_end(self, summary: dict[str, Any]) -> None:
        self._open()
        self._close(labels(summary), timed(summary), "finished")

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._runs += 1
            number = f"-{self._runs}" if self._runs > 1 else ""
            name = f"run-{self._runs}" if self._name is None else f"{self._name}{number}"
            self._start(name, labels(), {})

    def _start(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        self._last = (0, 0.0)
        self._begin(name, about, settings)

    def _add(self, row: Facts, step: int) -> None:
        seconds = row.get("seconds")
        self._last = (step, float(seconds) if isinstance(seconds, int | float) else self._last[1])
        self._row(row, step)

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
        """Write a run that `gossamer.runs.kept_runs.read_folder` has read."""
        about = labels(run.config, run.summary)
        batch = number(run.config.get("batch"))
        self._start(run.name if name is None else name, about, run.config)
        for position, row in enumerate(run.history):
            step, samples = count(row.get("steps")), number(row.get("samples"))
            if step is None:
                step = position if not batch or samples is None else round(samples / batch)
            self._add(timed(row), step)
        clock = "real" if run.is_real else "virtual"
        known: Facts = {"task": run.task, "workers": run.workers, "status": run.status}
        self._end(about, known | {"clock": clock} | timed(run.summary), run.status)


def require(module: str, what: str, package: str) -> Any:
    """An optional module, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigurationError(
            f"{what} needs {package}, which is not installed; use pip install {package}"
        ) from None


def known(facts: Facts) -> dict[str, Any]:
    """The facts that have a value."""
    return {name: value for name, value in facts.items() if value is not None}


def first_line(error: Exception) -> str:
    """The first line of an error's message without its full stop, or the name of its class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _check_vacant(folder: Path, *, force: bool) -> None:
    """Refuse to mix an export with other files, before the run has taken its time."""
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file; name a folder to export into")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ConfigurationError(
            f"{folder} is not empty; name another folder, or force it (--force, force=True) to "
            "replace what an earlier export has left there"
        )
