"""What the workers of `gossamer train` are to do, as plain values that travel as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gossamer.real.transports.checked_values import broken_value
from gossamer.real.transports.transport import Store
from gossamer.runs.result import MODEL, write_model

_TELL_S = 1.0


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
    is_recorded: bool = False
    """Whether the order of events is kept, so that the run can be replayed."""
    checkpoint_every: str | None = None
    """As in 30s or 100steps; into `checkpoint/` of the folder."""
    resume: str | None = None
    """The checkpoint to go on from."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))


class Diary:
    """One worker's own file of lines; whatever ends it, the lines so far stay readable.

    With a store, which workers on other hosts reach too, the lines are written there as well.
    """

    def __init__(self, folder: str, rank: int, store: Store | None = None) -> None:
        place = Path(folder) / "workers"
        place.mkdir(parents=True, exist_ok=True)
        self.path = place / f"{rank}.jsonl"
        self._file = self.path.open("w", encoding="utf-8")
        self._store = store
        self._rank = rank
        self._told = 0
        self._told_at = 0.0

    def write(self, kind: str, entry: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **entry})
        self._file.write(line + "\n")
        try:
            self._file.flush()
        except OSError:
            # What is not written yet stays in the buffer. Progress can wait for there to be room.
            if kind != "progress":
                raise
        now = time.monotonic()
        # A store keeps all that it is told in memory: of progress it is told some.
        if self._store is not None and (kind != "progress" or now - self._told_at > _TELL_S):
            self._store.agree(f"diary/{self._rank}/{self._told}", line)
            self._told += 1
            self._told_at = now

    def keep_output(self, parameters: Tensor, state: Mapping[str, Tensor]) -> None:
        """The run's output model: its parameters beside the lines, all of it in the run's folder;
        there when it is whole."""
        write_model(self.path.parent.with_name(MODEL), state)
        part = self.path.with_name(".output.npy")
        with part.open("wb") as file:
            np.save(file, parameters.numpy(), allow_pickle=False)
        part.replace(self.path.with_name("output.npy"))

    def close(self) -> None:
        self._file.close()


class FileEntries:
    """Another process's diary, read from its file while it is written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / "workers" / f"{rank}.jsonl"
        self._read = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # half a line: its worker is writing it, or died over it
                self._read += len(line)
                yield json.loads(line)


class StoreEntries:
    """Another process's diary, read from the store that it is copied to."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._read = 0

    def new(self) -> Iterator[dict[str, Any]]:
        while (line := self._store.get(key := f"diary/{self._rank}/{self._read}")) is not None:
            self._read += 1
            try:
                entry = dict(json.loads(line))
            except (ValueError, TypeError):
                raise broken_value(key, line, f"a line of worker {self._rank}") from None
            yield entry
