"""The CIFAR-10 accuracies of Lian et al. 2018, AD-PSGD: four methods on 16 workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gossamer.config.cluster import load_cluster
from gossamer.quantities import counted
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.reproductions.pictures import ErrorCurve, error_curves
from gossamer.studies.reproductions.shapes import (
    Margin,
    Number,
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
    show_percent,
)
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained

_ALL_REDUCE, _D_PSGD, _EAMSGD, _AD_PSGD = "AllReduce", "D-PSGD", "EAMSGD", "AD-PSGD"
_PUBLISHED = {_ALL_REDUCE: 90.72, _D_PSGD: 90.81, _EAMSGD: 89.82, _AD_PSGD: 91.49}
_RESNET = "cifar10-resnet20"
_MEMORY = "quoted from memory of the paper"
_WORKERS = 16
_EPOCHS, _QUICK_EPOCHS = 160.0, 0.5
_DROPS, _WARMUP = (81.0, 122.0), 5.0
_MOMENTUM, _ALPHA = 0.9, 0.9
_METHODS = {
    _ALL_REDUCE: "all_reduce:overlap=false",
    _D_PSGD: "d_psgd:topology=ring,overlap=false",
    _EAMSGD: f"eamsgd:period=1,alpha={_ALPHA / _WORKERS:g},delta={_MOMENTUM:g}",
    _AD_PSGD: "ad_psgd:topology=bipartite_exponential",
}
# For this network, seeds of one method differ by about two tenths of a point.
_MARGIN = Margin(absolute=0.4)


@dataclass(frozen=True)
class CellRow:
    """What all cells of a row share."""

    name: str
    workers: int
    batch: int
    rate: float
    scale: float = 1.0
    """Linear scaling: the factor to which the rate rises over the warm-up."""

    def schedule(self, epochs: float) -> str:
        shrink = epochs / _EPOCHS
        drops = "/".join(f"{drop * shrink:.6g}" for drop in _DROPS)
        rises = f",warmup={_WARMUP * shrink:.6g},scale={self.scale:g}" if self.scale > 1.0 else ""
        return f"step:at={drops}{rises}"


_ROW = CellRow(f"{_WORKERS} workers", _WORKERS, 128, 0.1, scale=float(_WORKERS))
_ROWS = (
    _ROW,
    CellRow(f"{_WORKERS} workers, 32 images at 0.1", _WORKERS, 32, 0.1),
    CellRow("1 worker", 1, 128, 0.1),
)


def trainings(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """Make all cells; a quick look has those of linear scaling, with fewer evaluations."""
    return [
        CellTraining(
            row=row.name,
            column=column,
            method=_METHODS[column],
            cluster=load_cluster("ad-psgd-paper").changed(workers=row.workers),
            choices={
                "seed": seed,
                "epochs": epochs,
                "batch": row.batch,
                "learning_rate": row.rate,
                "optimiser": f"sgd:momentum={_MOMENTUM:g},weight_decay=1e-4",
                "schedule": row.schedule(epochs),
                # A quick look is for a CPU, on which evaluating takes long.
                "evaluations": 4 if quick else 40,
            },
            published=_PUBLISHED[column] if row is _ROW else None,
            evidence=_MEMORY if row is _ROW else "no figure at hand",
        )
        for row in (_ROWS[:1] if quick else _ROWS)
        for column in (_METHODS if row.workers > 1 else (_ALL_REDUCE,))
    ]


def without_figures(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """The same cells for a network of which we have no published accuracy at hand."""
    return [
        replace(one, published=None, evidence="no figure at hand")
        for one in trainings(seed, quick, epochs)
    ]


def verdict(cells: list[PublishedCell]) -> str:
    """Say whether the published order holds, and how large the largest deviation is."""
    ours = {cell.column: cell.ours for cell in cells if cell.row == _ROW.name}

    def score(column: str) -> Number:
        return accuracy(column, ours.get(column))

    def below(worse: str, better: str) -> str:
        parts = [less(_ROW.name, score(worse), score(better), _MARGIN)]
        return judged(f"{worse} below {better}", parts)

    lines = [
        *(below(other, _AD_PSGD) for other in (_ALL_REDUCE, _D_PSGD, _EAMSGD)),
        judged(
            f"{_D_PSGD} as good as {_ALL_REDUCE}",
            [alike(_ROW.name, score(_D_PSGD), score(_ALL_REDUCE), _MARGIN)],
        ),
        below(_EAMSGD, _ALL_REDUCE),
    ]
    lines += largest_deviation(cells)
    lines.append(
        f"of linear scaling; accuracies within {_MARGIN.absolute:g} points count as equal; "
        f"published figures: {_MEMORY}"
    )
    return "\n".join(lines)


def _picture(path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]) -> None:
    done = [one for one in work if one.label in trained]
    panels: dict[str, dict[str, ErrorCurve]] = {}
    for one in done:
        published = None if one.published is None else 100.0 - one.published
        curve = ErrorCurve(*trained[one.label].points(), published)
        panels.setdefault(one.row, {})[one.column] = curve
    epochs = max(one.choices["epochs"] for one in done)
    words = Caption(
        "CIFAR-10 with 16 workers",
        f"error on the test set over {counted(epochs, 'epoch')} (log scale), the first seed",
        f"triangles at the right: published, after about {_EPOCHS:g} epochs",
    )
    error_curves(path, panels, words)


def _table(name: str, task: str, network: str) -> PublishedTable:
    return PublishedTable(
        name=name,
        title=f"Accuracy in % on CIFAR-10, {network}, 16 workers",
        source="Lian, Zhang, Zhang & Liu 2018, Asynchronous Decentralized Parallel SGD",
        unit="%",
        settings=(
            f"As in the paper: {_WORKERS} workers, batch 128 a worker, rate divided by 10 after "
            f"epochs {_DROPS[0]:g} and {_DROPS[1]:g} of {_EPOCHS:g} (both shrink with --epochs), "
            f"momentum {_MOMENTUM:g}, weight decay 1e-4, EAMSGD with period 1. The rate of 0.1 is "
            f"scaled with the workers: it rises to {0.1 * _WORKERS:g} over {_WARMUP:g} epochs "
            "(shrunk, too). Beside that: 32 images a worker at 0.1, and one worker with 128 at "
            "0.1, neither scaled. Our choices where the paper is silent: crop and flip as "
            "augmentation; an epoch counts the samples of all workers together; momentum stays "
            "with its worker; D-PSGD on a ring with weights 1/3; AD-PSGD on a bipartite "
            "exponential graph with one exchange a step; EAMSGD with elasticity 0.9/16 and its own "
            "momentum of 0.9; all-reduce and D-PSGD in their serial form on the cluster "
            "ad-psgd-paper, that of the tables of seconds; the accuracy is that of the mean of the "
            "workers, or of EAMSGD's centre, after the last epoch, with the workers' BatchNorm "
            "statistics averaged; mean of three seeds with 95 % intervals."
        ),
        cells=len(trainings(0, False, _EPOCHS)),
        trainings=Trainings(
            problem=Problem(task),
            epochs=_EPOCHS,
            quick_epochs=_QUICK_EPOCHS,
            make=trainings if task == _RESNET else without_figures,
            value=accuracy_of,
            show=show_percent,
            verdict=verdict,
            picture=_picture,
            seeds=3,
        ),
    )


TABLE = _table("ad-psgd-cifar10", _RESNET, "ResNet-20")
VGG = _table("ad-psgd-cifar10-vgg", "cifar10-vgg", "VGG-16")
