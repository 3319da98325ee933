"""What is done against stale gradients, compared where gradients are equally stale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.config.cluster import Cluster, Compute
from gossamer.studies.reproductions.repeated.trials import (
    Repeated,
    Trial,
    at_rate,
    error,
    loss_of_test,
    staleness,
    tuned,
)
from gossamer.studies.reproductions.table import PublishedCell, PublishedTable, TrialBook

EPOCHS, BATCH = 6.0, 4
STALENESS = 15
RATES = {
    "sgd": (0.01, 0.03, 0.1, 0.3),
    "adagrad": (0.003, 0.01, 0.03),
    "adam": (0.001, 0.003, 0.01),
}
_STATED = "stated: the mean staleness of p workers is (p - 1) / c for c gradients an update"


@dataclass(frozen=True)
class Remedy:
    """A method and an optimiser with which gradients are as stale as with all others."""

    name: str
    method: str
    optimiser: str = "sgd"
    workers: int = STALENESS + 1

    def trial(self) -> Trial:
        return Trial(
            "digits-mlp", self.method,
            Cluster(name="equal", workers=self.workers, compute=Compute(seconds=0.01, jitter=0.1)),
            {"epochs": EPOCHS, "batch": BATCH, "optimiser": self.optimiser, "evaluations": 1},
        )  # fmt: skip


NOTHING = "nothing (ASGD)"
REMEDIES = (
    Remedy(NOTHING, "downpour"),
    Remedy("scaling by 1 / staleness", "staleness_aware"),
    # Pairs of gradients, so that twice as many workers (and one less) are as stale.
    Remedy("softsync, c = 2", f"softsync:n={STALENESS}", workers=2 * STALENESS + 1),
    Remedy("SSP, bound 1", "ssp:bound=1"),
    Remedy("DC-ASGD-c", "dc_asgd:compensation=0.04"),
    Remedy("DC-ASGD-a", "dc_asgd:compensation=2,adaptive=true"),
    Remedy("Adagrad", "downpour", "adagrad"),
    Remedy("Adam", "downpour", "adam"),
)


def _remedies(book: TrialBook) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    alone: dict[str, Repeated] = {}
    for optimiser, rates in RATES.items():
        one = Remedy(f"one worker, {optimiser}", "all_reduce", optimiser, workers=1)
        found = alone[optimiser] = tuned(one.trial(), rates, book, loss_of_test)
        cells += _row(one.name, found, found)
        book.progress(f"{one.name}: {error_of(cells[-2])}")
    for remedy in REMEDIES:
        untuned = at_rate(remedy.trial(), alone[remedy.optimiser].rate, book)
        own = tuned(remedy.trial(), RATES[remedy.optimiser], book, loss_of_test)
        cells += _row(remedy.name, untuned, own)
        book.progress(f"{remedy.name}: {error_of(cells[-2])}")
    return cells


def error_of(cell: PublishedCell) -> str:
    """For the line of progress."""
    return f"{cell.ours:.3g} ± {cell.half_width or 0.0:.2g} % wrong"


def _row(name: str, untuned: Repeated, own: Repeated) -> list[PublishedCell]:
    is_alone = name.startswith("one worker")
    published = None if is_alone or "SSP" in name else float(STALENESS)
    return [
        own.cell(name, "staleness", staleness, published, _STATED),
        untuned.cell(name, "error %, rate of one worker", error),
        own.cell(name, "error %, own rate", error),
        PublishedCell(name, "own rate", None, own.rate),
    ]


def verdict(cells: list[PublishedCell]) -> str:
    """Which remedies are clearly better than none, at either rate."""
    found = {(cell.row, cell.column): cell for cell in cells}
    lines: list[str] = []
    for column in ("error %, rate of one worker", "error %, own rate"):
        plain = found[NOTHING, column]
        better = [
            remedy.name
            for remedy in REMEDIES[1:]
            if _below(found[remedy.name, column], plain)
        ]  # fmt: skip
        lines.append(
            f"{column}: {', '.join(better) or 'no remedy'} clearly below nothing "
            f"({error_of(plain)})"
        )
    lines.append("clearly: the 95 % intervals do not meet")
    return "\n".join(lines)


def _below(one: PublishedCell, other: PublishedCell) -> bool:
    if math.isnan(one.ours):
        return False
    if math.isnan(other.ours):
        return True
    return one.ours + (one.half_width or 0.0) < other.ours - (other.half_width or 0.0)


TABLE = PublishedTable(
    name="staleness-remedies",
    title=f"Remedies for stale gradients, all with a mean staleness of {STALENESS}, digits",
    source=(
        "Dean et al. 2012 (Adagrad), Ho et al. 2013 (SSP), Zhang et al. 2016 (scaling), Gupta et "
        "al. 2016 (softsync), Zheng et al. 2017 (DC-ASGD), Jain et al. 2018 (Adam)"
    ),
    unit="",
    settings=(
        f"digits-mlp, {BATCH} images a worker and step, {EPOCHS:g} epochs of all workers together, "
        "constant rate, no momentum; equal workers, 10 ms a step with a standard deviation of "
        f"10 %. {STALENESS + 1} workers, of which each gradient misses {STALENESS} updates in the "
        f"mean; softsync takes two gradients an update, so it has {2 * STALENESS + 1} workers. "
        "SSP's staleness is what its bound makes it and stands beside it. The 'rate of one worker' "
        "is the best of one worker with the same optimiser, 'own rate' the best of the same grid "
        "with the remedy, both by test loss on a seed that does not count; mean of three seeds "
        "with 95 % intervals. No paper compares all of these; published are only the staleness."
    ),
    cells=4 * (len(RATES) + len(REMEDIES)),
    trials=_remedies,
    verdict=verdict,
)
