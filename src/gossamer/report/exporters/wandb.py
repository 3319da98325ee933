"""An exporter to Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.report.exporters.exporter import Exporter, first_line, known, require
from gossamer.report.exporters.facts import Facts, flat


class WandbExporter(Exporter):
    """Writes each run as a run of W&B; needs wandb.

    The files go to `folder`, or where W&B puts them. Further arguments go to `wandb.init`, such as
    entity, group or tags.
    """

    def __init__(
        self, project: str = "gossamer", *, folder: Path | str | None = None,
        name: str | None = None, force: bool = False, **init: Any,
    ) -> None:  # fmt: skip
        super().__init__(folder, name, force=force)
        self._wandb = require("wandb", "Weights & Biases", "wandb")
        self._init = {"project": project, "reinit": "create_new", **init}
        if self._folder is not None:
            # W&B silently writes elsewhere if the folder does not exist.
            self._folder.mkdir(parents=True, exist_ok=True)
            self._init["dir"] = str(self._folder)

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        try:
            self._run: Any = self._wandb.init(
                name=name, config={**flat(settings), **known(about)}, **self._init
            )
        except Exception as error:
            raise ConfigurationError(
                f"Weights & Biases did not begin a run ({first_line(error)}); run `wandb "
                "login`, or set WANDB_MODE=offline"
            ) from error

    def _row(self, row: Facts, step: int) -> None:
        self._run.log(known(row), step=step)

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        self._run.config.update(known(about), allow_val_change=True)
        self._run.summary.update({**known(summary), "status": status})
        self._run.finish(exit_code=0 if status in ("finished", "diverged") else 1)


def keep_inside(folder: Path) -> None:
    """Let W&B keep its caches and settings in this folder instead of the home folder, unless the
    user has set another place, and print nothing about each run."""
    for name in ("CACHE", "CONFIG", "DATA"):
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / f".{name.lower()}"))
    os.environ.setdefault("WANDB_SILENT", "true")
