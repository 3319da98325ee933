"""An exporter to TensorBoard: a folder of events for each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.report.exporters.exporter import Exporter, require
from gossamer.report.exporters.facts import Facts
from gossamer.runs.folder import to_json


class TensorBoardExporter(Exporter):
    """Writes event files, which `tensorboard --logdir FOLDER` shows; needs tensorboard.

    The wall time of an event is the run's own time in seconds, so that TensorBoard's time axes show
    the time, virtual or real, by which methods differ.
    """

    def __init__(
        self, folder: Path | str, *, name: str | None = None, force: bool = False
    ) -> None:  # fmt: skip
        super().__init__(folder, name, force=force)
        self._torch = require("torch.utils.tensorboard", "an event file", "tensorboard")
        self._path = Path(folder)

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        place = self._path / name
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()  # TensorBoard would draw the old and the new events together
        self._writer = self._torch.SummaryWriter(log_dir=str(place))
        self._settings = settings

    def _row(self, row: Facts, step: int) -> None:
        for name, value in row.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step, walltime=self._last[1])
        self._writer.flush()

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        texts = {"settings": dict(self._settings), "summary": {**about, **summary}}
        for name, value in texts.items():
            if value:
                lines = to_json(value, indent=2).splitlines()
                # TensorBoard shows a text unchanged if it is indented by four spaces.
                text = "\n".join(f"    {line}" for line in lines)
                step, seconds = self._last
                self._writer.add_text(name, text, step, walltime=seconds)
        self._writer.close()
