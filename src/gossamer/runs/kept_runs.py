"""Run folders as a report sees them: every run that is there, and a sentence for what is not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.arrival import charged
from gossamer.runs.json_files import (
    count,
    members,
    number,
    numbers,
    objects,
    read_lines,
    read_object,
    text,
    texts,
)
from gossamer.runs.result import Row

_FILES = ("config.json", "metrics.jsonl", "summary.json")
_SCORES = (
    "loss",
    "accuracy",
    "worker_accuracy",
    "training_loss",
    "consensus_distance",
    "noise_scale",
)
_STATES = frozenset(
    {
        "finished",
        "interrupted",
        "unfinished",
        "running",
        "stopped",
        "deadline",
        "failed",
        "all workers died",
    }
)
_SHOWN = 4


@dataclass(frozen=True)
class Run:
    """One run: what decided it, what it measured on the way, what came out."""

    name: str
    """Of its folder."""
    config: Row
    summary: Row
    history: list[Row]
    strip: Row | None = None
    books: dict[int, Row] = field(default_factory=dict[int, Row])
    """Of real workers, by rank: what each wrote down at its end."""
    is_in_grid: bool = False
    """Whether it is one of a comparison, which shows each method at its best rate."""
    is_trial: bool = False
    """Whether it only helped to choose that rate."""

    @property
    def label(self) -> str:
        return text(self.config.get("method")) or text(self.summary.get("method")) or self.name

    @property
    def task(self) -> str:
        return text(self.config.get("task")) or text(self.summary.get("task"))

    @property
    def rate(self) -> float:
        """The learning rate; 0 where nobody wrote it down."""
        kept = number(self.config.get("learning_rate"))
        return kept or number(self.summary.get("learning_rate")) or 0.0

    @property
    def seed(self) -> int | None:
        kept = count(self.config.get("seed"))
        return count(self.summary.get("seed")) if kept is None else kept

    @property
    def workers(self) -> int:
        there = members(self.config.get("cluster")).get("workers", self.summary.get("workers"))
        known = count(there)
        return known if known is not None and known > 0 else len(self.books)

    @property
    def is_real(self) -> bool:
        """Whether its seconds are those of a clock."""
        return self.config.get("command") == "train" or bool(self.books)

    @property
    def status(self) -> str:
        """finished, diverged, interrupted, failed, ..., or unfinished: nobody wrote its end."""
        if not self.summary:
            return "unfinished"
        ended = text(self.summary.get("ended")) or "finished"
        if ended == "finished" and self.summary.get("diverged") is True:
            return "diverged"
        return ended if ended in _STATES else "failed"

    @property
    def has_ended(self) -> bool:
        return self.status in ("finished", "diverged", "all workers died")

    @property
    def notices(self) -> list[str]:
        said = texts(self.summary.get("notices"))
        failure = text(self.summary.get("failure"))
        ended = text(self.summary.get("ended"))
        if not failure and self.status == "failed" and ended not in _STATES:
            failure = ended
        return [*said, *([f"it failed: {failure}"] if failure else [])]


@dataclass
class Folder:
    """A folder of one command: its own files, and the runs inside."""

    path: Path
    kind: str
    """compare, simulate, train, advise, delay, staleness, stragglers, table, or unknown."""
    config: Row = field(default_factory=dict[str, Any])
    summary: Row = field(default_factory=dict[str, Any])
    runs: list[Run] = field(default_factory=list[Run])
    pictures: list[Path] = field(default_factory=list[Path])
    missing: list[str] = field(default_factory=list[str])

    @property
    def task(self) -> str:
        named = [text(self.config.get("task")), text(self.summary.get("task"))]
        return next((task for task in [*named, *(run.task for run in self.runs)] if task), "")

    @property
    def command(self) -> str:
        return text(self.config.get("command_line"))


def read_folder(path: Path) -> Folder:
    """What is there; only a path that is no folder is refused."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigurationError(f"{path} {what}; give the folder of a run, as in runs/")
    try:
        there = sorted(path.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}); give a folder that you may read"
        ) from None
    missing: list[str] = []
    where = path.resolve().name
    config = read_object(path / "config.json", f"{where}/config.json", missing)
    summary = read_object(path / "summary.json", f"{where}/summary.json", missing)
    folder = Folder(path, _kind(config or {}, path), config or {}, summary or {}, missing=missing)
    folder.pictures = [one for one in there if one.suffix == ".png" and one.is_file()]
    if folder.kind in ("compare", "simulate", "train", "advise", "unknown"):
        _read_runs(folder, [one for one in there if one.is_dir()], where)
    elif summary is None:
        missing.append(f"{where} has no result yet: summary.json is not there.")
    return folder


def _kind(config: Row, path: Path) -> str:
    marks = {
        "runs": "compare", "scenes": "stragglers", "updates": "staleness", "method": "simulate",
    }  # fmt: skip
    if config.get("command") == "train" or (path / "job.json").exists():
        return "train"
    if config.get("command") == "advise":
        return "advise"
    if isinstance(config.get("table"), str):
        return "table"
    if isinstance(config.get("grid"), dict):
        return "delay"
    return next((kind for mark, kind in marks.items() if mark in config), "unknown")


def _read_runs(folder: Folder, below: list[Path], where: str) -> None:
    path, missing = folder.path, folder.missing
    children = [one for one in below if any((one / name).exists() for name in _FILES)]
    is_alone = not children and folder.kind != "advise"  # a search keeps the runs of its final only
    if folder.kind == "train" or (path / "metrics.jsonl").exists() or is_alone:
        if not any((path / name).exists() for name in _FILES):
            missing.append(
                f"{where} holds no run: no config.json, no metrics.jsonl and no summary.json."
            )
            return
        if folder.kind != "compare":
            folder.runs.append(_read_run(path, where, missing))
            return
    is_in_grid = folder.kind in ("compare", "advise", "unknown")
    choosing = count(folder.config.get("choosing_seed")) if folder.kind == "compare" else None
    # A search adds to every time what it costs to have the model that was scored.
    prices = members(folder.config.get("collecting_seconds"))
    for child in children:
        run = _read_run(child, f"{where}/{child.name}", missing)
        is_trial = choosing is not None and run.seed == choosing
        history = charged(run.history, number(prices.get(run.label)) or 0.0)
        folder.runs.append(
            dataclasses.replace(run, history=history, is_in_grid=is_in_grid, is_trial=is_trial)
        )
    # Methods in the order in which they were asked for, where that is known.
    asked = [text(one.get("method")) for one in objects(folder.config.get("runs"))]
    place = {label: at for at, label in reversed(list(enumerate(asked)))}
    folder.runs.sort(key=lambda run: place.get(run.label, len(asked)))
    if not folder.config and children:
        missing.append(f"{where}/config.json is not there: nobody knows what else was planned.")
    if not folder.summary:
        missing.append(f"{where} has no summary.json: it has not ended, or was killed.")
    _say_what_never_ran(folder, where)


def _say_what_never_ran(folder: Folder, where: str) -> None:
    """Of a comparison: the runs of its plan that have no folder."""
    planned = objects(folder.config.get("runs"))
    there = {(run.label, run.rate, run.seed) for run in folder.runs}
    lacking: list[str] = []
    for settings in planned:
        label, seed = text(settings.get("method")), count(settings.get("seed")) or 0
        rate = number(settings.get("learning_rate")) or 0.0
        if (label, rate, seed) not in there:
            lacking.append(f"{label} at {rate:g} with seed {seed}")
    if lacking:
        named = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
        of_all = f"{len(lacking)} of {counted(len(planned), 'run')} of {where}"
        folder.missing.append(
            f"{of_all} {'is' if len(lacking) == 1 else 'are'} not there: {named}."
        )


def _read_run(path: Path, where: str, missing: list[str]) -> Run:
    """One run; `missing` gets a sentence for each file that is not as it should be."""
    config = read_object(path / "config.json", f"{where}/config.json", missing)
    summary = read_object(path / "summary.json", f"{where}/summary.json", missing)
    # The files of a lone run are also those of its command: one complaint is enough.
    missing[:] = dict.fromkeys(missing)
    lines = read_lines(path / "metrics.jsonl", f"{where}/metrics.jsonl", missing)
    rows = [row for row in map(_timed, lines) if row is not None]
    history = sorted(rows, key=lambda row: row["virtual_seconds"])
    if len(rows) < len(lines):
        lost = f"{len(lines) - len(rows)} of {len(lines)}"
        missing.append(f"{lost} lines of {where}/metrics.jsonl tell no time; left out.")
    if not (path / "config.json").exists():
        missing.append(f"{where} has no config.json: its settings are not known.")
    if not (path / "summary.json").exists():
        missing.append(f"{where} has no summary.json: the run has not ended, or was killed.")
    if not lines and (config or {}).get("engine") != "none":
        missing.append(f"{where} has no evaluations: its metrics.jsonl is not there or empty.")
    strip = read_object(path / "strip.json", f"{where}/strip.json", missing)
    run = Run(path.name, config or {}, _clocked(summary or {}), history, strip)
    if (config or {}).get("command") == "train" or (path / "workers").is_dir():
        run = dataclasses.replace(run, books=_books(path / "workers", where, missing))
    return run


def _timed(row: Row) -> Row | None:
    """A row of metrics with a time and epochs; scores that are no numbers are none."""
    row = _clocked(row)
    seconds, epochs = number(row.get("virtual_seconds")), number(row.get("epochs"))
    if seconds is None or epochs is None:
        return None
    own = text(row.get("score"))
    scores = {key: number(row.get(key)) for key in (*_SCORES, *([own] if own else []))}
    parts = {key: numbers(row.get(key)) for key in ("computing_seconds", "waiting_seconds")}
    return {**row, **scores, **parts, "virtual_seconds": seconds, "epochs": epochs}


def _clocked(row: Row) -> Row:
    """Real runs call their time `seconds`; for whoever compares it is the same column."""
    if row.get("virtual_seconds") is None and "seconds" in row:
        return {**row, "virtual_seconds": row["seconds"]}
    return row


def _books(path: Path, where: str, missing: list[str]) -> dict[int, Row]:
    """What real workers wrote at their end, from their diaries."""
    books: dict[int, Row] = {}
    diaries = sorted(path.glob("*.jsonl")) if path.is_dir() else []
    for diary in diaries:
        if not diary.stem.isdecimal():
            continue
        name = f"{where}/workers/{diary.name}"
        kept = [row for row in read_lines(diary, name, missing) if row.get("kind") == "books"]
        if kept:
            books[int(diary.stem)] = kept[-1]
        else:
            missing.append(f"Worker {diary.stem} of {where} did not live to close its books.")
    return books
