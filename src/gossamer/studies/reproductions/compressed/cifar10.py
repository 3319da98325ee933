"""Error against bytes on CIFAR-10: PowerSGD (Vogels et al. 2019) and DGC (Lin et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.config.cluster import Cluster, Compute
from gossamer.quantities import counted
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.reproductions.pictures import ErrorCurve, error_curves
from gossamer.studies.reproductions.shapes import (
    Margin,
    accuracy,
    accuracy_of,
    alike,
    judged,
    less,
)
from gossamer.studies.reproductions.table import (
    PublishedCell,
    PublishedTable,
    Trainings,
    largest_deviation,
)
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained

_MEMORY = "quoted from memory of the paper"
_ACCURACY, _BYTES = "accuracy %", "times fewer bytes"
# Seeds of one method differ by about two tenths of a point with these networks.
_MARGIN = Margin(absolute=0.4)
_COMPUTE = Compute(seconds=0.1, jitter=0.1)
_SGD = "SGD"

# ---------------------------------------------------------------------- PowerSGD

_WARM = ",start=100"
_POWER = {
    _SGD: "all_reduce", "rank 1": f"all_reduce+powersgd:rank=1{_WARM}",
    "rank 2": f"all_reduce+powersgd:rank=2{_WARM}",
    "rank 4": f"all_reduce+powersgd:rank=4{_WARM}",
}  # fmt: skip
_POWER_PUBLISHED = {_SGD: 94.3, "rank 1": 93.6, "rank 2": 94.4, "rank 4": 94.5}
_POWER_BYTES = {"rank 1": 243.0, "rank 2": 136.0, "rank 4": 72.0}
_POWER_EPOCHS, _POWER_WORKERS, _POWER_BATCH = 300.0, 16, 128


def powersgd_trainings(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """Plain SGD and three ranks; a quick look has two workers, and SGD beside rank 2 from the first
    gradient on."""
    workers, share = (2 if quick else _POWER_WORKERS), epochs / _POWER_EPOCHS
    drops = "/".join(f"{drop * share:.6g}" for drop in (150.0, 250.0))
    return [
        CellTraining(
            row=row, column=_ACCURACY, method=method.removesuffix(_WARM) if quick else method,
            cluster=Cluster(name="equal-gpus", workers=workers, compute=_COMPUTE),
            choices={
                "seed": seed, "epochs": epochs, "batch": _POWER_BATCH,
                "learning_rate": 0.1, "optimiser": "sgd:momentum=0.9,weight_decay=1e-4",
                "schedule": f"step:at={drops},warmup={5 * share:.6g},scale=workers",
                "evaluations": 1 if quick else 30,
            },
            published=_POWER_PUBLISHED[row], evidence=_MEMORY,
        )
        for row, method in _POWER.items()
        if not quick or row in (_SGD, "rank 2")
    ]  # fmt: skip


# ---------------------------------------------------------------------- DGC

_DROPPED, _DGC = "gradient dropping", "DGC"
_DGC_SHARE = 0.001
_DGC_METHODS = {
    _SGD: "all_reduce",
    _DROPPED: f"all_reduce+topk:share={_DGC_SHARE:g},scope=tensor",
    # Four of 164 epochs, as the paper warms up.
    _DGC: f"all_reduce+dgc:share={_DGC_SHARE:g},scope=tensor,warm_up=0.0244",
}
_DGC_PUBLISHED = {_SGD: 93.75, _DROPPED: 92.75, _DGC: 93.87}
_DGC_EPOCHS, _DGC_WORKERS, _DGC_BATCH = 164.0, 4, 32


def dgc_trainings(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """SGD, the largest few with feedback alone, and DGC."""
    share = epochs / _DGC_EPOCHS
    drops = "/".join(f"{drop * share:.6g}" for drop in (82.0, 123.0))
    return [
        CellTraining(
            row=row, column=_ACCURACY, method=method,
            cluster=Cluster(
                name="equal-gpus", workers=2 if quick else _DGC_WORKERS, compute=_COMPUTE
            ),
            choices={
                "seed": seed, "epochs": epochs, "batch": _DGC_BATCH, "learning_rate": 0.1,
                "optimiser": "sgd:momentum=0.9,weight_decay=1e-4",
                "schedule": f"step:at={drops}", "evaluations": 1 if quick else 30,
            },
            published=_DGC_PUBLISHED[row], evidence=_MEMORY,
        )
        for row, method in _DGC_METHODS.items()
        if not quick or row != _DROPPED
    ]  # fmt: skip


# ---------------------------------------------------------------------- both


def _bytes_of(one: CellTraining, trained: Mapping[str, Trained]) -> list[PublishedCell]:
    """How many times fewer bytes than whole gradients the encodings have."""
    ratio = trained[one.label].summary.get("compression_ratio")
    if ratio is None:
        return []
    published = _POWER_BYTES.get(one.row)
    return [PublishedCell(one.row, _BYTES, published, float(ratio), _MEMORY)]


def _show(cell: PublishedCell) -> str:
    if math.isnan(cell.ours):
        return "diverged"
    form = "{:.2f}" if cell.column == _ACCURACY else "{:.0f}"
    within = "" if cell.half_width is None else f" ± {form.format(cell.half_width)}"
    ours = form.format(cell.ours) + within
    return ours if cell.published is None else f"{ours} | {form.format(cell.published)}"


def _score(cells: Sequence[PublishedCell], row: str) -> Any:
    found = {cell.row: cell.ours for cell in cells if cell.column == _ACCURACY}
    return accuracy(row, found.get(row))


def _ended(lines: list[str], cells: Sequence[PublishedCell]) -> str:
    scores = [cell for cell in cells if cell.column == _ACCURACY]
    lines += largest_deviation(scores)
    count = max((cell.seeds for cell in scores), default=1)
    seeds = "one seed" if count == 1 else f"means of {count} seeds with 95 % intervals"
    lines.append(
        f"{seeds}; accuracies within {_MARGIN.absolute:g} points count as equal; published "
        f"figures: {_MEMORY}"
    )
    return "\n".join(lines)


def powersgd_verdict(cells: list[PublishedCell]) -> str:
    """Ranks 2 and 4 as good as SGD, rank 1 below it."""
    lines = [
        judged(
            f"{row} as good as {_SGD}",
            [alike("CIFAR-10", _score(cells, row), _score(cells, _SGD), _MARGIN)],
        )
        for row in ("rank 2", "rank 4")
    ]
    below = less("CIFAR-10", _score(cells, "rank 1"), _score(cells, _SGD), _MARGIN)
    lines.append(judged(f"rank 1 below {_SGD}", [below]))
    return _ended(lines, cells)


def dgc_verdict(cells: list[PublishedCell]) -> str:
    """DGC as good as SGD, dropping without momentum correction below both."""
    as_good = alike("CIFAR-10", _score(cells, _DGC), _score(cells, _SGD), _MARGIN)
    below = less("CIFAR-10", _score(cells, _DROPPED), _score(cells, _SGD), _MARGIN)
    lines = [
        judged(f"{_DGC} as good as {_SGD}", [as_good]),
        judged(f"{_DROPPED} below {_SGD}", [below]),
    ]
    return _ended(lines, cells)


def _picture(path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]) -> None:
    lines = {
        one.row: ErrorCurve(
            *trained[one.label].points(), None if one.published is None else 100.0 - one.published
        )
        for one in work
        if one.label in trained
    }
    epochs = work[0].choices["epochs"]
    workers = work[0].cluster.workers
    words = Caption(
        "CIFAR-10 with compressed gradients",
        f"error on the test set over {counted(epochs, 'epoch')} (log scale), the first seed",
        f"triangles at the right: published, {_MEMORY}",
    )
    error_curves(path, {counted(workers, "worker"): lines}, words)


_CUT = (
    "One H200 trains a cell for nine minutes at most: with --epochs the schedule shrinks, and "
    "epochs are cut before seeds."
)
POWERSGD = PublishedTable(
    name="powersgd-cifar10",
    title="PowerSGD on CIFAR-10, ResNet-18, 16 workers: accuracy and bytes",
    source="Vogels, Karimireddy & Jaggi 2019, PowerSGD",
    unit="",
    settings=(
        f"As in the paper: {_POWER_WORKERS} workers, batch {_POWER_BATCH} a worker, rate 0.1 a "
        "worker after a warm-up of 5 epochs, divided by 10 after 150 and 250 of "
        f"{_POWER_EPOCHS:g} epochs (all shrink with --epochs), momentum 0.9, crop and flip. Our "
        "choices: weight decay 1e-4 also on BatchNorm, where the paper has none; the first 100 "
        "gradients travel as they are; an epoch counts the samples of all workers together; "
        f"BatchNorm statistics averaged over the workers. {_CUT}"
    ),
    cells=2 * len(_POWER) - 1,
    trainings=Trainings(
        problem=Problem("cifar10-resnet18"), epochs=_POWER_EPOCHS, quick_epochs=0.01,
        make=powersgd_trainings, value=accuracy_of, show=_show, verdict=powersgd_verdict,
        picture=_picture, further=_bytes_of,
    ),
)  # fmt: skip
DGC = PublishedTable(
    name="dgc-cifar10",
    title="Deep Gradient Compression on CIFAR-10, 4 workers: accuracy and bytes",
    source="Lin, Han, Mao, Wang & Dally 2018, Deep Gradient Compression",
    unit="",
    settings=(
        f"As in the paper: {_DGC_WORKERS} workers, {_DGC_WORKERS * _DGC_BATCH} images a step, "
        f"momentum 0.9, one number in {1 / _DGC_SHARE:g} of each tensor, of which the share falls "
        f"from a quarter during the first four of {_DGC_EPOCHS:g} epochs. Our choices: ResNet-20 "
        "instead of its ResNet-110, so that levels differ and only orders can be compared; rate "
        "0.1 divided by 10 after a half and three quarters (all shrink with --epochs); weight "
        "decay 1e-4; gradients are not clipped; vectors are compressed like matrices; BatchNorm "
        f"statistics averaged over the workers. {_CUT}"
    ),
    cells=2 * len(_DGC_METHODS) - 1,
    trainings=Trainings(
        problem=Problem("cifar10-resnet20"), epochs=_DGC_EPOCHS, quick_epochs=0.02,
        make=dgc_trainings, value=accuracy_of, show=_show, verdict=dgc_verdict,
        picture=_picture, further=_bytes_of,
    ),
)  # fmt: skip
