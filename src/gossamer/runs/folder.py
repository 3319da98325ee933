"""The folder of a run, written during the run, so that it stays readable however the run ends.

config.json        all settings of the run
metrics.jsonl      one line for each evaluation
progress.json      what a command that can be resumed has done so far
summary.json       the result
model.safetensors  the output model, as it was evaluated
checkpoint.safetensors  where a simulated run that was made in pieces goes on
strip.json         which worker computed, waited and communicated in the first moments
trace.json         a timeline for Perfetto and chrome://tracing

All JSON files except trace.json have `made_with`: the versions that wrote them, the date and the
schema.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.files import replace_text
from gossamer.observe.timeline import Timeline
from gossamer.runs.result import MODEL, write_model
from gossamer.runs.versions import made_with


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON, in which NaN and infinity become null."""
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
    """The folder of one run or of one comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: IO[str] | None = None
        self._failures: list[OSError | ConfigurationError] | None = None
        self.timeline: Timeline | None = None

    @staticmethod
    def create(parent: Path, name: str) -> RunFolder:
        """Make a new folder `<time>-<name>`."""
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

    def child_again(self, name: str) -> RunFolder:
        """The child of that name, which may be there from an earlier piece of the command."""
        if not (self.path / name).is_dir():
            return self.child(name)
        made = RunFolder(self.path / name)
        made._failures = self._failures
        return made

    def defer_failures(self) -> None:
        """From now on a write that fails, here or in a child, does not end the run, so that a full
        disk does not cost the result. Call `check` after the result was shown."""
        if self._failures is None:
            self._failures = []

    @property
    def failures(self) -> list[OSError | ConfigurationError]:
        """The writes that failed and were deferred, here and in children."""
        return self._failures or []

    def add_failures(self, failures: list[OSError | ConfigurationError]) -> None:
        """Take over what failed in another process that wrote into this folder."""
        if self._failures is not None:
            self._failures += failures

    def check(self) -> None:
        """Raise the first deferred failure."""
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
        """Add a line of metrics, and flush it before the run continues."""
        if self._failures:
            return  # a history that ends early is better than one with gaps
        with self._writing("metrics.jsonl"):
            if self._metrics is None:
                # The folder is new, or belongs to a run that is resumed.
                self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._metrics.write(to_json(row) + "\n")
            self._metrics.flush()

    def keep_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Let the history be that of a checkpoint: what came after it will come again."""
        with self._writing("metrics.jsonl"):
            lines = [to_json(row) + "\n" for row in rows]
            replace_text(self.path / "metrics.jsonl", "".join(lines))

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
        whole = {**value, "made_with": made_with()}
        with self._writing(name):
            replace_text(self.path / name, to_json(whole, indent=indent) + "\n")


def _fresh(parent: Path, name: str) -> RunFolder:
    """Make a folder that did not exist, with a number if the name is taken."""
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
