"""For TensorBoard: a folder of events per run, scalars against steps and the run's own seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.report.exporters.exporter import Exporter, check_vacant, require
from gossamer.report.exporters.facts import Facts
from gossamer.runs.folder import to_json


class TensorBoardExporter(Exporter):
    """Look at it with `tensorboard --logdir FOLDER`; needs tensorboard.

    The wall time of an event is the second of the run, so that TensorBoard's relative and wall
    axes show the time by which methods differ, virtual or real.
    """

    def __init__(
        self, folder: Path | str, *, name: str | None = None, force: bool = False
    ) -> None:  # fmt: skip
        super().__init__(name)
        self._torch = require("torch.utils.tensorboard", "an event file", "tensorboard")
        self._folder = Path(folder)
        check_vacant(self._folder, force=force)

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        place = self._folder / name
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()  # forced: TensorBoard would draw both
        self._writer = self._torch.SummaryWriter(log_dir=str(place))
        self._last = (0, 0.0)
        self._settings = settings

    def _row(self, row: Facts, step: int) -> None:
        seconds = row.get("seconds")
        seconds = float(seconds) if isinstance(seconds, int | float) else self._last[1]
        self._last = (step, seconds)
        for name, value in row.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step, walltime=seconds)
        self._writer.flush()

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        texts = {"settings": dict(self._settings), "summary": {**about, **summary}}
        for name, value in texts.items():
            if value:
                lines = to_json(value, indent=2).splitlines()
                # Indented by four, it is shown as it is.
                text = "\n".join(f"    {line}" for line in lines)
                step, seconds = self._last
                self._writer.add_text(name, text, step, walltime=seconds)
        self._writer.close()
