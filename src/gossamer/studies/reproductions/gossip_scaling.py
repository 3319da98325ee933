"""The curves of Jin et al. 2016: gossip leads early and with few workers, all-reduce at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.config.cluster import Cluster, Compute, Wires, load_cluster
from gossamer.quantities import counted
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.reproductions.pictures import ScalingCurve, scaling_picture
from gossamer.studies.reproductions.shapes import (
    AGREES,
    OPEN,
    Margin,
    Number,
    PartOfRun,
    accuracy,
    accuracy_of,
    alike,
    judged,
    less,
    moment,
)
from gossamer.studies.reproductions.table import PublishedCell, PublishedTable, Trainings
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained

_SYNC, _ELASTIC, _PULL, _PUSH = "all_reduce", "easgd", "pull_gossip", "push_gossip"
_OFTEN = "easgd, tau 1"
_FEW, _MANY = (8, 16), (32, 64, 128)
# Images per worker and step, as published. Beyond 16 workers the paper shows only two methods.
_PUBLISHED_BATCH = {8: 32, 16: 16, 32: 16, 64: 16, 128: 16}
_EVIDENCE = "the paper shows curves; its words are what is compared"
_OPTIMISER = "sgd:momentum=0.9,nesterov=true,weight_decay=1e-4"
_RATE = 0.1
# One GPU of a K80 with cuDNN 4 takes about 8 ms for an image of 224 x 224 in ResNet-18, forward
# and backward; FDR InfiniBand is 56 Gbit/s; the network carries ResNet-18's 11.69 million floats.
_SECONDS_PER_IMAGE, _JITTER = 0.008, 0.05
_WIRES = Wires(bandwidth=7e9, latency=5e-6)
_MODEL_BYTES = 46_760_000
_TIME_MARGIN = Margin(relative=0.1)


def _columns(workers: int) -> tuple[str, ...]:
    return (_SYNC, _ELASTIC, _OFTEN, _PULL, _PUSH) if workers in _FEW else (_SYNC, _PULL)


def _method(column: str, workers: int) -> str:
    return {
        _SYNC: "all_reduce:overlap=false",
        _ELASTIC: f"easgd:alpha={0.8 / workers:g},period=10",
        _OFTEN: f"easgd:alpha={0.8 / workers:g},period=1",
        _PULL: "pull_gossip:beta=0.5,period=1",
        _PUSH: "push_gossip:period=1",
    }[column]


def _cluster(workers: int) -> Cluster:
    seconds = _SECONDS_PER_IMAGE * _PUBLISHED_BATCH[workers]
    if workers in _MANY:  # the paper's second machine
        return load_cluster("torus-128").changed(workers=workers)
    compute = Compute(seconds=seconds, jitter=_JITTER)
    return Cluster(name="fdr-infiniband", workers=workers, compute=compute, network=_WIRES)


@dataclass(frozen=True)
class Scaling:
    """One problem on which the statements of the paper are tested."""

    name: str
    problem: Problem
    what: str
    batches: Mapping[int, int]
    """Images per worker and step, by number of workers."""
    epochs: float
    quick_epochs: float
    share: float
    """The share of the plateau of all-reduce, its accuracy just before the first drop of the rate,
    by reaching which the speed before that drop is measured."""
    points: float
    """Final accuracies of one seed that are no further apart count as equal."""
    reasons: str
    evaluations: int

    def row(self, workers: int) -> str:
        return f"{workers} workers"

    def time_row(self, workers: int) -> str:
        return f"{workers} workers, s to the plateau"

    def epochs_row(self, workers: int) -> str:
        return f"{workers} workers, epochs to the plateau"

    def plateau(
        self, workers: int, epochs: float, seed: object, trained: Mapping[str, Trained]
    ) -> float | None:
        """The accuracy that measures early speed, between 0 and 1: a share of the mean of
        all-reduce's last evaluations before the first drop, of the same seed; NaN where that
        diverged, and None before it is trained."""
        label = f"{self.row(workers)}, {_SYNC}"
        own = trained.get(f"{label}, seed {seed}") or trained.get(label)
        if own is None:
            return None
        scores = [
            row["accuracy"]
            for row in own.history
            if epochs / 4 < row["epochs"] <= epochs / 3 and row["accuracy"] is not None
        ]
        return self.share * sum(scores) / len(scores) if scores else math.nan

    def trainings(self, seed: int, quick: bool, epochs: float) -> list[CellTraining]:
        """Make all cells, or for a quick look those of 8 and 32 workers."""
        return [
            CellTraining(
                row=self.row(workers),
                column=column,
                method=_method(column, workers),
                cluster=_cluster(workers),
                choices={
                    "seed": seed,
                    "epochs": epochs,
                    "batch": batch,
                    "learning_rate": _RATE,
                    "optimiser": _OPTIMISER,
                    "schedule": f"step:at={epochs / 3:.6g}/{2 * epochs / 3:.6g}",
                    "model_bytes": _MODEL_BYTES,
                    # A quick look is for a CPU, on which evaluating takes long.
                    "evaluations": self.evaluations // 10 if quick else self.evaluations,
                },
                evidence=_EVIDENCE,
            )
            for workers, batch in self.batches.items()
            if workers in (8, 32) or not quick
            for column in _columns(workers)
        ]

    def further(
        self, training: CellTraining, trained: Mapping[str, Trained]
    ) -> list[PublishedCell]:
        """When a training reached the plateau before the first drop (NaN where it did not), what a
        worker's own model scores, and the loss on the test set."""
        workers, own = training.cluster.workers, trained[training.label]
        epochs = training.choices["epochs"]
        target = self.plateau(workers, epochs, training.choices["seed"], trained)
        before = [row for row in own.history if row["epochs"] <= epochs / 3]
        found: dict[str, float] = {}
        if target is not None:
            for row, along in ((self.time_row, "virtual_seconds"), (self.epochs_row, "epochs")):
                points = [(one[along], one["accuracy"]) for one in before]
                found[row(workers)] = _first_touch(points, target)
        for name, key, scale in (("a worker's own", "worker_accuracy", 100), ("loss", "loss", 1)):
            value = own.summary.get(key)
            found[f"{self.row(workers)}, {name}"] = math.nan if value is None else scale * value
        return [
            PublishedCell(row, training.column, None, ours, _EVIDENCE)
            for row, ours in found.items()
        ]

    def show(self, cell: PublishedCell) -> str:
        within = "" if cell.half_width is None else f" ± {cell.half_width:.2g}"
        if " to " in cell.row:
            return "not reached" if math.isnan(cell.ours) else f"{cell.ours:.4g}{within}"
        unit = "" if cell.row.endswith("loss") else " %"
        return "diverged" if math.isnan(cell.ours) else f"{cell.ours:.2f}{within}{unit}"

    # ------------------------------------------------------------------ the verdict

    def verdict(self, cells: list[PublishedCell]) -> str:
        """Say whether the statements of the paper about its curves hold for ours."""
        found = {(cell.row, cell.column): cell.ours for cell in cells}

        def seconds(workers: int, column: str) -> Number:
            return moment(column, found.get((self.time_row(workers), column)), "s")

        def epochs(workers: int, column: str) -> Number:
            return moment(column, found.get((self.epochs_row(workers), column)), "epochs")

        def score(workers: int, column: str) -> Number:
            return accuracy(column, found.get((self.row(workers), column)))

        def faster(workers: int, first: str, second: str) -> PartOfRun:
            pair = seconds(workers, first), seconds(workers, second)
            return less(self.row(workers), *pair, _TIME_MARGIN)

        def asynchronous_first(workers: int) -> PartOfRun:
            """One asynchronous method is enough: only with all trained can the claim differ."""
            others = [seconds(workers, column) for column in (_ELASTIC, _PULL, _PUSH)]
            known = [one for one in others if one.value is not None]
            first = min(known, key=lambda one: one.value or 0.0, default=others[0])
            part = less(self.row(workers), first, seconds(workers, _SYNC), _TIME_MARGIN)
            if part.finding != AGREES and len(known) < len(others):
                return PartOfRun(OPEN, f"{self.row(workers)}: not trained")
            return part

        even = alike("8 workers", seconds(8, _SYNC), seconds(8, _PULL), _TIME_MARGIN)
        j4 = [faster(8, _ELASTIC, _PULL), faster(8, _ELASTIC, _SYNC), even]
        j5 = [faster(16, _PULL, _ELASTIC), faster(16, _PULL, _SYNC), faster(16, _ELASTIC, _SYNC)]
        j6 = [faster(workers, _PULL, _SYNC) for workers in _MANY]
        j6 += [less(self.row(p), epochs(p, _PULL), epochs(p, _SYNC), _TIME_MARGIN) for p in _MANY]
        apart = Margin(absolute=self.points)
        ends = [less(self.row(p), score(p, _PULL), score(p, _SYNC), apart) for p in _MANY]
        j7 = [asynchronous_first(workers) for workers in _FEW]
        return "\n".join(
            (
                "early: the way to the accuracy in the table, before the first drop of the rate",
                judged("J4, 8 workers: EASGD fastest, all-reduce as fast as pull-gossip", j4),
                judged("J5, 16 workers: pull-gossip before EASGD before all-reduce", j5),
                judged("J6, 32 to 128 workers: pull-gossip ahead early", j6),
                judged("J6, 32 to 128 workers: pull-gossip behind after the drops", ends),
                judged("J7: up to 16 workers an asynchronous method is first early", j7),
                judged("J7: from 32 workers on all-reduce is best in the end", ends),
                f"times within {100 * _TIME_MARGIN.relative:g} % and final accuracies "
                f"within {self.points:g} points count as equal; gossip is judged by its pull form",
            )
        )

    # ------------------------------------------------------------------ the picture

    def picture(
        self, path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]
    ) -> None:
        panels: dict[str, dict[str, ScalingCurve]] = {}
        done = [one for one in work if one.label in trained]
        for one in done:
            history = trained[one.label].history
            panels.setdefault(one.row, {})[one.column] = ScalingCurve(
                [row["epochs"] for row in history],
                [row["virtual_seconds"] for row in history],
                [accuracy_of(row) for row in history],
                self._dotted(one, trained),
            )
        epochs = max(one.choices["epochs"] for one in done)
        words = Caption(
            f"{self.what[0].upper()}{self.what[1:]}: who is ahead, by workers",
            f"accuracy on the test set, {counted(epochs, 'epoch')} of all workers together, "
            "the first seed",
            "dotted across: the accuracy by which early speed is measured; dotted down: the rate "
            "is divided by 10",
        )
        scaling_picture(path, panels, (epochs / 3, 2 * epochs / 3), words)

    def _dotted(self, one: CellTraining, trained: Mapping[str, Trained]) -> float | None:
        """The accuracy in % that measures early speed, as the picture draws it."""
        choices = one.choices
        share = self.plateau(one.cluster.workers, choices["epochs"], choices["seed"], trained)
        return None if share is None or math.isnan(share) else 100 * share

    # ------------------------------------------------------------------ the table

    def table(self) -> PublishedTable:
        trainings = self.trainings(0, False, self.epochs)
        return PublishedTable(
            name=self.name,
            title=f"Gossip against all-reduce over workers: final accuracy and early speed, "
            f"{self.what}",
            source="Jin, Yuan, Iandola & Keutzer 2016, How to scale distributed deep learning?",
            unit="%",
            settings=self._settings(),
            cells=5 * len(trainings),
            trainings=Trainings(
                problem=self.problem,
                epochs=self.epochs,
                quick_epochs=self.quick_epochs,
                make=self.trainings,
                value=accuracy_of,
                show=self.show,
                verdict=self.verdict,
                picture=self.picture,
                further=self.further,
                seeds=3,
            ),
        )

    def _settings(self) -> str:
        sizes = ", ".join(f"{batch} at {workers}" for workers, batch in self.batches.items())
        return (
            f"As in the paper: rate {_RATE}, divided by 10 twice, Nesterov momentum 0.9, weight "
            "decay 1e-4; EASGD with tau 10 and with tau 1, beta 0.8/p; gossip at every step, with "
            "a peer drawn among all; all-reduce after the whole gradient; momentum is never mixed. "
            "Our "
            f"choices: {self.what} instead of ResNet-18 on ImageNet; batch a worker {sizes} "
            "workers; the rate drops after one and two thirds of the epochs, which are those of "
            "all workers together (the paper: after about 30 and 60 epochs of ImageNet, then on "
            "to more than 200); EASGD takes its gradient before the elastic pull (the paper: "
            "after it); the model that is evaluated is the mean of the workers, or EASGD's "
            "centre, with the workers' BatchNorm statistics averaged; early speed is measured by "
            f"reaching {100 * self.share:g} % of all-reduce's plateau before the first drop. "
            "Beyond 16 workers the cluster is torus-128, a Cray XK7; up to 16 it is FDR "
            "InfiniBand, 56 Gbit/s and 5 us; every exchange is charged as ResNet-18's 46.8 MB; a "
            f"step computes 8 ms an image of the paper's batch, about what one GPU of a K80 takes, "
            f"{1000 * _SECONDS_PER_IMAGE * 32:g} ms with 8 workers and "
            f"{1000 * _SECONDS_PER_IMAGE * 16:g} ms with more, with a standard deviation of "
            f"{100 * _JITTER:g} %; all workers are equal. None of this was fitted to the paper's "
            f"curves. {self.reasons}"
        )


TABLE = Scaling(
    name="gossip-scaling",
    problem=Problem("cifar10-resnet20"),
    what="ResNet-20 on CIFAR-10",
    batches=_PUBLISHED_BATCH,
    epochs=90.0,
    quick_epochs=0.5,
    share=0.97,
    points=0.5,
    evaluations=60,
    reasons=(
        "CIFAR-10 has a twenty-fifth of ImageNet's images: with 128 workers an epoch is 24 steps, "
        "there 625."
    ),
).table()

DIGITS = Scaling(
    name="gossip-scaling-digits",
    problem=Problem("digits-mlp"),
    what="a perceptron on 8x8 digits",
    # With half of these, the workers of EASGD, who meet in every tenth step, do not learn.
    batches={8: 8, 16: 4, 32: 4, 64: 4, 128: 4},
    epochs=60.0,
    quick_epochs=6.0,
    share=0.97,
    points=1.0,
    evaluations=240,
    reasons=(
        "The same table for a CPU, to look at the shape only: batches are a quarter of the "
        "paper's, because there are 1437 images; the test set has 360."
    ),
).table()


def _first_touch(points: Sequence[tuple[float, float | None]], target: float) -> float:
    """Where a curve first meets the target, as one reads a printed curve; NaN where it does not."""
    before: tuple[float, float] | None = None
    for at, score in points:
        if score is None or not math.isfinite(score):
            continue
        # Scores are 32-bit numbers, which may be rounded down.
        if score >= target - 1e-6:
            if before is None or score <= target:
                return at
            return before[0] + (at - before[0]) * (target - before[1]) / (score - before[1])
        before = at, score
    return math.nan
