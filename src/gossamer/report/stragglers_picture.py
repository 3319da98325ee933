"""The picture of staleness against waiting: for each kind of straggler one row of three panels.

It looks as the other pictures do: Okabe and Ito's colours, and a marker and a line style for each
method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import ConfigurationError
from gossamer.report.statistics import (
    History,
    Interval,
    Vector,
    is_lower_better,
    measure,
    seed_curves,
    show_number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLOURS = ("#000000", "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00")
_STYLES = ("-", (0, (6, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)), (0, (1.2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_INK, _FAINT, _GRID, _WAITING = "#222222", "#666666", "#e6e6e6", "#F0E442"
_DPI = 150
_BAR = 0.62


@dataclass(frozen=True)
class Runner:
    """One method in one row."""

    label: str
    throughput: Interval
    late_throughput: Interval
    """Over the second half of the run."""
    waiting: Interval
    rate: float
    histories: Sequence[History]
    """One a seed, at that learning rate."""


@dataclass(frozen=True)
class Stage:
    """One row of the picture."""

    title: str
    runners: Sequence[Runner]
    slowest_pace: float | None = None
    """Gradients per second if all were as slow as the slowest worker, where one always is."""


def stragglers_picture(path: Path, stages: Sequence[Stage], *, title: str, subtitle: str) -> None:
    """Throughput, waiting and score over epochs, one row for each kind of straggler."""
    if not stages or not all(
        one.histories and all(one.histories) for stage in stages for one in stage.runners
    ):
        raise ConfigurationError(
            "a picture of stragglers needs a trained run of each method in every row, got none; "
            "train with at least one learning rate and seed"
        )
    labels = list(dict.fromkeys(one.label for stage in stages for one in stage.runners))
    # The same method looks the same in every row; the row with most of them gives the order.
    longest = max(stages, key=lambda stage: len(stage.runners))
    order = [one.label for one in longest.runners]
    order += [label for label in labels if label not in order]
    looks = {label: _look(index) for index, label in enumerate(order)}
    figure = _figure(14.0, 0.7 + 4.3 * len(stages))
    rows = figure.subfigures(len(stages), 1, squeeze=False)
    for row, stage in zip(rows[:, 0], stages, strict=True):
        _draw_stage(row, stage, looks)
    _frame(figure, title, subtitle)
    _save(figure, path)


def _draw_stage(row: SubFigure, stage: Stage, looks: Mapping[str, Mapping[str, Any]]) -> None:
    row.suptitle(stage.title, x=0.008, ha="left", fontsize=12, fontweight="bold", color=_INK)
    speed, waiting, scores = row.subplots(1, 3, width_ratios=(1.15, 0.75, 1.35))
    _draw_speed(speed, stage, looks)
    _draw_waiting(waiting, stage)
    _draw_scores(scores, stage.runners, looks)


def _draw_speed(axes: Axes, stage: Stage, looks: Mapping[str, Mapping[str, Any]]) -> None:
    _style(axes, "left", "Gradients used per virtual second")
    right = 0.0
    for place, one in enumerate(stage.runners):
        span = one.throughput
        axes.barh(place, span.mean, _BAR, color=looks[one.label]["color"])
        _whisker(axes, span, place)
        reach = max(span.high, span.mean)
        if stage.slowest_pace is not None:
            reach = max(reach, one.late_throughput.mean)
            axes.plot(
                one.late_throughput.mean, place, marker="D", markersize=6, linestyle="none",
                color="white", markeredgecolor=_INK, zorder=5,
                label="second half of the run" if place == 0 else None,
            )  # fmt: skip
        axes.annotate(
            show_number(span.mean), (reach, place), xytext=(7, 0), textcoords="offset points",
            va="center", fontsize=9, color=_INK,
        )  # fmt: skip
        right = max(right, reach)
    axes.set_yticks(range(len(stage.runners)), [one.label for one in stage.runners], fontsize=9)
    axes.set_ylim(len(stage.runners) - 0.4, -0.6)
    axes.set_xlim(0, right * 1.2)
    axes.set_xlabel("dropped gradients do not count", color=_FAINT, fontsize=9)
    if stage.slowest_pace is not None:
        axes.axvline(
            stage.slowest_pace, color=_FAINT, linewidth=1.1, linestyle=(0, (2, 2)), zorder=4,
            label="everybody at the slow worker's pace",
        )  # fmt: skip
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 0.36), frameon=False, fontsize=8.5,
            labelcolor=_INK, handlelength=1.6,
        )  # fmt: skip


def _draw_waiting(axes: Axes, stage: Stage) -> None:
    _style(axes, "left", "Share of time spent waiting")
    for place, one in enumerate(stage.runners):
        axes.barh(place, one.waiting.mean, _BAR, color=_WAITING)
        _whisker(axes, one.waiting, place)
        axes.annotate(
            f"{100 * one.waiting.mean:.0f} %", (max(one.waiting.high, one.waiting.mean), place),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=_INK,
        )  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(len(stage.runners) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("mean over workers", color=_FAINT, fontsize=9)


def _draw_scores(
    axes: Axes, runners: Sequence[Runner], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    from matplotlib.ticker import MaxNLocator

    key = measure([history for one in runners for history in one.histories])
    lower = is_lower_better(key)
    heading = "Test loss (log scale)" if lower else "Test accuracy"
    _style(axes, "bottom", f"{heading} over epochs, at the best rate")
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    means: list[tuple[Vector, Vector]] = []
    for index, one in enumerate(runners):
        places, seeds = seed_curves(one.histories, key, "epochs")
        if not len(places):
            continue
        look, mean = looks[one.label], seeds.mean(0)
        # Markers of different methods start apart, so that equal curves stay tellable.
        stride = max(1, len(places) // 5)
        marked = [*range(index * stride // len(runners), len(places) - 1, stride), len(places) - 1]
        label = f"{one.label}, rate {one.rate:g}"
        axes.plot(places, mean, markevery=marked, zorder=3, label=label, **look)
        axes.fill_between(
            places, seeds.min(0), seeds.max(0), color=look["color"], alpha=0.1, linewidth=0
        )
        means.append((places, mean))
    if lower:
        axes.set_yscale("log")
    elif means:
        _limit_accuracy(axes, means)
    axes.set_xlim(0, max(float(places[-1]) for places, _ in means) * 1.02 if means else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("epochs (samples of all workers over data set size)", color=_FAINT, fontsize=9)
    axes.legend(
        loc="upper right" if lower else "lower right", fontsize=8.5, labelcolor=_INK,
        handlelength=3.2, framealpha=0.85, edgecolor="none",
    )  # fmt: skip


def _limit_accuracy(axes: Axes, means: Sequence[tuple[Vector, Vector]]) -> None:
    """Leave out the steep beginning, which is much the same for all of them."""
    early = [float(mean[len(mean) // 4]) for _, mean in means]
    ends = [float(mean[-1]) for _, mean in means]
    highest = max(float(mean.max()) for _, mean in means)
    lowest = min(*early, *ends, highest - 0.1)
    bottom = max(0.0, math.floor(20 * lowest) / 20)
    axes.set_ylim(bottom, min(1.005, highest + 0.06 * (highest - bottom)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")


def _whisker(axes: Axes, span: Interval, place: float) -> None:
    if span.high > span.low:
        ends = [[span.mean - max(0.0, span.low)], [span.high - span.mean]]
        axes.errorbar(span.mean, place, xerr=ends, color=_FAINT, capsize=3, linewidth=1.3, zorder=4)


def _look(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)], "linestyle": _STYLES[index % len(_STYLES)],
        "marker": _MARKERS[index % len(_MARKERS)], "linewidth": 1.7, "markersize": 6.0,
        "markeredgecolor": "white", "markeredgewidth": 0.6,
    }  # fmt: skip


def _style(axes: Axes, spine_kept: str, heading: str) -> None:
    axes.set_title(heading, loc="left", fontsize=10.5, color=_INK, pad=7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == spine_kept)
        spine.set_color("#b0b0b0")
    axes.tick_params(which="both", length=0, pad=5, labelsize=9, labelcolor=_INK)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed; run pip install 'gossamer[plot]'"
        ) from None
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def _frame(figure: Figure, title: str, subtitle: str) -> None:
    width, height = (float(inches) for inches in figure.get_size_inches())
    for drop, text, size, weight, colour in (
        (0.14, title, 15.0, "bold", _INK),
        (0.46, subtitle, 9.5, "normal", _FAINT),
    ):
        place = (0.15 / width, 1 - drop / height)
        figure.text(*place, text, va="top", fontsize=size, fontweight=weight, color=colour)
    area = (0.003, 0.006, 0.992, 1 - 0.75 / height)
    figure.set_layout_engine("constrained", rect=area, w_pad=0.1, h_pad=0.08, wspace=0.03)


def _save(figure: Figure, path: Path) -> None:
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(
            f"a picture cannot be written as {path.name!r}; end its name in .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")
