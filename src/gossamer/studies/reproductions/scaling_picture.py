"""A picture of trainings by number of workers: accuracy over time above, over epochs below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.studies.lab.pictures import FAINT, INK, Caption, new_figure, save, write_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, and a line style of its own for each.
_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-"},
    {"color": "#009E73", "linestyle": (0, (7, 1.5, 1.5, 1.5))},
    {"color": "#D55E00", "linestyle": (0, (6, 1.5))},
    {"color": "#CC79A7", "linestyle": (0, (3, 1.2))},
)
_DOTTED = {"color": "#8c8c8c", "linestyle": (0, (1, 2)), "linewidth": 1.0}


@dataclass(frozen=True)
class ScalingCurve:
    """One training."""

    epochs: Sequence[float]
    seconds: Sequence[float]
    """Virtual ones."""
    accuracies: Sequence[float]
    """In %."""
    target: float
    """The accuracy by which early speed is measured."""


def scaling_picture(
    path: Path,
    panels: Mapping[str, Mapping[str, ScalingCurve]],
    drops: Sequence[float],
    words: Caption,
) -> None:
    """One column a heading; lines of one name look the same in all of them."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    looks = {name: _LOOKS[at % len(_LOOKS)] for at, name in enumerate(names)}
    width = max(6.4, 2.9 * len(panels) + 0.8)
    figure = new_figure(width, 6.6)
    grid = figure.subplots(2, len(panels), sharey=True, squeeze=False)
    for column, (heading, curves) in enumerate(panels.items()):
        above, below = grid[0, column], grid[1, column]
        _style(above, "virtual seconds")
        above.set_title(heading, loc="left", fontsize=10.5, color=INK)
        _style(below, "epochs, of all workers together")
        for axes in (above, below):
            for target in {curve.target for curve in curves.values()}:
                axes.axhline(target, **_DOTTED)
        for name, curve in curves.items():
            above.plot(curve.seconds, curve.accuracies, linewidth=1.5, **looks[name])
            below.plot(curve.epochs, curve.accuracies, linewidth=1.5, **looks[name])
        for drop in drops:
            below.axvline(drop, **_DOTTED)
    first: Axes = grid[0, 0]
    first.set_ylim(*_range(panels))
    first.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    handles = [Line2D([], [], label=name, **looks[name]) for name in names]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.004, 1 - 0.62 / 6.6),
        ncols=len(names), frameon=False, fontsize=9, labelcolor=INK, handlelength=3.2,
    )  # fmt: skip
    write_titles(figure, words.title, words.subtitle)
    caption = min(8.0, 130.0 * width / max(1, len(words.caption)))
    figure.text(0.15 / width, 0.018, words.caption, fontsize=caption, color=FAINT)
    figure.subplots_adjust(
        left=0.65 / width, right=1 - 0.2 / width, top=0.82, bottom=0.125, wspace=0.1, hspace=0.34
    )
    save(figure, path)


def _style(axes: Axes, below: str) -> None:
    axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#b0b0b0")
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    axes.set_xlabel(below, color=FAINT, fontsize=8.5)


def _range(panels: Mapping[str, Mapping[str, ScalingCurve]]) -> tuple[float, float]:
    """From a little below the lowest target, above which the differences are, to the best."""
    curves = [curve for curves in panels.values() for curve in curves.values()]
    shown = [value for curve in curves for value in curve.accuracies if math.isfinite(value)]
    target = min(curve.target for curve in curves)
    best = max(shown, default=100.0)
    if best <= target:
        # Nobody got that far, so the beginning is all there is to see.
        return 0.0, 1.05 * target
    low = target - 0.5 * (best - target)
    return max(0.0, low), best + 0.04 * (best - low)
