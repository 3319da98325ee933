"""What one run of `gossamer train` is to do: its settings, and what is needed beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.config.settings import Settings
from gossamer.real.faults.fault_plan import FaultPlan


@dataclass(frozen=True)
class TrainRequest:
    """Every choice made and checked before a worker starts.

    The workers read the settings, the folder and what is said of records and checkpoints, as JSON.
    The rest is for the process that starts them.
    """

    settings: Settings
    folder: Path | None = None
    """The run folder, in which each worker writes `workers/RANK.jsonl`; None keeps nothing."""
    is_recorded: bool = False
    """Whether the order of events is kept, so that the run can be replayed."""
    checkpoint_every: str | None = None
    """As in 30s or 100steps; into `checkpoint/` of the folder."""
    checkpoint: Path | None = None
    """The checkpoint to go on from."""
    is_resumed: bool = False
    """Whether the run of the folder goes on from its newest checkpoint."""
    transport: str | None = None
    faults: FaultPlan = field(default_factory=FaultPlan)
    deadline: float | None = None

    @property
    def place(self) -> Path:
        """The folder of a run that keeps something or has started."""
        assert self.folder is not None
        return self.folder.resolve()

    def to_json(self) -> str:
        return json.dumps({
            "settings": self.settings.to_json(),
            "folder": str(self.place),
            "is_recorded": self.is_recorded,
            "checkpoint_every": self.checkpoint_every,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
        })  # fmt: skip

    @staticmethod
    def from_json(text: str, data: Path | None = None) -> TrainRequest:
        """`data` is where the files of the task are on this host, if elsewhere."""
        values = json.loads(text)
        checkpoint = values.pop("checkpoint")
        return TrainRequest(
            Settings.from_json(values.pop("settings"), data), Path(values.pop("folder")),
            checkpoint=None if checkpoint is None else Path(checkpoint), **values,
        )  # fmt: skip
