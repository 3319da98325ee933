"""Linear speed-up, as Lian et al. promise it: n workers need as many epochs as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from gossamer.config.cluster import Cluster, Compute
from gossamer.studies.reproductions.repeated.trials import Trial, reached, repeated_cell, tuned
from gossamer.studies.reproductions.table import PublishedCell, PublishedTable, TrialBook

METHODS = {
    "AD-PSGD": "ad_psgd",
    "D-PSGD": "d_psgd:topology=ring",
    "AllReduce": "all_reduce",
}
WORKERS = (1, 4, 16)
BATCH = 4


@dataclass(frozen=True)
class Aim:
    """What is trained, and when it counts as solved."""

    task: str
    rates: Sequence[float]
    epochs: float
    evaluations: int
    target: float
    score: str

    def trial(self, method: str, workers: int) -> Trial:
        """One cell of the table, before its rate is known."""
        return Trial(
            self.task, method,
            Cluster(name="equal", workers=workers, compute=Compute(seconds=0.01, jitter=0.1)),
            {
                "epochs": self.epochs, "batch": BATCH, "optimiser": "sgd",
                "evaluations": self.evaluations,
            },
        )  # fmt: skip


# Points of deviation 3 around their mean, in ten dimensions: the least loss that any parameters
# have is 32.8151, and noise decides how fast they get near it.
PROBLEMS = {
    "digits": Aim("digits-mlp", (0.03, 0.1, 0.3), 8.0, 40, 0.94, "accuracy"),
    "noise": Aim(
        "quadratic:dimension=10,condition=2,noise=3,spread=0,samples=4096",
        (0.01, 0.03, 0.1, 0.3), 1.0, 40, 32.8651, "loss",
    ),
}  # fmt: skip
_THEORY = "of the theory: the error after K updates falls as 1/sqrt(nK), so the share is 100 %"


def _speed_up(book: TrialBook) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for name, problem in PROBLEMS.items():
        measure = reached(problem.target, "epochs", problem.score)
        for column, method in METHODS.items():
            alone: list[float] = []
            for workers in WORKERS:
                found = tuned(problem.trial(method, workers), problem.rates, book, measure)
                epochs = found.values(measure)
                alone = alone or epochs
                share = [100 * one / own for one, own in zip(alone, epochs, strict=True)]
                row = _row(name, workers)
                published = 100.0 if workers > 1 else None
                cells += [
                    repeated_cell(row, f"{column}: epochs", epochs),
                    repeated_cell(row, f"{column}: % of linear", share, published, _THEORY),
                    PublishedCell(row, f"{column}: at rate", None, found.rate),
                ]
                book.progress(
                    f"{column}, {row}: {cells[-3].ours:.3g} epochs at rate {found.rate:g}"
                )
    return cells


def _row(problem: str, workers: int) -> str:
    return f"{problem}, {workers} worker{'s' if workers > 1 else ''}"


def verdict(cells: list[PublishedCell]) -> str:
    """Up to how many workers each method keeps nine tenths of a linear speed-up."""
    lines: list[str] = []
    for name, column in product(PROBLEMS, METHODS):
        shares = {c.row: c for c in cells if c.column == f"{column}: % of linear"}
        held = 1
        for workers in WORKERS[1:]:
            cell = shares[_row(name, workers)]
            if math.isnan(cell.ours) or cell.ours + (cell.half_width or 0.0) < 90.0:
                break
            held = workers
        lines.append(
            f"{name}, {column}: a share of 90 % of linear speed-up is within the interval up to "
            f"{held} worker{'s' if held > 1 else ''}"
        )
    return "\n".join(lines)


TABLE = PublishedTable(
    name="linear-speed-up",
    title="Linear speed-up: epochs to a target by number of workers",
    source="Lian et al. 2017 and 2018 (corollaries on linear speed-up)",
    unit="",
    settings=(
        f"{BATCH} samples a worker and step, plain SGD without momentum, constant rate; equal "
        "workers, 10 ms a step with a standard deviation of 10 %; AD-PSGD on its bipartite "
        "exponential graph, D-PSGD on a ring. 'digits': digits-mlp to 94 % within 8 epochs of all "
        "workers together. 'noise': the quadratic of ten dimensions and condition number 2 whose "
        "4096 samples have deviation 3, to 0.05 above its least loss within one epoch; there "
        "noise decides, as the theory assumes. Each cell at the best of three or four rates "
        "(0.03 to 0.3; 0.01 to 0.3), chosen on a seed that does not count; mean of three seeds "
        "with 95 % intervals. The share of linear speed-up is the epochs of one worker over those "
        "of n, seed by seed: its n workers make 1/n of the steps where the share is 100 %."
    ),
    cells=3 * len(PROBLEMS) * len(METHODS) * len(WORKERS),
    trials=_speed_up,
    verdict=verdict,
)
