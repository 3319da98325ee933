"""How a run is cut into pieces, and how a piece begins where the last one ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, Unfinished
from gossamer.runs.result import Row
from gossamer.sim.checkpoint.file import RunCheckpoint
from gossamer.sim.checkpoint.state import TensorState, tensors_of
from gossamer.sim.world import World


@dataclass(frozen=True)
class RunPiece:
    """The part of a run that one process makes: where its checkpoint is, and when it is written."""

    path: Path
    every_seconds: float = math.inf
    """So often a checkpoint is written, in wall time."""
    seconds: float = math.inf
    """After so long the piece ends with a checkpoint."""
    events: float = math.inf
    """The piece also ends after so many events of the whole run."""
    resumes: bool = False
    """Whether it goes on from the checkpoint that is there."""

    def checkpoint(self) -> RunCheckpoint | None:
        """The checkpoint to go on from."""
        return RunCheckpoint.read(self.path) if self.resumes else None

    def __post_init__(self) -> None:
        for name in ("every_seconds", "seconds", "events"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, got {getattr(self, name)}")


class Checkpoints:
    """Writes the checkpoints of a run, and restores the one that it goes on from."""

    def __init__(
        self, piece: RunPiece, world: World, apart: Sequence[object],
        facts: Callable[[], tuple[Row, list[Row], float]],
    ) -> None:  # fmt: skip
        """`apart` is what a run uses but does not change. `facts` gives the settings, the rows so
        far and the wall time so far."""
        self._piece = piece
        self._world = world
        self._apart = apart
        self._facts = facts
        began = time.monotonic()
        self._ends_at = began + piece.seconds
        self._due_at = began + piece.every_seconds
        world.kernel.on_interrupt = self.write

    def between(self) -> None:
        """Called by the kernel between events, every few of them."""
        now = time.monotonic()
        if now >= self._ends_at or self._world.kernel.events >= self._piece.events:
            self.write()
            raise Unfinished(self._piece.path, self._world.budget.processed)
        if now >= self._due_at:
            self.write()
            self._due_at = time.monotonic() + self._piece.every_seconds

    @property
    def stride(self) -> int:
        """After how many events the kernel may look at the clock again."""
        return 1 if self._piece.events < math.inf else 64

    def end(self) -> None:
        """The run has ended by itself, and nothing is left to resume."""
        self._piece.path.unlink(missing_ok=True)

    def write(self) -> None:
        kernel = self._world.kernel
        settings, rows, seconds = self._facts()
        RunCheckpoint(
            settings, kernel.events, kernel.digest.hexdigest(), rows, seconds,
            self._world.metrics.tallies, TensorState.of(self._tensors()),
        ).write(self._piece.path)  # fmt: skip

    def restore(self, checkpoint: RunCheckpoint, device: torch.device) -> None:
        """Give the tensors of a run whose events have been made again their values."""
        found = self._tensors()
        again = self._world.kernel.digest.hexdigest()
        if again != checkpoint.digest or not checkpoint.state.fits(found):
            raise ConfigurationError(
                f"the first {checkpoint.events} events of the run in {self._piece.path} come out "
                "differently when they are made again: the method or the package has changed, or "
                "the method acts by the values of tensors; begin the run anew"
            )
        checkpoint.state.give(found, device)
        self._world.metrics.tallies = checkpoint.observed

    def _tensors(self) -> list[Tensor]:
        self._world.kernel.put_in_order()
        return tensors_of(self._world, self._apart)
