"""For Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.report.exporters.exporter import Exporter, check_vacant, require
from gossamer.report.exporters.facts import Facts, flat


class WandbExporter(Exporter):
    """One run there per run here; needs wandb.

    `folder` is where its files go, otherwise where W&B puts them. Further arguments are those of
    `wandb.init`, such as entity, group or tags.
    """

    def __init__(
        self, project: str = "gossamer", *, folder: Path | str | None = None,
        name: str | None = None, force: bool = False, **init: Any,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self._wandb = require("wandb", "Weights & Biases", "wandb")
        self._init = {"project": project, "reinit": "create_new", **init}
        if folder is not None:
            check_vacant(Path(folder), force=force)
            # It would otherwise go elsewhere without a word.
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._init["dir"] = str(folder)

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        try:
            self._run: Any = self._wandb.init(
                name=name, config={**flat(settings), **_known(about)}, **self._init
            )
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(
                f"Weights & Biases did not begin a run ({reason[0].rstrip('.')}); run `wandb "
                "login`, or set WANDB_MODE=offline"
            ) from error

    def _row(self, row: Facts, step: int) -> None:
        self._run.log(_known(row), step=step)

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        self._run.config.update(_known(about), allow_val_change=True)
        self._run.summary.update({**_known(summary), "status": status})
        self._run.finish(exit_code=0 if status in ("finished", "diverged") else 1)


def _known(facts: Facts) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def keep_inside(folder: Path) -> None:
    """Caches and settings too, which W&B keeps in the home folder, unless the user has a place;
    and without its page of words about each run."""
    for name in ("CACHE", "CONFIG", "DATA"):
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / f".{name.lower()}"))
    os.environ.setdefault("WANDB_SILENT", "true")
