"""A run on disk, written as it goes: whatever ends a run, what it recorded stays readable.

config.json        everything that decided the run
metrics.jsonl      one line per evaluation
progress.json      of a command that goes on where it was stopped: what is done so far
summary.json       the result
model.safetensors  the output model, as it was evaluated
strip.json         who computed, waited and communicated in the first moments
trace.json         a timeline that Perfetto and chrome://tracing open

The JSON files but trace.json say under `made_with` which versions wrote them, when, and by which
schema.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.runs.result import MODEL, write_model
from gossamer.runs.versions import made_with
from gossamer.timeline import Timeline


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity, which JSON does not know, become null."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {key: _finite(member) for key, member in items}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in cast(list[object], value)]
    return value


class RunFolder:
    """Where one run, or one comparison of runs, is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: IO[str] | None = None
        self._failures: list[OSError | ConfigurationError] | None = None
        self.timeline: Timeline | None = None

    @staticmethod
    def create(parent: Path, name: str) -> RunFolder:
        """A fresh folder `<time>-<name>`."""
        return _fresh(parent, f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")

    def child(self, name: str) -> RunFolder:
        made = RunFolder(self.path / name)
        try:
            made = _fresh(self.path, name)
        except ConfigurationError as error:
            if self._failures is None:
                raise
            self._failures.append(error)
        made._failures = self._failures
        return made

    def defer_failures(self) -> None:
        """From now on a write that fails, here or in a child, does not end the run: a full disk
        must not cost the result. Who has told the result calls `check`."""
        if self._failures is None:
            self._failures = []

    def check(self) -> None:
        """Raise the first failure that was deferred."""
        if self._failures:
            raise self._failures[0]

    @contextmanager
    def _writing(self, name: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path / name)
            if self._failures is None:
                raise
            self._failures.append(error)

    def write_config(self, config: dict[str, Any]) -> None:
        self._write("config.json", config)

    @property
    def has_summary(self) -> bool:
        return (self.path / "summary.json").exists()

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", summary)

    def write_model(self, state: Mapping[str, Tensor]) -> None:
        with self._writing(MODEL):
            write_model(self.path / MODEL, state)

    def write_strip(self, strip: dict[str, Any]) -> None:
        self._write("strip.json", strip, indent=None)

    def write_progress(self, progress: dict[str, Any]) -> None:
        self._write("progress.json", progress)

    def open_trace(self, workers: int) -> None:
        with self._writing("trace.json"):
            self.timeline = Timeline(self.path / "trace.json", workers)

    def add_row(self, row: dict[str, Any]) -> None:
        """One line of metrics, on disk before the run goes on."""
        if self._failures:
            return  # rows with gaps between them would be worse than rows that end
        with self._writing("metrics.jsonl"):
            if self._metrics is None:
                # A folder is fresh, or of a run that goes on.
                self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._metrics.write(to_json(row) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        try:
            if self._metrics is not None:
                with self._writing("metrics.jsonl"):
                    self._metrics.close()
        finally:
            if self.timeline is not None:
                with self._writing("trace.json"):
                    self.timeline.close()

    def _write(self, name: str, value: dict[str, Any], indent: int | None = 2) -> None:
        # Written beside and renamed, so that a reader never sees half a file.
        temporary = self.path / f".{name}"
        whole = {**value, "made_with": made_with()}
        with self._writing(name):
            try:
                temporary.write_text(to_json(whole, indent=indent) + "\n", encoding="utf-8")
                temporary.replace(self.path / name)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise


def _fresh(parent: Path, name: str) -> RunFolder:
    """A folder that was not there; where the name is taken, also just now, it gets a number."""
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir(parents=True)
            return RunFolder(path)
        except OSError as error:
            if not path.is_dir():
                raise ConfigurationError(
                    f"the run folder {path} cannot be made ({error.strerror}); choose another "
                    "place with --runs DIR, or --runs none to keep nothing"
                ) from None
        number += 1
        path = parent / f"{name}-{number}"
