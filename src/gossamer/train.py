"""The second door on real workers: `train` runs a method on processes of this machine."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, RunFailed
from gossamer.methods import MethodSpec
from gossamer.real.injection import Injection
from gossamer.real.job import Job
from gossamer.real.launch import Launch, Launcher
from gossamer.settings import Settings, make_settings
from gossamer.sim.cluster import Cluster
from gossamer.sim.simulation import Row, digest_of

Watch = Callable[[int, Row], None]
_LOOK_S = 0.1


@dataclass
class TrainingResult:
    """What a real run gives back; `summary` is what `--json` prints and the run folder keeps."""

    settings: Settings
    summary: Row
    history: list[Row]
    parameters: Tensor | None
    """The output model as a flat vector; None if nobody lived to give it."""
    status: int
    """The launcher's exit code."""
    staleness: dict[int, int] = field(default_factory=dict[int, int])

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["summary"][name]
        except KeyError:
            raise AttributeError(name) from None


def train(
    task: str,
    method: str | MethodSpec,
    workers: int = 2,
    *,
    data: Path | str | None = None,
    injection: Injection | None = None,
    transport: str | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Watch | None = None,
    deadline: float | None = None,
    **choices: Any,
) -> TrainingResult:
    """Train on that many processes of this machine; `choices` as for `simulate`.

    The method's text is the one that `simulate` runs in virtual time.
    """
    settings = make_settings(task, method, Cluster(workers=workers), data=data, **choices)
    result = launch(
        settings, data=data, injection=injection, transport=transport, folder=folder,
        on_row=on_row, on_progress=on_progress, deadline=deadline,
    )  # fmt: skip
    if result.status == 130:
        raise KeyboardInterrupt
    if result.status != 0:
        raise RunFailed(f"the run ended with exit code {result.status}; see what the workers said")
    return result


def job_of(settings: Settings, task: str, data: Path | str | None, folder: Path) -> Job:
    """The settings as the workers get them."""
    if settings.method.groups:
        raise ConfigurationError(
            "groups= is simulated only; on real workers leave it out, or use gossamer simulate"
        )
    assert settings.batch
    assert settings.learning_rate
    assert settings.optimiser
    assert settings.epochs
    return Job(
        task=task, data=None if data is None else str(Path(data).resolve()),
        method=str(settings.method), seed=settings.seed, samples=settings.samples,
        batch=settings.batch, learning_rate=settings.learning_rate, optimiser=settings.optimiser,
        schedule=settings.schedule, epochs=settings.epochs, clip=settings.clip,
        split=settings.split, buffers=settings.buffers, threads=settings.threads,
        evaluations=settings.evaluations, folder=str(folder.resolve()),
    )  # fmt: skip


def launch(
    settings: Settings,
    *,
    data: Path | str | None = None,
    injection: Injection | None = None,
    transport: str | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Watch | None = None,
    deadline: float | None = None,
) -> TrainingResult:
    """Start the workers, follow what they write, and put it together."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-")))
        job = job_of(settings, settings.task.name, data, folder)
        faults = injection or Injection()
        plan = Launch(
            [sys.executable, "-m", "gossamer.real.program"], settings.cluster.workers,
            transport=transport, method=job.method, seed=job.seed, folder=folder,
            injection=faults, tolerates_deaths=True, deadline_s=deadline,
            environment={"GOSSAMER_JOB": job.to_json(), "OMP_NUM_THREADS": str(job.threads)},
        )  # fmt: skip
        follower = Follower(folder, settings.cluster.workers, on_row, on_progress)
        stack.enter_context(follower)
        status = Launcher(plan).run()
        follower.catch_up()
        return follower.result(settings, status)


class Follower:
    """Reads the workers' diaries while they are written."""

    def __init__(
        self, folder: Path, workers: int, on_row: Callable[[Row], None] | None,
        on_progress: Watch | None,
    ) -> None:  # fmt: skip
        self._folder = folder / "workers"
        self._workers = workers
        self._on_row = on_row
        self._on_progress = on_progress
        self._read = dict.fromkeys(range(workers), 0)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.rows: list[Row] = []
        self.books: dict[int, Row] = {}
        self.latest: dict[int, Row] = {}

    def __enter__(self) -> Follower:
        self._thread = threading.Thread(target=self._follow, name="gossamer diaries", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.catch_up()

    def catch_up(self) -> None:
        with self._lock:
            for rank in range(self._workers):
                self._catch_up_with(rank)

    def _catch_up_with(self, rank: int) -> None:
        path = self._folder / f"{rank}.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[rank])
            for line in file:
                if not line.endswith(b"\n"):
                    break  # half a line: its worker is writing it, or died over it
                self._read[rank] += len(line)
                self._note(rank, json.loads(line))

    def _note(self, rank: int, entry: Row) -> None:
        kind = entry.pop("kind")
        if kind == "books":
            self.books[rank] = entry
        elif kind == "progress":
            self.latest[rank] = entry
            if self._on_progress is not None:
                self._on_progress(rank, entry)
        else:
            row = {**entry, "samples": sum(now["samples"] for now in self.latest.values())}
            self.rows.append(row)
            if self._on_row is not None:
                self._on_row(row)

    def result(self, settings: Settings, status: int) -> TrainingResult:
        output = self._folder / "output.npy"
        parameters = None
        if output.exists():
            parameters = torch.from_numpy(np.load(output, allow_pickle=False))
        staleness: dict[int, int] = {}
        for book in self.books.values():
            for updates, count in book["staleness"].items():
                staleness[int(updates)] = staleness.get(int(updates), 0) + count
        summary = {
            "method": str(settings.method), "task": settings.task.name,
            "workers": settings.cluster.workers, "seed": settings.seed,
            "learning_rate": settings.learning_rate,
            "parameters_digest": None if parameters is None else digest_of(parameters),
            **(self.rows[-1] if self.rows else {}),
            **self._totals(staleness),
        }  # fmt: skip
        return TrainingResult(settings, summary, self.rows, parameters, status, staleness)

    def _totals(self, staleness: dict[int, int]) -> Row:
        books = list(self.books.values())
        steps = sum(book["steps"] for book in books)
        seen: dict[str, list[float]] = {}
        for book in books:
            for what, (count, _, most) in book["observed"].items():
                told = seen.setdefault(what, [0.0, 0.0])
                told[0] += count
                told[1] = max(told[1], most)
        causes: dict[str, float] = {}
        for book in books:
            for cause, seconds in book["waiting_seconds"].items():
                causes[cause] = causes.get(cause, 0.0) + seconds
        gradients = sum(staleness.values())
        waits = [
            sum(book["waiting_seconds"].values()) / book["seconds"]
            for book in books if book["seconds"] > 0
        ]  # fmt: skip
        return {
            "wall_seconds": max((book["seconds"] for book in books), default=None),
            "steps": steps,
            "samples": sum(book["samples"] for book in books),
            "steps_by_worker": {str(rank): book["steps"] for rank, book in self.books.items()},
            "computing_seconds": [book["computing_seconds"] for book in books],
            "waiting_fraction": sum(waits) / len(waits) if waits else None,
            "waiting_by_cause": causes,
            "exchanges_per_step": sum(book["exchanges"] for book in books) / max(1, steps),
            "bytes_per_step": sum(book["bytes"] for book in books) / max(1, steps),
            "mean_staleness":
                sum(updates * count for updates, count in staleness.items()) / gradients
                if gradients else 0.0,
            "max_staleness": max(staleness, default=0),
            "max_clock_gap": seen.get("clock_gap", [0.0, 0.0])[1],
            "dropped_gradients": int(seen.get("dropped", [0.0, 0.0])[0]),
            "max_queue": seen.get("queue", [0.0, 0.0])[1],
            "living": len(books),
        }  # fmt: skip
