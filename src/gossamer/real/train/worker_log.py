"""The log of each worker, which the process that started it reads: a file of JSON lines."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gossamer.files import replacement
from gossamer.real.transports.checked_values import broken_value
from gossamer.real.transports.transport import Store
from gossamer.runs.result import MODEL, Row, write_model

_STORE_S = 1.0
"""The least time between two lines of progress in the store, which keeps all in memory."""


class WorkerLog:
    """One worker's own file of lines; whatever ends the worker, its lines so far stay readable.

    With a store, which workers on other hosts reach too, the lines are written there as well.
    """

    def __init__(self, folder: Path, rank: int, store: Store | None = None) -> None:
        place = folder / "workers"
        place.mkdir(parents=True, exist_ok=True)
        self.path = place / f"{rank}.jsonl"
        self._file = self.path.open("w", encoding="utf-8")
        self._store = store
        self._rank = rank
        self._stored = 0
        self._stored_at = 0.0

    def write(self, kind: str, entry: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **entry})
        self._file.write(line + "\n")
        try:
            self._file.flush()
        except OSError:
            # What is not written yet stays in the buffer; progress can wait until there is room.
            if kind != "progress":
                raise
        now = time.monotonic()
        if self._store is not None and (kind != "progress" or now - self._stored_at > _STORE_S):
            self._store.agree(f"log/{self._rank}/{self._stored}", line)
            self._stored += 1
            self._stored_at = now

    def keep_output(self, parameters: Tensor, state: Mapping[str, Tensor]) -> None:
        """Keep the run's output model: its parameters beside the log, the model in the folder."""
        write_model(self.path.parent.with_name(MODEL), state)
        with replacement(self.path.with_name("output.npy")) as part, part.open("wb") as file:
            np.save(file, parameters.numpy(), allow_pickle=False)

    def close(self) -> None:
        self._file.close()


class LogEntries(Protocol):
    """One worker's log, as another process reads it."""

    def new(self) -> Iterator[Row]:
        """The entries written since the last look."""
        ...


class FileEntries:
    """The log of another process, read from its file while it is written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / "workers" / f"{rank}.jsonl"
        self._read = 0

    def new(self) -> Iterator[Row]:
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
    """The log of another process, read from the store that it is copied to."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._read = 0

    def new(self) -> Iterator[Row]:
        while (line := self._store.get(key := f"log/{self._rank}/{self._read}")) is not None:
            self._read += 1
            try:
                entry = dict(json.loads(line))
            except (ValueError, TypeError):
                raise broken_value(key, line, f"a line of worker {self._rank}") from None
            yield entry


class LogReader(ABC):
    """Reads the logs of workers in a thread of its own while they are written."""

    def __init__(self, logs: Sequence[LogEntries], look_s: float = 0.1) -> None:
        """`look_s` is how often to look for new lines."""
        self._logs = logs
        self._look_s = look_s
        self._over = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> LogReader:
        self._thread = threading.Thread(target=self._follow, name="gossamer logs", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(self._look_s):
            self.catch_up()

    def catch_up(self) -> None:
        """Read all that was written so far."""
        with self._lock:
            for rank, log in enumerate(self._logs):
                for entry in log.new():
                    self._note(rank, entry.pop("kind"), entry)

    @abstractmethod
    def _note(self, rank: int, kind: str, entry: Row) -> None: ...
