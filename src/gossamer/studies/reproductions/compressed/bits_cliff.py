"""The cliff at two bits: displacements of an outer loop in fewer bits, with feedback and without.

Two papers say it and neither compares: without feedback two bits lose much (Decoupled DiLoCo), with
feedback nothing (SparseLoCo). Here both are one table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from gossamer.config.cluster import Cluster, Compute
from gossamer.quantities import counted
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.reproductions.pictures import bars
from gossamer.studies.reproductions.table import PublishedCell, PublishedTable, Trainings
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained

_PERIOD, _WORKERS, _BATCH, _RATE, _SEEDS = 10, 4, 8, 5e-3, 2
_EPOCHS, _QUICK_EPOCHS = 0.5, 0.02
_TASK = "shakespeare-gpt:layers=1,width=32,context=32"
_LOOP = f"diloco:period={_PERIOD}"
_WHOLE = "32 bits"
METHODS = {
    _WHOLE: _LOOP,
    "16 bits": f"{_LOOP}+bf16",
    "8 bits": f"{_LOOP}+int8",
    "4 bits": f"{_LOOP}+int4",
    "2 bits": f"{_LOOP}+int2:feedback=false",
    "2 bits, feedback": f"{_LOOP}+int2",
    "2 bits, whole numbers": f"{_LOOP}+int2:block=128,feedback=false",
    "2 bits, whole numbers, feedback": f"{_LOOP}+int2:block=128",
    "1 bit": f"{_LOOP}+sign:feedback=false",
    "1 bit, feedback": f"{_LOOP}+sign",
    "2 bits of 1 in 64, feedback": f"sparse_loco:period={_PERIOD}",
}
PUBLISHED = {
    "16 bits": 0.09, "4 bits": 0.09, "2 bits": 32.0, "2 bits, whole numbers": 32.0, "1 bit": 83.0,
}  # fmt: skip
"""By how many per cent the loss grows without feedback, in Decoupled DiLoCo."""
_READ = "the increase is quoted in notes on Decoupled DiLoCo (2604.21428); its loss is not"
_SMALL, _LARGE = 1.0, 5.0
"""In per cent: what counts as no loss, and what as a cliff."""


def trainings(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    """Every row with every seed; a quick look has one seed."""
    cluster = Cluster(
        name="equal", workers=_WORKERS, compute=Compute(seconds=0.05, jitter=0.1)
    )  # fmt: skip
    return [
        CellTraining(
            row=row, column=f"seed {one}", method=method, cluster=cluster,
            choices={
                "seed": one, "epochs": epochs, "batch": _BATCH, "learning_rate": _RATE,
                "optimiser": "adamw", "schedule": "cosine", "evaluations": 2 if quick else 5,
            },
            evidence=_READ,
        )
        for one in range(seed, seed + (1 if quick else _SEEDS))
        for row, method in METHODS.items()
    ]  # fmt: skip


def loss_of(summary: Mapping[str, Any]) -> float:
    """The loss of the output model; NaN where it diverged."""
    return math.nan if summary["loss"] is None else float(summary["loss"])


def increases(cells: Sequence[PublishedCell]) -> dict[str, float]:
    """By how many per cent the loss of each row is above that of 32 bits, over the same seeds."""
    by_row: dict[str, dict[str, float]] = {}
    for cell in cells:
        by_row.setdefault(cell.row, {})[cell.column] = cell.ours
    whole = by_row.get(_WHOLE, {})
    found: dict[str, float] = {}
    for row, losses in by_row.items():
        common = [column for column in losses if column in whole]
        if common and row != _WHOLE:
            found[row] = 100 * mean(losses[column] / whole[column] - 1 for column in common)
    return found


def verdict(cells: list[PublishedCell]) -> str:
    """The published statements, one by one, and the increases that they rest on."""
    found = increases(cells)
    lines = [
        f"{row}: {value:+.2f} % above {_WHOLE}"
        + (f", published {PUBLISHED[row]:+g} %" if row in PUBLISHED else "")
        for row, value in found.items()
    ]

    def judge(statement: str, rows: Sequence[str], holds: bool) -> None:
        known = all(row in found for row in rows)
        said = ("agrees" if holds else "does not agree") if known else "cannot say"
        lines.append(f"{statement}: {said}")

    many = ("16 bits", "8 bits", "4 bits")
    judge(
        f"down to four bits nothing is lost (at most {_SMALL:g} %)", many,
        all(found.get(row, math.inf) <= _SMALL for row in many),
    )  # fmt: skip
    few = ("2 bits", "2 bits, whole numbers", "1 bit")
    judge(
        f"two bits and one without feedback are a cliff (at least {_LARGE:g} %)", few,
        all(not found.get(row, 0.0) < _LARGE for row in few),
    )  # fmt: skip
    judge(
        f"with feedback two bits lose nothing (at most {_SMALL:g} %)",
        ("2 bits, feedback", "2 bits, whole numbers, feedback"),
        found.get("2 bits, feedback", math.inf) <= _SMALL
        and found.get("2 bits, whole numbers, feedback", math.inf) <= _SMALL,
    )  # fmt: skip
    judge(
        "feedback helps", (*few, *(f"{row}, feedback" for row in few)),
        all(not found.get(row, 0.0) <= found.get(f"{row}, feedback", math.inf) for row in few),
    )  # fmt: skip
    return "\n".join(lines)


def _show(cell: PublishedCell) -> str:
    return "diverged" if math.isnan(cell.ours) else f"{cell.ours:.4f}"


def _picture(path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]) -> None:
    cells = [
        PublishedCell(one.row, one.column, None, loss_of(trained[one.label].summary))
        for one in work
        if one.label in trained
    ]
    epochs = work[0].choices["epochs"]
    words = Caption(
        "Displacements in fewer bits",
        f"increase of the loss over {_WHOLE} a number; diloco, {_WORKERS} workers, every "
        f"{_PERIOD} steps, {counted(epochs, 'epoch')} of Shakespeare",
        "triangles: published increases of Decoupled DiLoCo, without feedback, a far larger model",
    )
    bars(path, increases(cells), PUBLISHED, words, unit=" %")


TABLE = PublishedTable(
    name="bits-cliff",
    title="Displacements in fewer bits: loss of a character transformer",
    source="Douillard et al. 2026, Decoupled DiLoCo; Sarfi et al. 2025, SparseLoCo",
    unit="",
    settings=(
        f"{_WORKERS} workers, {_LOOP}, batch {_BATCH}, AdamW at {_RATE:g} with a cosine; the task "
        f"{_TASK} (17,000 parameters, for two cores), {counted(_EPOCHS, 'epoch')}, {_SEEDS} seeds. "
        "Our choices: whole numbers of 4 bits in blocks of 128; 2 bits are four bins of 1.5 "
        "standard deviations whose means travel along, or -1, 0 and 1 times the largest of 128; "
        "1 bit is the sign with one mean magnitude a "
        "tensor. Of Decoupled DiLoCo the increases were read in notes, not in the paper, and for "
        "models of billions of parameters; SparseLoCo gives no figure that could be compared."
    ),
    cells=len(METHODS) * _SEEDS,
    trainings=Trainings(
        problem=Problem(_TASK),
        epochs=_EPOCHS,
        quick_epochs=_QUICK_EPOCHS,
        make=trainings,
        value=loss_of,
        show=_show,
        verdict=verdict,
        picture=_picture,
    ),
)
