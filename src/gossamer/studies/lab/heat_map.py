"""Heat-maps of a grid: one panel for each optimiser and delay, with the predicted edge.

Each cell shows its score as a colour and as a number.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.report.pictures import figure as figures
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.lab.results import GridResults, Yardstick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAILED, _FAILED_INK = "#dedede", "#8a8a8a"
_CELL_WIDTH, _CELL_HEIGHT = 0.46, 0.26
# Inches beside, between, above and below the panels.
_LEFT, _BETWEEN, _RIGHT, _TOP, _HEADING, _BOTTOM = 0.85, 0.18, 0.95, 0.62, 0.42, 0.82
_TICKS_APART = 0.15
"""Inches between two scores beside the colour bar."""


@dataclass(frozen=True)
class Panel:
    """One heat-map: values by (learning rate, batch), and the rate of the predicted edge."""

    title: str
    values: Mapping[tuple[float, int], float]
    edge: float | None = None
    unfinished: frozenset[tuple[float, int]] = frozenset()


Strips = Mapping[str, Sequence[Panel]]
"""Rows of panels by their labels, such as all delays of one optimiser."""


def results_picture(path: Path, results: GridResults, words: Caption) -> None:
    """Draw all cells of a grid."""
    grid = results.grid
    strips = {
        optimiser: [panel_of(results, optimiser, delay) for delay in grid.delays]
        for optimiser in grid.optimisers
    }
    heat_maps(path, strips, results, words)


def panel_of(results: GridResults, optimiser: str, delay: int) -> Panel:
    """The cells of one optimiser and delay, with the predicted edge."""
    own = {(c.place[3], c.place[2]): c for c in results.cells_of(optimiser, delay)}
    edge = results.edge(optimiser, delay)
    title = f"delay {delay}" + ("" if edge is None else f", edge {show_rate(edge)}")
    values = {place: cell.value for place, cell in own.items()}
    unfinished = frozenset(place for place, cell in own.items() if not cell.is_final)
    return Panel(title, values, edge, unfinished)


def caption_of(results: GridResults) -> str:
    """What the predicted edge is and what it is not, and what a star means."""
    parts: list[str] = []
    if any(results.edge(name, 0) is not None for name in results.grid.optimisers):
        parts = [
            "Predicted edge: the rate at which delayed gradient descent with the optimiser's "
            "momentum stops being stable on a quadratic as curved as the loss is where training "
            f"starts (largest Hessian eigenvalue {results.curvature:.3g} on one batch, by power "
            "iteration).",
            "Curvature changes while training, so it is a guide and no bound; the theory covers "
            "SGD only.",
        ]
    if any(not cell.is_final for cell in results.cells.values()):
        parts.append("* Not trained to the end yet.")
    return " ".join(parts)


def heat_maps(path: Path, strips: Strips, results: GridResults, words: Caption) -> None:
    """Draw one panel for each delay and optimiser: the rate upwards, the batch to the right."""
    rates, batches = sorted(results.grid.learning_rates), sorted(results.grid.batches)
    panels = [panel for strip in strips.values() for panel in strip]
    across = max(map(len, strips.values()))
    panel_width = max(1.25, _CELL_WIDTH * len(batches))
    panel_height = max(0.8, _CELL_HEIGHT * len(rates))
    width = max(7.5, _LEFT + across * (panel_width + _BETWEEN) + _RIGHT)
    caption = textwrap.wrap(words.caption, int(width * 15.5))
    bottom = _BOTTOM + 0.17 * len(caption)
    height = _TOP + len(strips) * (panel_height + _HEADING) + bottom
    figure = figures.new_figure(width, height)
    scale = _Scale(panels, results.yardstick)
    longest = max(len(panel.title) for panel in panels)
    # Headings of neighbours must not touch; a letter is about 0.6 of its size wide.
    points = min(9.0, 72.0 * (panel_width + _BETWEEN - 0.06) / (0.6 * max(1, longest)))
    for down, (label, strip) in enumerate(strips.items()):
        low = height - _TOP - (down + 1) * (panel_height + _HEADING)
        for right, panel in enumerate(strip):
            left = _LEFT + right * (panel_width + _BETWEEN)
            box = (left / width, low / height, panel_width / width, panel_height / height)
            axes = figure.add_axes(box)
            _draw_panel(axes, panel, rates, batches, scale)
            axes.set_title(panel.title, loc="left", fontsize=points, color=figures.INK, pad=4)
            axes.tick_params(labelleft=right == 0, labelbottom=down == len(strips) - 1)
            if right == 0:
                axes.set_ylabel(f"{label}\nlearning rate", color=figures.FAINT, fontsize=8.5)
    figure.text(
        (_LEFT + panel_width / 2) / width, (bottom - 0.34) / height, "batch size",
        ha="center", va="top", fontsize=8.5, color=figures.FAINT,
    )  # fmt: skip
    stacked = len(strips) * (panel_height + _HEADING) - _HEADING
    scale.draw_bar(figure, _LEFT + across * (panel_width + _BETWEEN), min(2.2, stacked))
    figures.write_titles(figure, words.title, words.subtitle)
    place = (_LEFT + panel_width + _BETWEEN) / width, (bottom - 0.34) / height
    _write_key(figure, results.yardstick, any(panel.edge for panel in panels), place)
    for line, text in enumerate(reversed(caption)):
        figure.text(
            0.15 / width, (0.12 + 0.17 * line) / height, text, fontsize=8, color=figures.FAINT
        )
    figures.save(figure, path)


class _Scale:
    """Which colour a score has: each step of the scale divides the error by the same factor."""

    def __init__(self, panels: Sequence[Panel], yardstick: Yardstick) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import Normalize

        self.yardstick = yardstick
        self.colours = colormaps["cividis"]
        values = [value for panel in panels for value in panel.values.values()]
        shown = [self._height(value) for value in values if not yardstick.fails(value)]
        lowest = self._height(yardstick.limit)
        self._norm = Normalize(lowest, max([lowest + 0.1, *shown]))

    def _height(self, value: float) -> float:
        error = 1.0 - value if self.yardstick.key == "accuracy" else value
        return -math.log10(max(error, 1e-6))

    def place(self, value: float) -> float:
        """Where a score lies on the scale, from 0 to 1."""
        return float(self._norm(self._height(value)))

    def draw_bar(self, figure: Figure, left: float, inches: float) -> None:
        """Draw a colour bar, so many inches high, with round scores on it."""
        from matplotlib.cm import ScalarMappable

        width, height = (float(side) for side in figure.get_size_inches())
        low = 1 - (_TOP + _HEADING + inches) / height
        axes = figure.add_axes(((left + 0.15) / width, low, 0.13 / width, inches / height))
        bar = figure.colorbar(ScalarMappable(self._norm, self.colours), cax=axes)
        is_accuracy = self.yardstick.key == "accuracy"
        scores = (
            (0.995, 0.99, 0.98, 0.95, 0.9, 0.8, 0.5) if is_accuracy
            else tuple(digit * 10.0**power for power in range(-6, 4) for digit in (1, 2, 5))
        )  # fmt: skip
        # From the best downwards, so that a short bar leaves out poor scores.
        shown: list[float] = []
        for score in scores:
            is_apart = not shown or (
                inches * (self.place(shown[-1]) - self.place(score)) >= _TICKS_APART
            )
            if 0.0 <= self.place(score) <= 1.0 and is_apart:
                shown.append(score)
        texts = [f"{100 * score:g} %" if is_accuracy else f"{score:g}" for score in shown]
        bar.set_ticks([self._height(score) for score in shown], labels=texts)
        _clear_frame(axes, 2)


def _clear_frame(axes: Axes, length: int) -> None:
    axes.tick_params(length=length, labelsize=7.5, labelcolor=figures.INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_panel(
    axes: Axes, panel: Panel, rates: Sequence[float], batches: Sequence[int], scale: _Scale
) -> None:
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(-0.5, len(rates) - 0.5)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(rates)), [show_rate(rate) for rate in rates])
    _clear_frame(axes, 0)
    for (rate, batch), value in sorted(panel.values.items()):
        right, up = batches.index(batch), rates.index(rate)
        failed = scale.yardstick.fails(value)
        place = 0.0 if failed else scale.place(value)
        ink = _FAILED_INK if failed else "white" if place < 0.55 else figures.INK
        axes.fill_between(
            (right - 0.5, right + 0.5), up - 0.5, up + 0.5,
            facecolor=_FAILED if failed else scale.colours(place), edgecolor="white", linewidth=0.7,
        )  # fmt: skip
        mark = "*" if (rate, batch) in panel.unfinished else ""
        axes.text(
            right, up, _cell_text(value, failed, scale.yardstick) + mark,
            ha="center", va="center", fontsize=7, color=ink, zorder=4,
        )  # fmt: skip
    if panel.edge is not None:
        height = _between(panel.edge, rates)
        if -0.5 <= height <= len(rates) - 0.5:
            axes.axhline(height, color=figures.EDGE, linewidth=1.6, zorder=3)


def _cell_text(value: float, failed: bool, yardstick: Yardstick) -> str:
    if yardstick.key == "accuracy" and math.isfinite(value):
        return f"{100 * value:.1f}"
    # The loss of a diverged model says nothing, and does not fit into the cell.
    return "–" if failed else f"{value:.2g}"


def _between(rate: float, rates: Sequence[float]) -> float:
    """Where a rate lies among the rows, linear in its logarithm, also beyond the first and last."""
    if len(rates) == 1:
        return 0.0 if rate == rates[0] else math.copysign(math.inf, rate - rates[0])
    logs = [math.log(one) for one in rates]
    at = min(max(int(np.searchsorted(logs, math.log(rate))) - 1, 0), len(rates) - 2)
    return at + (math.log(rate) - logs[at]) / (logs[at + 1] - logs[at])


def _write_key(
    figure: Figure, yardstick: Yardstick, has_edge: bool, place: tuple[float, float]
) -> None:
    """Explain what is no colour of the bar, beside the name of the axis."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    failed = "chance level or diverged" if yardstick.chance else "no better than untrained"
    handles: list[Any] = [Patch(facecolor=_FAILED, label=failed)]
    if has_edge:
        handles.append(Line2D([], [], color=figures.EDGE, linewidth=1.8, label="predicted edge"))
    figure.legend(
        handles=handles, loc="upper left", ncols=2, frameon=False, fontsize=8.5,
        labelcolor=figures.INK, bbox_to_anchor=place, borderpad=0.0, borderaxespad=0.0,
    )  # fmt: skip


def show_rate(rate: float) -> str:
    """1e-3 rather than 0.001, and 3.16e-3 for half a decade."""
    if 0.01 <= rate < 1000:
        return f"{rate:.3g}"
    mantissa, _, power = f"{rate:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"
