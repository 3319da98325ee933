"""The clock of asynchronous DiLoCo's published toy: four unequal workers, and no gradients.

The method itself runs, in virtual time; only its times are looked at.
"""

from __future__ import annotations

from typing import Any

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Fault
from gossamer.config.settings import make_settings
from gossamer.observe.observer import Observer
from gossamer.sim.kernel import SECOND
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable
from gossamer.tasks import make_task

STEP_S = (0.58, 0.75, 1.51, 3.33)
PERIOD, GRACE_S, EVERY = 20, 0.5, 800
TIMES_S = (209.00, 406.40, 603.80, 801.40, 999.00, 1207.80, 1404.20, 1600.60, 1800.20, 1998.60)
MEAN_STALENESS, MOST_STALENESS = 2.75, 14
_TIME, _VALUE = "seconds", "updates"
_READ = "read in the published notebook (google-deepmind/asyncdiloco)"


class _Arrivals(Observer):
    """When displacements arrived at the server, and how stale they were."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.staleness: list[float] = []

    def observed(self, end: int, what: str, value: float, at_ns: int) -> None:
        if what == "outer_staleness":
            self.at_s.append(at_ns / SECOND)
            self.staleness.append(value)


def arrivals(seed: int, *, grace_s: float = GRACE_S) -> tuple[list[float], list[float]]:
    """The times and the staleness of all displacements up to the last published time."""
    slow = tuple(
        Fault("slow", worker=rank, amount=own / STEP_S[0])
        for rank, own in enumerate(STEP_S)
        if rank
    )
    cluster = Cluster(
        name="four-unequal-workers", workers=len(STEP_S), faults=slow,
        compute=Compute(seconds=STEP_S[0], distribution="constant"),
        network=Wires(bandwidth=1e15, latency=0.0),
    )  # fmt: skip
    steps = EVERY * (len(TIMES_S) + 1)
    task = make_task("quadratic:dimension=1,samples=1024")
    choices: dict[str, Any] = {
        "seed": seed, "batch": 1, "epochs": steps / len(task.train), "engine": "none",
    }  # fmt: skip
    method = f"async_diloco:period={PERIOD},dynamic=false,grace={grace_s:g}"
    seen = _Arrivals()
    Simulation(make_settings(task, method, cluster, **choices), observers=[seen]).run()
    count = EVERY * len(TIMES_S) // PERIOD
    return seen.at_s[:count], seen.staleness[:count]


def _clock(seed: int, progress: Progress) -> list[PublishedCell]:
    at_s, staleness = arrivals(seed)
    cells: list[PublishedCell] = []
    for number, published in enumerate(TIMES_S, start=1):
        steps = EVERY * number
        ours = at_s[steps // PERIOD - 1]
        cells.append(PublishedCell(f"after {steps} steps", _TIME, published, ours, _READ))
        progress(f"after {steps} local steps: {ours:.2f} s")
    mean = sum(staleness) / len(staleness)
    cells.append(PublishedCell("mean staleness", _VALUE, MEAN_STALENESS, mean, _READ))
    cells.append(PublishedCell("greatest staleness", _VALUE, MOST_STALENESS, max(staleness), _READ))
    progress(f"staleness: mean {mean:.4g}, greatest {max(staleness):g}")
    return cells


def _verdict(cells: list[PublishedCell]) -> str:
    times = [cell for cell in cells if cell.column == _TIME]
    exact = sum(abs(cell.ours - (cell.published or 0.0)) < 0.005 for cell in times)
    return f"{exact} of {len(times)} times agree to 0.01 s"


TABLE = PublishedTable(
    name="async-diloco-clock",
    title="Asynchronous DiLoCo: when four unequal workers have made so many steps together",
    source="Liu et al. 2024, Asynchronous Local-SGD Training (2401.09135), published notebook",
    unit="",
    settings=(
        f"Four workers that take {', '.join(f'{own:g}' for own in STEP_S)} s a step, {PERIOD} "
        f"steps between two exchanges (no dynamic steps), a grace period of {GRACE_S:g} s, a "
        "network that takes no time. The method async_diloco runs in virtual time, without "
        f"gradients; a time is that of the arrival that completes a multiple of {EVERY} steps. "
        "The server waits only for whom it expects within the grace period, by its speed; a "
        "server that always waited for the whole of it would be later."
    ),
    cells=len(TIMES_S) + 2,
    compute=_clock,
    verdict=_verdict,
)
