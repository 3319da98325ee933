"""Pictures of trainings: the error over epochs, or the accuracy over time and over epochs.

Both have one panel or one column a heading, and lines of one name look the same in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.report.pictures import figure as figures
from gossamer.studies.lab.pictures import Caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, each with its own line style.
_ERROR_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#666666", "linestyle": (0, (2, 1.5))},
    {"color": "#D55E00", "linestyle": "-"},
    {"color": "#0072B2", "linestyle": (0, (6, 1.5))},
    {"color": "#009E73", "linestyle": (0, (7, 1.5, 1.5, 1.5))},
    {"color": "#CC79A7", "linestyle": (0, (3, 1.2))},
    {"color": "#E69F00", "linestyle": (0, (1.2, 1.2))},
)
_SCALING_LOOKS = (
    {"color": "#0072B2", "linestyle": "-"}, _ERROR_LOOKS[3],
    {"color": "#D55E00", "linestyle": (0, (6, 1.5))}, _ERROR_LOOKS[4],
)  # fmt: skip
_DOTTED = {"color": "#8c8c8c", "linestyle": (0, (1, 2)), "linewidth": 1.0}
_LABELS_WIDE = 0.62
"""The width of "17.5 %" in inches."""


@dataclass(frozen=True)
class ErrorCurve:
    """The error of one training over epochs."""

    epochs: Sequence[float]
    errors: Sequence[float]
    """In %."""
    published: float | None = None


@dataclass(frozen=True)
class ScalingCurve:
    """The accuracy of one training over time and over epochs."""

    epochs: Sequence[float]
    seconds: Sequence[float]
    """Virtual seconds."""
    accuracies: Sequence[float]
    """In %."""
    target: float | None = None
    """The accuracy that measures early speed; None where nobody knows it yet."""


def error_curves(
    path: Path, panels: Mapping[str, Mapping[str, ErrorCurve]], words: Caption
) -> None:
    """Draw a panel for each heading, side by side; triangles mark published errors."""
    width = 5.2 * len(panels) + 0.6
    figure = figures.new_figure(width, 5.0)
    looks, rows = _named(figure, panels, _ERROR_LOOKS)
    across = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (heading, lines) in zip(across.flat, panels.items(), strict=True):
        figures.style(axes, "bottom", heading, grid="y")
        figures.name_axis(axes.xaxis, "epochs, of all workers together")
        for name, line in lines.items():
            axes.plot(line.epochs, line.errors, linewidth=1.7, **looks[name])
            if line.published is not None:
                axes.plot(
                    [1.02], [line.published], marker="<", color=looks[name]["color"], markersize=7,
                    markeredgecolor="white", transform=axes.get_yaxis_transform(), clip_on=False,
                )  # fmt: skip
    first: Axes = across[0, 0]
    first.set_yscale("log")
    first.set_ylim(*_error_range(panels))
    figures.plain_log_ticks(first.yaxis, " %")
    figures.write_titles(figure, words.title, words.subtitle)
    figure.text(0.015, 0.02, words.caption, fontsize=8, color=figures.FAINT)
    above = 1.02 + 0.27 * rows
    figure.subplots_adjust(
        left=_LABELS_WIDE / width, right=0.965, top=1 - above / 5.0, bottom=0.16, wspace=0.1
    )
    figures.save(figure, path)


def bars(
    path: Path, ours: Mapping[str, float], published: Mapping[str, float], words: Caption, *,
    unit: str,
) -> None:  # fmt: skip
    """Draw a bar for each name, from below upwards, and a triangle where a paper has a figure."""
    height = 1.9 + 0.34 * len(ours)
    figure = figures.new_figure(8.0, height)
    axes = figure.add_axes((0.3, 0.85 / height, 0.66, 1 - 1.75 / height))
    figures.style(axes, "bottom", grid="x")
    names = list(ours)
    axes.barh(names, [ours[name] for name in names], color="#0072B2", height=0.6)
    known = [name for name in names if name in published]
    axes.plot(
        [published[name] for name in known], known, "<", color="#D55E00", markeredgecolor="white"
    )
    axes.set_xscale("symlog", linthresh=1.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
    axes.invert_yaxis()
    figures.write_titles(figure, words.title, words.subtitle)
    figure.text(0.015, 0.02, words.caption, fontsize=8, color=figures.FAINT)
    figures.save(figure, path)


def scaling_picture(
    path: Path,
    panels: Mapping[str, Mapping[str, ScalingCurve]],
    drops: Sequence[float],
    words: Caption,
) -> None:
    """Draw a column for each heading: accuracy over time above, over epochs below."""
    width = max(6.4, 2.9 * len(panels) + 0.8)
    figure = figures.new_figure(width, 6.6)
    looks, _ = _named(figure, panels, _SCALING_LOOKS)
    grid = figure.subplots(2, len(panels), sharey=True, squeeze=False)
    for column, (heading, curves) in enumerate(panels.items()):
        above, below = grid[0, column], grid[1, column]
        figures.style(above, "bottom", heading, grid="y")
        figures.name_axis(above.xaxis, "virtual seconds")
        figures.style(below, "bottom", grid="y")
        figures.name_axis(below.xaxis, "epochs, of all workers together")
        for axes in (above, below):
            for target in {curve.target for curve in curves.values()} - {None}:
                axes.axhline(target or 0.0, **_DOTTED)
        for name, curve in curves.items():
            above.plot(curve.seconds, curve.accuracies, linewidth=1.5, **looks[name])
            below.plot(curve.epochs, curve.accuracies, linewidth=1.5, **looks[name])
        for drop in drops:
            below.axvline(drop, **_DOTTED)
    first: Axes = grid[0, 0]
    first.set_ylim(*_accuracy_range(panels))
    first.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    figures.write_titles(figure, words.title, words.subtitle)
    caption = min(8.0, 130.0 * width / max(1, len(words.caption)))
    figure.text(0.15 / width, 0.018, words.caption, fontsize=caption, color=figures.FAINT)
    figure.subplots_adjust(
        left=0.65 / width, right=1 - 0.2 / width, top=0.82, bottom=0.125, wspace=0.1, hspace=0.34
    )
    figures.save(figure, path)


def _named(
    figure: Figure, panels: Mapping[str, Mapping[str, object]], looks: Sequence[dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write the legend; return the look of each name, and the number of rows of the legend."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    found = {name: looks[at % len(looks)] for at, name in enumerate(names)}
    handles = [Line2D([], [], label=name, **found[name]) for name in names]
    return found, figures.write_legend(figure, handles)


def _error_range(panels: Mapping[str, Mapping[str, ErrorCurve]]) -> tuple[float, float]:
    """A range that holds the published errors and the later part of every training."""
    lines = [line for lines in panels.values() for line in lines.values()]
    late = [error for line in lines for error in line.errors[len(line.errors) // 5 :]]
    published = [line.published for line in lines if line.published is not None]
    shown = [value for value in (*late, *published) if math.isfinite(value) and value > 0]
    return (0.9 * min(shown), 1.1 * max(shown)) if shown else (1.0, 100.0)


def _accuracy_range(panels: Mapping[str, Mapping[str, ScalingCurve]]) -> tuple[float, float]:
    """The range from a little below the lowest target to the best accuracy."""
    curves = [curve for curves in panels.values() for curve in curves.values()]
    shown = [value for curve in curves for value in curve.accuracies if math.isfinite(value)]
    best = max(shown, default=100.0)
    target = min((one.target for one in curves if one.target is not None), default=best / 2)
    if best <= target:
        # No training reached the target, so the range shows the beginning.
        return 0.0, 1.05 * target
    low = target - 0.5 * (best - target)
    return max(0.0, low), best + 0.04 * (best - low)
