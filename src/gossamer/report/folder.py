"""A run on disk, written as it goes: whatever ends a run, what it recorded stays readable.

config.json     everything that decided the run
metrics.jsonl   one line per evaluation
summary.json    the result
trace.json      a timeline that Perfetto and chrome://tracing open
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any

from gossamer.errors import ConfigurationError
from gossamer.trace import Timeline


class RunFolder:
    """Where one run, or one comparison of runs, is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: IO[str] | None = None
        self.timeline: Timeline | None = None
        try:
            path.mkdir(parents=True, exist_ok=False)
        except OSError as error:
            raise ConfigurationError(
                f"the run folder {path} cannot be made ({error.strerror}); choose another place "
                "with --runs DIR, or --runs none to keep nothing"
            ) from None

    @staticmethod
    def create(parent: Path, name: str) -> RunFolder:
        """A fresh folder `<time>-<name>`; a second run within the second gets a number."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = parent / f"{stamp}-{name}"
        number = 2
        while path.exists():
            path = parent / f"{stamp}-{name}-{number}"
            number += 1
        return RunFolder(path)

    def child(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)

    def write_config(self, config: dict[str, Any]) -> None:
        self._write("config.json", config)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", summary)

    def open_trace(self, workers: int) -> Timeline:
        self.timeline = Timeline(self.path / "trace.json")
        for rank in range(workers):
            self.timeline.name_worker(rank, f"worker {rank}")
        return self.timeline

    def add_row(self, row: dict[str, Any]) -> None:
        """One line of metrics, on disk before the run goes on."""
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self.timeline is not None:
            self.timeline.close()

    def _write(self, name: str, value: dict[str, Any]) -> None:
        # Written beside and renamed, so that a reader never sees half a file.
        temporary = self.path / f".{name}"
        temporary.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
        temporary.replace(self.path / name)
