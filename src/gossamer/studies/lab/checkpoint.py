"""A sweep on disk, so that it can stop at any step and go on later as if it had not.

progress.json   what is finished, and which state belongs to what is not
state-N.npz     the matrices of the group in training, plain arrays without pickle

The state is written first and under a new name; replacing progress.json, which names it, is the one
moment at which the checkpoint changes. A power cut leaves the old one whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from gossamer.errors import ConfigurationError
from gossamer.runs.folder import to_json
from gossamer.studies.lab.training import Arrays

PROGRESS = "progress.json"
Described = dict[str, Any]


class SweepCheckpoint:
    """The saved state of one sweep."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, progress: Described, arrays: Arrays | None) -> None:
        """Replace what was saved before; `arrays` is None between two groups."""
        old = self._states()
        name = None
        if arrays is not None:
            number = 1 + max((int(path.stem.partition("-")[2]) for path in old), default=0)
            name = f"state-{number}.npz"
            temporary = self._folder / f".{name}"
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            temporary.replace(self._folder / name)
        temporary = self._folder / f".{PROGRESS}"
        temporary.write_text(to_json({**progress, "state": name}) + "\n", encoding="utf-8")
        temporary.replace(self._folder / PROGRESS)
        for path in old:
            path.unlink()

    def load(self) -> tuple[Described, Arrays | None]:
        """What was saved last."""
        path = self._folder / PROGRESS
        try:
            progress: Described = json.loads(path.read_text(encoding="utf-8"))
            name = progress["state"]
            if name is None:
                return progress, None
            # Opened here, for numpy leaves a file that it cannot read open.
            with (
                (self._folder / name).open("rb") as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                return progress, dict(arrays)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{self._folder} cannot be resumed, because it has no {Path(error.filename).name}; "
                "give the folder of a run that was stopped"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
            raise ConfigurationError(
                f"{self._folder} cannot be resumed, because its checkpoint is damaged ({error}); "
                "start the run again"
            ) from None

    def _states(self) -> list[Path]:
        return [path for path in self._folder.glob("state-*.npz") if path.stem[6:].isdecimal()]
