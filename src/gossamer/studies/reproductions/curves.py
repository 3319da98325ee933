"""A picture of trainings: the error over epochs, and beside its end what was published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.report.pictures.figure import (
    FAINT,
    name_axis,
    new_figure,
    plain_log_ticks,
    save,
    style,
    write_legend,
    write_titles,
)
from gossamer.studies.lab.pictures import Caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, and a line style of its own for each.
_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#666666", "linestyle": (0, (2, 1.5))},
    {"color": "#D55E00", "linestyle": "-"},
    {"color": "#0072B2", "linestyle": (0, (6, 1.5))},
    {"color": "#009E73", "linestyle": (0, (7, 1.5, 1.5, 1.5))},
    {"color": "#CC79A7", "linestyle": (0, (3, 1.2))},
    {"color": "#E69F00", "linestyle": (0, (1.2, 1.2))},
)
_LABELS_WIDE = 0.62
"""Inches that "17.5 %" takes."""


@dataclass(frozen=True)
class ErrorCurve:
    """One training."""

    epochs: Sequence[float]
    errors: Sequence[float]
    """In %."""
    published: float | None = None


def error_curves(
    path: Path, panels: Mapping[str, Mapping[str, ErrorCurve]], words: Caption
) -> None:
    """One panel a heading, side by side; lines of one name look the same in all of them."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    looks = {name: _LOOKS[at % len(_LOOKS)] for at, name in enumerate(names)}
    width = 5.2 * len(panels) + 0.6
    figure = new_figure(width, 5.0)
    across = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (heading, lines) in zip(across.flat, panels.items(), strict=True):
        style(axes, "bottom", heading, grid="y")
        name_axis(axes.xaxis, "epochs, of all workers together")
        for name, line in lines.items():
            axes.plot(line.epochs, line.errors, linewidth=1.7, **looks[name])
            if line.published is not None:
                axes.plot(
                    [1.02], [line.published], marker="<", color=looks[name]["color"], markersize=7,
                    markeredgecolor="white", transform=axes.get_yaxis_transform(), clip_on=False,
                )  # fmt: skip
    first: Axes = across[0, 0]
    first.set_yscale("log")
    first.set_ylim(*_range(panels))
    plain_log_ticks(first.yaxis, " %")
    handles = [Line2D([], [], label=name, **looks[name]) for name in names]
    above = 1.02 + 0.27 * write_legend(figure, handles)
    write_titles(figure, words.title, words.subtitle)
    figure.text(0.015, 0.02, words.caption, fontsize=8, color=FAINT)
    figure.subplots_adjust(
        left=_LABELS_WIDE / width, right=0.965, top=1 - above / 5.0, bottom=0.16, wspace=0.1
    )
    save(figure, path)


def _range(panels: Mapping[str, Mapping[str, ErrorCurve]]) -> tuple[float, float]:
    """What was published and how the trainings ended is inside; how they began need not be."""
    lines = [line for lines in panels.values() for line in lines.values()]
    late = [error for line in lines for error in line.errors[len(line.errors) // 5 :]]
    published = [line.published for line in lines if line.published is not None]
    shown = [value for value in (*late, *published) if math.isfinite(value) and value > 0]
    return (0.9 * min(shown), 1.1 * max(shown)) if shown else (1.0, 100.0)
