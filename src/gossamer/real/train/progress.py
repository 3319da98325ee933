"""A real run as its workers' diaries tell it: rows on the way, and what came out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gossamer.config.settings import Settings
from gossamer.observe.callbacks import Callback
from gossamer.observe.metrics import Metrics, summary
from gossamer.real.train.checkpoint_files import MANIFEST
from gossamer.runs.result import MODEL, Outcome, Row, digest_of, read_model

Watch = Callable[[int, Row], None]


class Entries(Protocol):
    """One worker's diary."""

    def new(self) -> Iterator[Row]:
        """What was written since the last look."""
        ...


@dataclass(repr=False)
class TrainingResult(Outcome):
    """What a real run gives back; `summary` is what `--json` prints and the run folder keeps."""

    settings: Settings
    summary: Row
    history: list[Row]
    parameters: Tensor | None
    """The output model's trainable parameters as a flat vector; None if nobody lived to give it."""
    status: int
    """The launcher's exit code."""
    failure: str | None = None
    """What the first worker that gave up said."""
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    strip: Row | None = None
    """Who computed and who waited for whom in the first moments."""
    state: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class Follower:
    """Reads the workers' diaries while they are written."""

    def __init__(
        self, folder: Path, diaries: Sequence[Entries],
        on_row: Callable[[Row], None] | None = None, on_progress: Watch | None = None,
        look_s: float = 0.1, callbacks: Sequence[Callback] = (), deaths: Sequence[int] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`folder` is where the output model is put; `look_s` is how often to look for lines.

        `deaths` is a list that grows by the rank of each worker that dies. Once something that is
        called back raises, `on_failure` is told, nothing is called back any more, and `__exit__`
        raises the error.
        """
        self._folder = folder / "workers"
        self._callbacks = callbacks
        self._deaths = deaths
        self._deaths_told = 0
        self._checkpoints = folder / "checkpoint"
        self._checkpoints_told = set(self._whole_checkpoints())
        self._on_failure = on_failure
        self._failure: Exception | None = None
        self._began: float | None = None
        """By this process's clock, as the first line tells it."""
        self._diaries = diaries
        self._on_row = on_row
        self._on_progress = on_progress
        self._look_s = look_s
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.rows: list[Row] = []
        self.books: dict[int, Row] = {}
        self.latest: dict[int, Row] = {}
        self.failures: list[Row] = []

    def __enter__(self) -> Follower:
        self._thread = threading.Thread(target=self._follow, name="gossamer diaries", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _follow(self) -> None:
        while not self._over.wait(self._look_s):
            self.catch_up()

    def catch_up(self) -> None:
        with self._lock:
            for rank, diary in enumerate(self._diaries):
                for entry in diary.new():
                    self._note(rank, entry)
            if self._callbacks:
                self._note_deaths_and_checkpoints()

    def _note_deaths_and_checkpoints(self) -> None:
        for rank in self._deaths[self._deaths_told :]:
            self._deaths_told += 1
            self._tell("on_membership", rank, False, self._seconds)
        for place in self._whole_checkpoints():
            if place not in self._checkpoints_told:
                self._checkpoints_told.add(place)
                self._tell("on_checkpoint", str(place), self._seconds)

    def _tell(self, event: str, *facts: Any) -> None:
        for callback in self._callbacks:
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

    def _note(self, rank: int, entry: Row) -> None:
        kind = entry.pop("kind")
        if kind == "books":
            self.books[rank] = entry
        elif kind == "failure":
            self.failures.append(entry)
        elif kind == "progress":
            self.latest[rank] = entry
            if self._began is None:
                self._began = time.monotonic() - entry["seconds"]
            if self._on_progress is not None:
                self._call(self._on_progress, rank, entry)
            self._tell("on_step", rank, entry["steps"], entry["seconds"], entry["training_loss"])
        else:
            row = {**entry, "samples": sum(now["samples"] for now in self.latest.values())}
            self.rows.append(row)
            if self._on_row is not None:
                self._call(self._on_row, row)
            self._tell("on_evaluation", row)

    def result(self, settings: Settings, status: int) -> TrainingResult:
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
        }  # fmt: skip
        first = min(self.failures, key=lambda failure: failure["time"], default=None)
        failure = None if first is None else first["sentence"]
        return TrainingResult(
            settings, found, self.rows, parameters, status, failure, dict(metrics.histogram),
            self._strip(),
            read_model(self._folder.parent / MODEL) if output.exists() else {},
        )  # fmt: skip

    def _strip(self) -> Row | None:
        """Up to the moment at which the first of the workers stopped writing them down."""
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
        # Who did not live to close its books has at least done what it last reported.
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
        }

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
