"""The second door: hand over the loop. `simulate` runs a method in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gossamer.callbacks import Callback
from gossamer.methods import MethodSpec
from gossamer.settings import make_settings
from gossamer.sim.cluster import Cluster
from gossamer.sim.simulation import Result, Row, Simulation
from gossamer.tasks import Task


def simulate(
    task: str | Task,
    method: str | MethodSpec,
    cluster: str | Path | Cluster = "equal-8",
    *,
    data: Path | str | None = None,
    on_row: Callable[[Row], None] | None = None,
    callbacks: Sequence[Callback] = (),
    **choices: Any,
) -> Result:
    """Train in virtual time with true gradients; the same seed gives the same run.

    `choices` are the fields of `Settings`: seed, epochs, batch, learning_rate, optimiser,
    schedule, clip, split, engine, device, compiled, buffers, evaluations.
    """
    settings = make_settings(task, method, cluster, data=data, **choices)
    return Simulation(settings, on_row=on_row, callbacks=callbacks).run()
