"""A published table of many small trainings, computed one after the other and kept one by one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.commands.console import Reporter, say
from gossamer.commands.studies.batch import BatchOptions, BatchPlan, reading
from gossamer.commands.studies.published_table import show_table
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.studies.reproductions import PublishedCell, PublishedTable
from gossamer.studies.reproductions.table import TrialBook, TrialsStopped

_FILE = "trials.jsonl"


def _kept(path: Path) -> dict[str, Any]:
    """What a folder holds, one line a training. The last line may have been cut by a power cut."""
    file = path / _FILE
    if not file.exists():
        return {}
    with reading(path):
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        return {one["label"]: one["value"] for one in map(json.loads, lines)}


@dataclass
class TrialsBatch:
    """The trainings of one table; cells are known when all of them are done."""

    table: PublishedTable
    plan: BatchPlan
    options: BatchOptions
    ended: str = "running"
    cells: list[PublishedCell] = field(default_factory=list[PublishedCell])
    kept: dict[str, Any] = field(default_factory=dict[str, Any])
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Read what is done already."""
        self.options.check()
        if self.options.resume is not None:
            self.kept = _kept(self.options.resume)

    def config(self) -> Row:
        return {**self.plan.as_dict(), "settings": self.table.settings}

    def summary(self) -> Row:
        cells = [cell.as_dict() for cell in self.cells]
        return {"ended": self.ended, "table": self.table.name, "cells": cells}

    def train(self, folder: RunFolder | None, deadline: float) -> str:
        assert self.table.trials is not None

        def write(label: str, value: Any) -> None:
            if folder is not None:
                with (folder.path / _FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"label": label, "value": value}) + "\n")

        with Reporter(self.table.cells, self.table.name) as reporter:
            book = TrialBook(
                self.plan.choices["seed"], reporter.finished, self.kept, write,
                lambda: time.monotonic() > deadline,
            )  # fmt: skip
            try:
                self.cells = self.table.trials(book)
            except TrialsStopped:
                return "stopped"
            except KeyboardInterrupt:
                return "interrupted"
        return "finished"

    def show(self, folder: RunFolder | None) -> None:
        if not self.cells:
            say(f"{counted(len(self.kept), 'training')} done; cells are shown when all are")
            return
        show_table(self.table, self.cells)
