"""The CIFAR-10 table of Zheng et al. 2017, DC-ASGD: staleness with and without compensation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from gossamer.config.cluster import Cluster, Compute
from gossamer.quantities import counted
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.reproductions.pictures import ErrorCurve, error_curves
from gossamer.studies.reproductions.table import (
    PublishedCell,
    PublishedTable,
    Trainings,
    largest_deviation,
    show_percent,
)
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained, error_of

_SGD, _ASGD, _SSGD, _CONSTANT, _ADAPTIVE = "SGD", "ASGD", "SSGD", "DC-ASGD-c", "DC-ASGD-a"
_PUBLISHED = {
    (1, _SGD): 8.65,
    (4, _ASGD): 9.27, (4, _SSGD): 9.17, (4, _CONSTANT): 8.67, (4, _ADAPTIVE): 8.19,
    (8, _ASGD): 10.26, (8, _SSGD): 10.10, (8, _CONSTANT): 9.27, (8, _ADAPTIVE): 8.57,
}  # fmt: skip
_BEST_FIRST = (_ADAPTIVE, _CONSTANT, _SSGD, _ASGD)
_READ = "read in the paper"
_EPOCHS, _QUICK_EPOCHS = 160.0, 2.0
_RATES, _BATCH = (0.5, 0.1), 128
_MOMENTA = (0.0, 0.9)
_METHODS = {
    _SGD: "sync_server",
    _ASGD: "downpour",
    _SSGD: "sync_server",
    _CONSTANT: "dc_asgd:compensation=0.04",
    _ADAPTIVE: "dc_asgd:compensation=2,adaptive=true,mean_square=0.95",
}
# A step takes about as long as ResNet-20 took then; 10 Gbit/s is Gossamer's usual network.
_COMPUTE = Compute(seconds=0.05, jitter=0.1)


def _row(workers: int) -> str:
    return counted(workers, "worker")


def _column(method: str, rate: float, momentum: float = 0.0) -> str:
    """The paper's setting has the paper's name."""
    other = "" if rate == _RATES[0] else f", rate {rate:g}"
    return f"{method}{other}" + (f", momentum {momentum:g}" if momentum else "")


def trainings(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """Make all cells, or for a quick look those of 1 and 4 workers at the paper's rate. One worker
    comes first, because what it reaches decides whether the task is the paper's."""
    return [
        CellTraining(
            row=_row(workers),
            column=_column(method, rate, momentum),
            method=_METHODS[method],
            cluster=Cluster(name="equal-gpus", workers=workers, compute=_COMPUTE),
            choices={
                "seed": seed,
                "epochs": epochs,
                "batch": _BATCH,
                "learning_rate": rate,
                "optimiser": f"sgd:momentum={momentum:g},weight_decay=1e-4",
                # By default the rate is divided by ten at 1/2 and 3/4 of the epochs.
                "schedule": "step",
                # A quick look is for a CPU, on which evaluating takes long.
                "evaluations": 4 if quick else 20,
            },
            published=published,
            evidence=_READ,
        )
        for (workers, method), published in _PUBLISHED.items()
        for rate in (_RATES[:1] if quick else _RATES)
        for momentum in (_MOMENTA if workers == 1 and not quick else _MOMENTA[:1])
        if workers <= 4 or not quick
    ]


def verdict(cells: list[PublishedCell]) -> str:
    """Say for each number of workers whether the published order of the methods holds."""
    ours = {(cell.row, cell.column): cell.ours for cell in cells}
    lines: list[str] = []
    for row in (_row(4), _row(8)):
        known = [(name, ours[row, name]) for name in _BEST_FIRST if (row, name) in ours]
        if len(known) < 2:
            continue
        # A training that diverged is worse than any other.
        errors = [math.inf if math.isnan(error) else error for _, error in known]
        wrong = [
            f"{worse} is not above {better}"
            for (better, worse), (low, high) in zip(
                pairwise(name for name, _ in known), pairwise(errors), strict=True
            )
            if not low < high
        ]
        order = " < ".join(name for name, _ in known)
        holds = "holds" if not wrong else f"does not hold ({', '.join(wrong)})"
        lines.append(f"{row}: the published order of the errors, {order}, {holds}")
    lines += largest_deviation(cells)
    lines.append(
        "the order is that of the means at the paper's rate; overlapping intervals may be chance"
    )
    return "\n".join(lines)


def _picture(path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]) -> None:
    done = [one for one in work if one.label in trained]
    panels: dict[str, dict[str, ErrorCurve]] = {}
    for workers in (4, 8):
        # Every panel shows the plain SGD of one worker, too.
        lines = {
            one.column: ErrorCurve(*trained[one.label].points(), one.published)
            for one in done
            if one.row in (_row(1), _row(workers))
        }
        if any(one.row == _row(workers) for one in done) or (workers == 4 and lines):
            panels[_row(workers)] = lines
    epochs = max(one.choices["epochs"] for one in done)
    words = Caption(
        "ResNet-20 on CIFAR-10, stale gradients with and without compensation",
        f"error on the test set over {counted(epochs, 'epoch')} (log scale), the first seed; "
        "SGD: 1 worker",
        f"triangles at the right: published, after {_EPOCHS:g} epochs",
    )
    error_curves(path, panels, words)


TABLE = PublishedTable(
    name="dc-asgd-cifar10",
    title="Delay compensation: error in % on CIFAR-10, ResNet-20",
    source="Zheng, Meng, Wang, Chen, Yu, Ma & Liu 2017, Asynchronous SGD with Delay Compensation",
    unit="%",
    settings=(
        f"As in the paper: batch {_BATCH} a worker, rate {_RATES[0]}, divided by 10 "
        f"after half and three quarters of the epochs ({_EPOCHS:g} there); lambda 0.04 "
        "(DC-ASGD-c), lambda 2 and m 0.95 (DC-ASGD-a), one mean square per worker. Other than "
        "there: crop and flip as augmentation, because 8.65 % is what this network reaches with "
        f"it. A second rate, {_RATES[1]}, stands beside the paper's, and for one worker momentum "
        f"{_MOMENTA[1]}. Our choices where it is silent: no momentum; weight decay 1e-4, applied "
        "by the server after the compensation; an epoch counts the samples of all workers "
        "together; ASGD is downpour with n_push = n_fetch = 1; "
        "SSGD steps along the mean of the workers' gradients at the same rate, not a scaled one; "
        "equal workers whose steps take 50 ms with a standard deviation of 10 %, one server, "
        "10 Gbit/s; BatchNorm statistics averaged over the workers; the error is that of the "
        "server's model after the last epoch, not the best on the way. The published 8.65 % of "
        "one worker is about what He et al. 2016 report for this network with augmentation "
        "(8.75 %)."
    ),
    cells=len(trainings(0, False, _EPOCHS)),
    trainings=Trainings(
        seeds=3,
        problem=Problem("cifar10-resnet20"),
        epochs=_EPOCHS,
        quick_epochs=_QUICK_EPOCHS,
        make=trainings,
        value=error_of,
        show=show_percent,
        verdict=verdict,
        picture=_picture,
    ),
)
