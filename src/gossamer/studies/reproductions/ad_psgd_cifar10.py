"""The CIFAR-10 accuracies of Lian et al. 2018, AD-PSGD: four methods on 16 workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_MEMORY = "quoted from memory of the paper"
_WORKERS, _BATCH, _RATE = 16, 128, 0.1
_ROW = f"{_WORKERS} workers"
_EPOCHS, _QUICK_EPOCHS = 160.0, 0.5
_DROPS = (81.0, 122.0)
_MOMENTUM, _ALPHA = 0.9, 0.9
_METHODS = {
    _ALL_REDUCE: "all_reduce:overlap=false",
    _D_PSGD: "d_psgd:topology=ring,overlap=false",
    _EAMSGD: f"eamsgd:period=1,alpha={_ALPHA / _WORKERS:g},delta={_MOMENTUM:g}",
    _AD_PSGD: "ad_psgd:topology=bipartite_exponential",
}
# For this network, seeds of one method differ by about two tenths of a point.
_MARGIN = Margin(absolute=0.4)


def trainings(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """Make all four cells; a quick look has fewer evaluations."""
    drops = "/".join(f"{drop * epochs / _EPOCHS:.6g}" for drop in _DROPS)
    return [
        CellTraining(
            row=_ROW,
            column=column,
            method=_METHODS[column],
            cluster=load_cluster("ad-psgd-paper").changed(workers=_WORKERS),
            choices={
                "seed": seed,
                "epochs": epochs,
                "batch": _BATCH,
                "learning_rate": _RATE,
                "optimiser": f"sgd:momentum={_MOMENTUM:g},weight_decay=1e-4",
                "schedule": f"step:at={drops}",
                # A quick look is for a CPU, on which evaluating takes long.
                "evaluations": 4 if quick else 40,
            },
            published=published,
            evidence=_MEMORY,
        )
        for column, published in _PUBLISHED.items()
    ]


def verdict(cells: list[PublishedCell]) -> str:
    """Say whether the published order holds, and how large the largest deviation is."""
    ours = {cell.column: cell.ours for cell in cells}

    def score(column: str) -> Number:
        return accuracy(column, ours.get(column))

    def below(worse: str, better: str) -> str:
        parts = [less(_ROW, score(worse), score(better), _MARGIN)]
        return judged(f"{worse} below {better}", parts)

    lines = [
        *(below(other, _AD_PSGD) for other in (_ALL_REDUCE, _D_PSGD, _EAMSGD)),
        judged(
            f"{_D_PSGD} as good as {_ALL_REDUCE}",
            [alike(_ROW, score(_D_PSGD), score(_ALL_REDUCE), _MARGIN)],
        ),
        below(_EAMSGD, _ALL_REDUCE),
    ]
    lines += largest_deviation(cells)
    lines.append(
        f"one seed; accuracies within {_MARGIN.absolute:g} points count as equal; published "
        f"figures: {_MEMORY}"
    )
    return "\n".join(lines)


def _picture(path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]) -> None:
    done = [one for one in work if one.label in trained]
    lines = {
        one.column: ErrorCurve(
            *trained[one.label].points(), None if one.published is None else 100.0 - one.published
        )
        for one in done
    }
    epochs = max(one.choices["epochs"] for one in done)
    words = Caption(
        "ResNet-20 on CIFAR-10 with 16 workers",
        f"error on the test set over {counted(epochs, 'epoch')} (log scale), one seed",
        f"triangles at the right: published, after about {_EPOCHS:g} epochs",
    )
    error_curves(path, {_ROW: lines}, words)


TABLE = PublishedTable(
    name="ad-psgd-cifar10",
    title="Accuracy in % on CIFAR-10, ResNet-20, 16 workers",
    source="Lian, Zhang, Zhang & Liu 2018, Asynchronous Decentralized Parallel SGD",
    unit="%",
    settings=(
        f"As in the paper: {_WORKERS} workers, batch {_BATCH} a worker, rate {_RATE} divided by "
        f"10 after epochs {_DROPS[0]:g} and {_DROPS[1]:g} of {_EPOCHS:g} (both shrink with "
        f"--epochs), momentum {_MOMENTUM:g}, weight decay 1e-4, EAMSGD with period 1. Our choices "
        "where it is silent: crop and flip as augmentation; no warm-up and no scaling of the rate; "
        "an epoch counts the samples of all workers together; momentum stays with its worker; "
        "D-PSGD on a ring with weights 1/3; AD-PSGD on a bipartite exponential graph with one "
        "exchange a step; EAMSGD with elasticity 0.9/16 and its own momentum of 0.9; all-reduce "
        "and D-PSGD in their serial form on the cluster ad-psgd-paper, that of the tables of "
        "seconds; the accuracy is that of the mean of the workers, or of EAMSGD's centre, after "
        "the last epoch, with the workers' BatchNorm statistics averaged."
    ),
    cells=len(_PUBLISHED),
    trainings=Trainings(
        problem=Problem("cifar10-resnet20"),
        epochs=_EPOCHS,
        quick_epochs=_QUICK_EPOCHS,
        make=trainings,
        value=accuracy_of,
        show=show_percent,
        verdict=verdict,
        picture=_picture,
    ),
)
