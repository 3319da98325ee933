"""The picture of predicted step times: seconds per step and samples per second against workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import ConfigurationError
from gossamer.report.looks import places as look_places
from gossamer.report.pictures import figure as figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_TICKS = 10


@dataclass(frozen=True)
class CostLine:
    """One method: seconds per step, and samples per second of all workers, by their number."""

    label: str
    step_seconds: Mapping[int, float]
    samples_per_second: Mapping[int, float]


@dataclass(frozen=True)
class FastestMark:
    """Where a method becomes the fastest."""

    workers: float
    label: str


def cost_picture(
    path: Path,
    lines: Sequence[CostLine],
    marks: Sequence[FastestMark],
    *,
    title: str,
    subtitle: str,
) -> None:
    """Two panels over the number of workers; a dotted line where the fastest method changes."""
    shown = [line for line in lines if line.step_seconds]
    if not shown:
        raise ConfigurationError(
            "a picture of costs needs at least one method with a predicted step, got none; choose "
            "other methods or another cluster"
        )
    figure = figures.new_figure(11.0, 5.2)
    steps, speeds = figure.subplots(1, 2)
    counts = sorted({count for line in shown for count in line.step_seconds})
    looks = look_places(line.label for line in shown)
    for line in shown:
        own = figures.look(looks[line.label])
        for axes, values, factor in (
            (steps, line.step_seconds, 1e3),
            (speeds, line.samples_per_second, 1.0),
        ):
            places = sorted(values)
            heights = [factor * values[count] for count in places]
            axes.plot(places, heights, label=line.label, **own)
    _style_panel(steps, "Time of one step", "milliseconds per step (log scale)", counts)
    _style_panel(speeds, "Speed of all workers", "samples per second (log scale)", counts)
    middle = math.sqrt(counts[0] * counts[-1])
    for mark in marks:
        for axes in (steps, speeds):
            axes.axvline(mark.workers, **figures.DOTTED)
        # Speeds rise, so there is room above the lines on the left and below them on the right.
        is_early = mark.workers < middle
        speeds.annotate(
            f"{mark.label} leads", (mark.workers, 0.98 if is_early else 0.02),
            xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
            rotation=90, va="top" if is_early else "bottom", ha="left", fontsize=7.5,
            color=figures.FAINT,
        )  # fmt: skip
    rows = figures.write_legend(figure, steps.get_legend_handles_labels()[0])
    figures.write_titles(figure, title, subtitle)
    figures.lay_out(figure, legend_rows=rows)
    figures.save(figure, path)


def _style_panel(axes: Axes, heading: str, label: str, counts: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    figures.style(axes, "bottom", heading, grid="y")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    figures.plain_log_ticks(axes.yaxis)
    every = -(-len(counts) // _MOST_TICKS)
    axes.set_xticks(counts[::every], [str(count) for count in counts[::every]])
    axes.xaxis.set_minor_locator(NullLocator())
    figures.name_axis(axes.xaxis, "workers (log scale)")
    figures.name_axis(axes.yaxis, label)
