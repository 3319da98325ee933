"""Follows a real run by the logs of its workers, and makes its result of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer.config.settings import Settings
from gossamer.observe.callbacks import Callback
from gossamer.observe.metrics import Metrics, summary
from gossamer.real.train.checkpoint_files import MANIFEST
from gossamer.real.train.worker_log import LogEntries, LogReader
from gossamer.runs.result import MODEL, Result, Row, digest_of, read_model


@dataclass(frozen=True)
class RunListener:
    """Who is told of a run while it goes on."""

    on_row: Callable[[Row], None] | None = None
    """Called with every evaluation."""
    on_progress: Callable[[int, Row], None] | None = None
    """Called with a worker's rank and what it has done so far."""
    callbacks: Sequence[Callback] = ()
    on_start: Callable[[], None] = lambda: None
    """Called when everything has been checked and the workers are about to start."""


class TrainingProgress(LogReader):
    """Reads the logs of the workers of `gossamer train`, and puts their results together."""

    def __init__(
        self, folder: Path, logs: Sequence[LogEntries], listener: RunListener | None = None, *,
        look_s: float = 0.1, history: Sequence[Row] = (), deaths: Sequence[int] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`folder` is where the output model is put; `history` are the rows of a resumed run.

        `deaths` is a list that grows by the rank of each worker that dies. Once something that is
        called back raises, `on_failure` is called, nothing is called back any more, and `__exit__`
        raises the error.
        """
        super().__init__(logs, look_s)
        self._folder = folder / "workers"
        self._listener = listener or RunListener()
        self._deaths = deaths
        self._deaths_told = 0
        self._checkpoints = folder / "checkpoint"
        self._checkpoints_told = set(self._whole_checkpoints())
        self._on_failure = on_failure
        self._failure: Exception | None = None
        self._began: float | None = None
        """When the workers began, by this process's clock."""
        self.rows: list[Row] = [*history]
        self.books: dict[int, Row] = {}
        self.latest: dict[int, Row] = {}
        self.failures: list[Row] = []

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if self._failure is not None and error is None:
            raise self._failure

    def catch_up(self) -> None:
        super().catch_up()
        if self._listener.callbacks:
            with self._lock:
                self._tell_deaths_and_checkpoints()

    def _tell_deaths_and_checkpoints(self) -> None:
        for rank in self._deaths[self._deaths_told :]:
            self._deaths_told += 1
            self._tell("on_membership", rank, False, self._seconds)
        for place in self._whole_checkpoints():
            if place not in self._checkpoints_told:
                self._checkpoints_told.add(place)
                self._tell("on_checkpoint", str(place), self._seconds)

    def _tell(self, event: str, *facts: Any) -> None:
        for callback in self._listener.callbacks:
            self._call(getattr(callback, event), *facts)

    def _call(self, function: Callable[..., None], *facts: Any) -> None:
        if self._failure is not None:
            return
        try:
            function(*facts)
        except Exception as failure:
            self._failure = failure
            self._on_failure()

    @property
    def _seconds(self) -> float:
        """Since the workers began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _whole_checkpoints(self) -> list[Path]:
        found = [path.parent for path in self._checkpoints.glob(f"[0-9]*/{MANIFEST}")]
        return sorted(found, key=lambda path: int(path.name))

    def _note(self, rank: int, kind: str, entry: Row) -> None:
        listener = self._listener
        if kind == "books":
            self.books[rank] = entry
        elif kind == "failure":
            self.failures.append(entry)
        elif kind == "progress":
            self.latest[rank] = entry
            if self._began is None:
                self._began = time.monotonic() - entry["seconds"]
            if listener.on_progress is not None:
                self._call(listener.on_progress, rank, entry)
            self._tell("on_step", rank, entry["steps"], entry["seconds"], entry["training_loss"])
        else:
            self.rows.append(entry)
            if listener.on_row is not None:
                self._call(listener.on_row, entry)
            self._tell("on_evaluation", entry)

    def result(self, settings: Settings, status: int) -> Result:
        output = self._folder / "output.npy"
        parameters = None
        if output.exists():
            parameters = torch.from_numpy(np.load(output, allow_pickle=False))
        metrics = Metrics(settings.cluster.workers, [])
        for rank, book in self.books.items():
            metrics.load(rank, book)
        found = {
            "method": str(settings.method), "task": settings.task.name,
            "workers": settings.cluster.workers, "seed": settings.seed,
            "learning_rate": settings.learning_rate, "notices": settings.notices(),
            "parameters_digest": None if parameters is None else digest_of(parameters),
            **(self.rows[-1] if self.rows else {}),
            **self._totals(metrics),
            **self._goodput(settings.cluster.workers),
        }  # fmt: skip
        first = min(self.failures, key=lambda failure: failure["time"], default=None)
        failure = None if first is None else first["sentence"]
        state = read_model(self._folder.parent / MODEL) if output.exists() else {}
        return Result(
            settings, found, self.rows, parameters, dict(metrics.histogram), state, status,
            failure, self._strip(),
        )  # fmt: skip

    def _strip(self) -> Row | None:
        """The first moments of all workers, as far as all of them have written them down."""
        first = {rank: book.get("first_moments") or [] for rank, book in self.books.items()}
        if not any(first.values()):
            return None
        until = min(moments[-1][1] for moments in first.values() if moments)
        shown = [
            [rank, start, min(end, until), kind, detail]
            for rank, moments in sorted(first.items())
            for start, end, kind, detail in moments
            if start < until and end > start
        ]
        return {"from": 0.0, "to": until, "segments": shown, "servers": 0}

    def _totals(self, metrics: Metrics) -> Row:
        books = list(self.books.values())
        # A worker that died has at least done what it last reported.
        done = {**self.latest, **self.books}
        return {
            **summary(metrics, sum(book["bytes"] for book in books)),
            "wall_seconds": max((book["seconds"] for book in books), default=None),
            "steps": sum(one["steps"] for one in done.values()),
            "samples": sum(one["samples"] for one in done.values()),
            "repeated_samples": int(metrics.told_of("repeated").total),
            "torn_updates": sum(book["torn_updates"] for book in books),
            "steps_by_worker": {str(rank): done[rank]["steps"] for rank in sorted(done)},
            "computing_seconds": [book["computing_seconds"] for book in books],
            **self._longest_gap(),
            "checkpoints": max((book["checkpoints"] for book in books), default=0),
            "checkpoint_seconds": max((book["checkpoint_seconds"] for book in books), default=0.0),
            "living": len(books),
            **_stages(books),
        }

    def _goodput(self, workers: int) -> Row:
        """Where the time of all workers went, measured by the one that computes a sample fastest. A
        worker that died counts as absent since it last told of itself."""
        books, done = self.books.values(), {**self.latest, **self.books}
        paces = [book["computing_seconds"] / book["samples"] for book in books if book["samples"]]
        duration_s = max((book["seconds"] for book in books), default=0.0)
        if not paces or duration_s <= 0:
            return {}
        best = min(paces)
        whole = duration_s * workers
        trained = sum(one["samples"] for one in done.values())
        by_living = sum(book["samples"] for book in books)
        gone = [one for rank, one in self.latest.items() if rank not in self.books]
        silent = workers - len(books) - len(gone)
        waited = sum(sum(book["waiting_seconds"].values()) for book in books)
        shares = {
            "useful": trained * best / whole,
            "slower": (sum(book["computing_seconds"] for book in books) - by_living * best) / whole,
            "waiting": waited / whole,
            "absent": (sum(max(0.0, duration_s - one["seconds"]) for one in gone)
                       + silent * duration_s) / whole,
        }  # fmt: skip
        shares["other"] = 1.0 - sum(shares.values())
        return {"goodput": shares["useful"], "time_shares": shares}

    def _longest_gap(self) -> Row:
        """The longest time that a worker spent between the beginnings of two steps."""
        gaps = {
            str(rank): book["longest_step_gap_seconds"] for rank, book in sorted(self.books.items())
        }
        longest = max(
            self.books.values(), key=lambda book: book["longest_step_gap_seconds"], default=None
        )
        return {
            "longest_step_gap_seconds": longest and longest["longest_step_gap_seconds"],
            "longest_step_gap_at": longest and longest["longest_step_gap_at"],
            "longest_step_gap_by_worker": gaps,
        }


def _stages(books: Sequence[Row]) -> Row:
    """Of replicas of several processes, what each stage holds, by the names of virtual time."""
    found = {stage: (size, versions) for stage, size, versions in sorted(
        book["stage"] for book in books if "stage" in book
    )}  # fmt: skip
    held = [{"parameters": size, "weight_versions": n} for size, n in found.values()]
    return {"pipeline": held} if held else {}
