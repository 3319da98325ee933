"""The picture of staleness against waiting: a row of three panels for each kind of straggler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import ConfigurationError
from gossamer.report.pictures import figure as figures
from gossamer.report.pictures.panels import draw_curve
from gossamer.runs.arrival import History, Vector, is_lower_better
from gossamer.runs.statistics import Interval, measure, show_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Colours from cold to warm, as the methods go from waiting for all to waiting for none.
_COLOURS = ("#000000", "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00")
_BAR = 0.62


@dataclass(frozen=True)
class Runner:
    """One method in one row."""

    label: str
    throughput: Interval
    late_throughput: Interval
    """The throughput in the second half of the run."""
    waiting: Interval
    rate: float
    histories: Sequence[History]
    """One history for each seed, at that learning rate."""


@dataclass(frozen=True)
class Stage:
    """One row of the picture."""

    title: str
    runners: Sequence[Runner]
    slowest_pace: float | None = None
    """Gradients per second if all workers were as slow as the one that is always slow."""


def stragglers_picture(path: Path, stages: Sequence[Stage], *, title: str, subtitle: str) -> None:
    """Throughput, waiting and score over epochs, one row for each kind of straggler."""
    if not stages or not all(
        one.histories and all(one.histories) for stage in stages for one in stage.runners
    ):
        raise ConfigurationError(
            "a picture of stragglers needs a trained run of each method in every row, got none; "
            "train with at least one learning rate and seed"
        )
    # The same method looks the same in every row; the row with most of them gives the order.
    longest = sorted(stages, key=lambda stage: -len(stage.runners))
    order = dict.fromkeys(one.label for stage in longest for one in stage.runners)
    looks = {label: figures.look(index, _COLOURS) for index, label in enumerate(order)}
    figure = figures.new_figure(14.0, 0.7 + 4.3 * len(stages))
    rows = figure.subfigures(len(stages), 1, squeeze=False)
    for row, stage in zip(rows[:, 0], stages, strict=True):
        _draw_stage(row, stage, looks)
    figures.write_titles(figure, title, subtitle)
    figures.lay_out(figure)
    figures.save(figure, path)


def _draw_stage(row: SubFigure, stage: Stage, looks: Mapping[str, figures.Look]) -> None:
    row.suptitle(stage.title, x=0.008, ha="left", fontsize=12, fontweight="bold", color=figures.INK)
    speed, waiting, scores = row.subplots(1, 3, width_ratios=(1.15, 0.75, 1.35))
    _draw_speed(speed, stage, looks)
    _draw_waiting(waiting, stage)
    _draw_scores(scores, stage.runners, looks)


def _draw_speed(axes: Axes, stage: Stage, looks: Mapping[str, figures.Look]) -> None:
    figures.style(axes, "left", "Gradients used per virtual second")
    right = 0.0
    for place, one in enumerate(stage.runners):
        span = one.throughput
        axes.barh(place, span.mean, _BAR, color=looks[one.label]["color"])
        figures.draw_whisker(axes, span, place)
        reach = max(span.high, span.mean)
        if stage.slowest_pace is not None:
            reach = max(reach, one.late_throughput.mean)
            axes.plot(
                one.late_throughput.mean, place, marker="D", markersize=6, linestyle="none",
                color="white", markeredgecolor=figures.INK, zorder=5,
                label="second half of the run" if place == 0 else None,
            )  # fmt: skip
        figures.write_beside(axes, show_number(span.mean), reach, place, gap=7, size=9)
        right = max(right, reach)
    axes.set_yticks(range(len(stage.runners)), [one.label for one in stage.runners], fontsize=9)
    axes.set_ylim(len(stage.runners) - 0.4, -0.6)
    axes.set_xlim(0, right * 1.2)
    figures.name_axis(axes.xaxis, "dropped gradients do not count")
    if stage.slowest_pace is not None:
        axes.axvline(
            stage.slowest_pace, label="everybody at the slow worker's pace",
            **figures.DOTTED | {"linewidth": 1.1, "zorder": 4},
        )  # fmt: skip
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 0.36), frameon=False, fontsize=8.5,
            labelcolor=figures.INK, handlelength=1.6,
        )  # fmt: skip


def _draw_waiting(axes: Axes, stage: Stage) -> None:
    figures.style(axes, "left", "Share of time spent waiting")
    for place, one in enumerate(stage.runners):
        axes.barh(place, one.waiting.mean, _BAR, color=figures.WAITING)
        # With few seeds the interval may exceed 1, which no share does.
        span = Interval(one.waiting.mean, one.waiting.low, min(1.0, one.waiting.high))
        figures.draw_whisker(axes, span, place)
        end = max(span.high, span.mean)
        figures.write_beside(axes, f"{100 * span.mean:.0f} %", end, place, gap=6, size=9)
    axes.set_yticks([])
    axes.set_ylim(len(stage.runners) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    figures.percent_ticks(axes.xaxis)
    figures.name_axis(axes.xaxis, "mean over workers")


def _draw_scores(axes: Axes, runners: Sequence[Runner], looks: Mapping[str, figures.Look]) -> None:
    from matplotlib.ticker import MaxNLocator

    key = measure([history for one in runners for history in one.histories])
    lower = is_lower_better(key)
    heading = f"Test {key}{' (log scale)' if key == 'loss' else ''}"
    figures.style(axes, "bottom", f"{heading} over epochs, at the best rate", grid="both")
    drawn = [
        draw_curve(
            axes, one.histories, key, "epochs", looks[one.label],
            marks=(index, len(runners), 5), alpha=0.1, label=f"{one.label}, rate {one.rate:g}",
        )
        for index, one in enumerate(runners)
    ]  # fmt: skip
    means = [line for line in drawn if len(line[0])]
    if key == "loss":
        axes.set_yscale("log")
    elif means and key == "accuracy":
        _limit_accuracy(axes, means)
    axes.set_xlim(0, max(float(places[-1]) for places, _ in means) * 1.02 if means else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    figures.name_axis(axes.xaxis, "epochs (samples of all workers over data set size)")
    axes.legend(
        loc="upper right" if lower else "best", fontsize=8.5, labelcolor=figures.INK,
        handlelength=3.2, framealpha=0.85, edgecolor="none",
    )  # fmt: skip


def _limit_accuracy(axes: Axes, means: Sequence[tuple[Vector, Vector]]) -> None:
    """Leave out the steep beginning, which is similar for all methods."""
    early = [float(mean[len(mean) // 4]) for _, mean in means]
    ends = [float(mean[-1]) for _, mean in means]
    highest = max(float(mean.max()) for _, mean in means)
    lowest = min(*early, *ends, highest - 0.1)
    bottom = max(0.0, math.floor(20 * lowest) / 20)
    axes.set_ylim(bottom, min(1.005, highest + 0.06 * (highest - bottom)))
    figures.percent_ticks(axes.yaxis)
