"""The picture of predicted step times: seconds per step and samples per second against workers.

It looks as the other pictures do: Okabe and Ito's colours, and a marker and a line style for each
method, so that nothing depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", (0, (6, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)), (0, (1.2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_INK, _FAINT, _GRID = "#222222", "#666666", "#e6e6e6"
_DPI = 150
_MOST_TICKS = 10


@dataclass(frozen=True)
class Line:
    """One method: by number of workers, seconds per step and samples per second of all."""

    label: str
    step_seconds: Mapping[int, float]
    samples_per_second: Mapping[int, float]


@dataclass(frozen=True)
class Mark:
    """Where a method becomes the fastest."""

    workers: float
    label: str


def cost_picture(
    path: Path, lines: Sequence[Line], marks: Sequence[Mark], *, title: str, subtitle: str
) -> None:
    """Two panels over the number of workers; a dotted line where the fastest method changes."""
    shown = [line for line in lines if line.step_seconds]
    if not shown:
        raise ConfigurationError(
            "a picture of costs needs at least one method with a predicted step, got none; choose "
            "other methods or another cluster"
        )
    figure = _figure(11.0, 5.2)
    steps, speeds = figure.subplots(1, 2)
    counts = sorted({count for line in shown for count in line.step_seconds})
    for index, line in enumerate(shown):
        look = _look(index)
        for axes, values, factor in (
            (steps, line.step_seconds, 1e3),
            (speeds, line.samples_per_second, 1.0),
        ):
            places = sorted(values)
            heights = [factor * values[count] for count in places]
            axes.plot(places, heights, label=line.label, **look)
    _style(steps, "Time of one step", "milliseconds per step (log scale)", counts)
    _style(speeds, "Speed of all workers", "samples per second (log scale)", counts)
    for mark in marks:
        for axes in (steps, speeds):
            axes.axvline(mark.workers, color=_FAINT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        steps.annotate(
            f"{mark.label} leads ", (mark.workers, 0.98), xycoords=("data", "axes fraction"),
            rotation=90, va="top", ha="left", fontsize=7.5, color=_FAINT,
        )  # fmt: skip
    handles, labels = steps.get_legend_handles_labels()
    columns = max(1, min(len(labels), 150 // (max(map(len, labels)) + 8)))
    rows = -(-len(labels) // columns)
    corner = (0.02 / 11.0, 1 - 0.66 / 5.2)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=corner, frameon=False, ncols=columns,
        fontsize=9, labelcolor=_INK, columnspacing=1.8, handlelength=3.2,
    )  # fmt: skip
    _frame(figure, title, subtitle, below=0.24 * rows)
    _save(figure, path)


def _look(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)], "linestyle": _STYLES[index % len(_STYLES)],
        "marker": _MARKERS[index % len(_MARKERS)], "linewidth": 1.7, "markersize": 5.5,
        "markeredgecolor": "white", "markeredgewidth": 0.6,
    }  # fmt: skip


def _style(axes: Axes, heading: str, label: str, counts: Sequence[int]) -> None:
    axes.set_title(heading, loc="left", fontsize=11, color=_INK, pad=7)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#b0b0b0")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    every = -(-len(counts) // _MOST_TICKS)
    axes.set_xticks(counts[::every], [str(count) for count in counts[::every]])
    axes.xaxis.set_minor_locator(_nowhere())
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=_INK)
    axes.set_xlabel("workers (log scale)", color=_FAINT, fontsize=9)
    axes.set_ylabel(label, color=_FAINT, fontsize=9)


def _plain_ticks(axis: Axis) -> None:
    """1, 2, 5, 10 in place of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _nowhere() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed; run pip install 'gossamer[plot]'"
        ) from None
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def _frame(figure: Figure, title: str, subtitle: str, *, below: float) -> None:
    width, height = (float(inches) for inches in figure.get_size_inches())
    for drop, text, largest, weight, colour in (
        (0.14, title, 14.0, "bold", _INK),
        (0.44, subtitle, 9.0, "normal", _FAINT),
    ):
        place = (0.15 / width, 1 - drop / height)
        # A long line gets smaller letters rather than losing its end.
        points = min(largest, 115.0 * width / max(1, len(text)))
        figure.text(*place, text, va="top", fontsize=points, fontweight=weight, color=colour)
    area = (0.004, 0.01, 0.99, 1 - (0.84 + below) / height)
    figure.set_layout_engine("constrained", rect=area, w_pad=0.12, h_pad=0.08)


def _save(figure: Figure, path: Path) -> None:
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(
            f"a picture cannot be written as {path.name!r}; end its name in .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")
