"""What the workers of `gossamer train` are to do, as plain values that travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """Every choice made and checked before a worker starts."""

    task: str
    data: str | None
    method: str
    seed: int
    samples: int
    """To be processed by all workers together."""
    batch: int
    learning_rate: float
    optimiser: str
    schedule: str
    epochs: float
    clip: float | None
    split: str
    buffers: str
    threads: int
    evaluations: int
    folder: str
    """Where the workers write what they have to say; `workers/RANK.jsonl` each."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))


class Diary:
    """One worker's own file of lines; whatever ends it, the lines so far stay readable."""

    def __init__(self, folder: str, rank: int) -> None:
        place = Path(folder) / "workers"
        place.mkdir(parents=True, exist_ok=True)
        self.path = place / f"{rank}.jsonl"
        self._file = self.path.open("w", encoding="utf-8")

    def write(self, kind: str, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **entry}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
