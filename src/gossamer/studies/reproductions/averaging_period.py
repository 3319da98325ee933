"""How often models must be averaged: periods from 1 to 80, on digits, in quality and in time."""

from __future__ import annotations

from statistics import mean, stdev

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.settings import make_settings
from gossamer.runs.result import Result
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable
from gossamer.tasks import make_task

PERIODS = (1, 2, 5, 10, 20, 40, 80)
RATES = (0.03, 0.1, 0.3)
SEEDS = 3
WORKERS, BATCH, EPOCHS = 4, 8, 20.0
_ABSENT = "no figure at hand; of the paper its abstract was read"


def averaged_every(period: int, rate: float, seed: int) -> Result:
    """One training of local SGD with this period."""
    cluster = Cluster(
        name="averaging", workers=WORKERS, compute=Compute(seconds=0.01, jitter=0.1),
        network=Wires(bandwidth=1.25e7, latency=1e-4),
    )  # fmt: skip
    settings = make_settings(
        make_task("digits-mlp"), f"local_sgd:period={period}", cluster, seed=seed, batch=BATCH,
        epochs=EPOCHS, learning_rate=rate, evaluations=1,
    )  # fmt: skip
    return Simulation(settings).run()


def _periods(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    seeds = range(seed, seed + SEEDS)
    for period in PERIODS:
        found = {rate: [averaged_every(period, rate, one) for one in seeds] for rate in RATES}
        errors = {rate: [100 * (1 - r.accuracy) for r in runs] for rate, runs in found.items()}
        best = min(RATES, key=lambda rate: mean(errors[rate]))
        row = f"period {period}"
        figures = {
            "error %": mean(errors[best]),
            "its deviation": stdev(errors[best]),
            "at rate": best,
            "seconds": mean(run.virtual_seconds for run in found[best]),
        }
        for column, value in figures.items():
            cells.append(PublishedCell(row, column, None, value, _ABSENT))
        progress(f"{row}: {figures['error %']:.2f} % wrong, {figures['seconds']:.2f} s")
    return cells


def _verdict(cells: list[PublishedCell]) -> str:
    errors = {cell.row: cell.ours for cell in cells if cell.column == "error %"}
    spread = max(cell.ours for cell in cells if cell.column == "its deviation")
    least = min(errors.values())
    alike = [row.removeprefix("period ") for row, one in errors.items() if one - least <= spread]
    return (
        f"errors lie between {least:.2f} and {max(errors.values()):.2f} %; periods "
        f"{', '.join(alike)} are within one standard deviation of a seed from the best"
    )


TABLE = PublishedTable(
    name="averaging-period",
    title="Averaging models every so many steps: error and time for periods from 1 to 80",
    source="Su & Chen 2015, Parallel Training of Deep Neural Networks using Model Averaging",
    unit="",
    settings=(
        f"local_sgd with {WORKERS} workers on digits-mlp, {EPOCHS:g} epochs in batches of {BATCH}; "
        f"10 ms a gradient, 100 Mbit/s; each period at the best of the rates "
        f"{', '.join(map(str, RATES))}, mean of {SEEDS} seeds. The paper trains speech models on "
        "Switchboard and we have none of its figures, so its statement is compared, not its "
        "numbers: that averaging every few batches loses little."
    ),
    cells=4 * len(PERIODS),
    compute=_periods,
    verdict=_verdict,
)
