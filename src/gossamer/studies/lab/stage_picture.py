"""The picture of stages that are late: losses over learning rates, and where they were predicted to
fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.report.pictures import figure as figures
from gossamer.studies.lab.stage_study import StageFindings, StageLine, StageRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAPTION = (
    "Lines: the loss at the end; thin lines: the highest on the way; both over those of the model "
    "with which all runs begin. Vertical lines: predicted",
    "edges, from the curvature there. Beyond its edge a run rises first; it may find a flatter "
    "place and end below all the same.",
)
_MOST = 30.0


def stage_edges_picture(path: Path, found: StageFindings) -> None:
    """Above all pipelines over the rate; below each stage alone, over the rate and its edge."""
    study = found.study
    figure = figures.new_figure(9.2, 7.6)
    above = figure.add_axes((0.075, 0.5, 0.9, 0.345))
    figures.style(above, "bottom", "All stages together", grid="y")
    for number, line in enumerate(found.whole):
        _draw(above, line, found.still, number)
        colour = str(figures.look(number)["color"])
        above.axvline(line.edge, color=colour, linewidth=1.3, linestyle=(0, (5, 2)))
    for line in found.single:
        # Where the stage alone would fail, as a mark at the upper edge.
        above.annotate(
            f"{line.stage}", (line.edge, 1.0), xycoords=("data", "axes fraction"), fontsize=8.5,
            ha="center", va="bottom", color=figures.INK, xytext=(0, 5),
            textcoords="offset points",
        )  # fmt: skip
        above.plot(
            [line.edge], [0.99], marker=7, markersize=6, color=figures.INK, clip_on=False,
            transform=above.get_xaxis_transform(),
        )  # fmt: skip
    figures.name_axis(above.xaxis, "learning rate; numbers above: the edge of each stage alone")
    above.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=figures.INK, ncols=2)
    _scale(above)
    width = 0.9 / len(found.single)
    for at, line in enumerate(found.single):
        axes = figure.add_axes((0.075 + at * width, 0.145, width - 0.022, 0.23))
        heading = f"stage {line.stage} alone, {line.delays[line.stage or 0]} late"
        figures.style(axes, "bottom", heading, grid="y")
        _draw(axes, line, found.still, 0, unit=line.edge)
        axes.axvline(1.0, color=figures.EDGE, linewidth=1.6)
        figures.name_axis(axes.xaxis, f"rate over its edge, {line.edge:.2g}")
        _scale(axes)
        axes.tick_params(labelleft=at == 0)
    for axes in (figure.axes[0], figure.axes[1]):
        figures.name_axis(axes.yaxis, "loss over that of the beginning")
    figures.write_titles(
        figure, "Where late stages fail: predicted and measured",
        f"{study.task.title}; {study.stages} stages, {study.optimiser}, batch {study.batch}, "
        f"{study.steps} steps after {study.warmup} without delay",
    )  # fmt: skip
    for row, text in enumerate(_CAPTION):
        figure.text(0.02, 0.045 - 0.025 * row, text, fontsize=8, color=figures.FAINT)
    figures.save(figure, path)


def _draw(axes: Axes, line: StageLine, still: StageRun, number: int, unit: float = 1.0) -> None:
    rates, runs = zip(*sorted(line.runs.items()), strict=True)
    places = [rate / unit for rate in rates]
    look = figures.look(number)
    axes.plot(places, [_shown(run.loss / still.loss) for run in runs], label=line.label, **look)
    thin: dict[str, Any] = {**look, "linewidth": 0.8, "marker": None}
    axes.plot(places, [_shown(run.highest / still.highest) for run in runs], **thin)


def _shown(ratio: float) -> float:
    return min(ratio, _MOST) if math.isfinite(ratio) else _MOST


def _scale(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=_MOST)
    figures.plain_log_ticks(axes.xaxis)
    figures.plain_log_ticks(axes.yaxis)
