"""Heat-maps of a grid: one panel for each optimiser and delay, with the predicted edge.

What a colour says, a number in the cell says too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.report.pictures.figure import EDGE, FAINT, INK, new_figure, save, write_titles
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.lab.results import GridResults, Yardstick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

_FAILED, _FAILED_INK = "#dedede", "#8a8a8a"
_COLOURS = "cividis"
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
    unfinished: frozenset[tuple[float, int]] = field(default_factory=frozenset[tuple[float, int]])


@dataclass(frozen=True)
class PanelStrip:
    """A row of panels, such as all delays of one optimiser."""

    label: str
    panels: Sequence[Panel]


def results_picture(path: Path, results: GridResults, words: Caption) -> None:
    """All cells of a grid."""
    grid = results.grid
    strips = [
        PanelStrip(optimiser, [panel_of(results, optimiser, delay) for delay in grid.delays])
        for optimiser in grid.optimisers
    ]
    heat_maps(path, strips, grid.learning_rates, grid.batches, results.yardstick, words)


def panel_of(results: GridResults, optimiser: str, delay: int) -> Panel:
    """The cells of one optimiser and delay, with the predicted edge."""
    own = [c for c in results.cells.values() if c.place[:2] == (optimiser, delay)]
    edge = results.edge(optimiser, delay)
    title = f"delay {delay}" + ("" if edge is None else f", edge {show_rate(edge)}")
    return Panel(
        title,
        {(cell.place[3], cell.place[2]): cell.value for cell in own},
        edge,
        frozenset((cell.place[3], cell.place[2]) for cell in own if not cell.is_final),
    )


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


def heat_maps(
    path: Path,
    strips: Sequence[PanelStrip],
    rates: Sequence[float],
    batches: Sequence[int],
    yardstick: Yardstick,
    words: Caption,
) -> None:
    """One panel for each delay and optimiser: learning rate upwards, batch size to the right."""
    rates, batches = sorted(rates), sorted(batches)
    across = max(len(strip.panels) for strip in strips)
    panel_width = max(1.25, _CELL_WIDTH * len(batches))
    panel_height = max(0.8, _CELL_HEIGHT * len(rates))
    width = max(7.5, _LEFT + across * (panel_width + _BETWEEN) + _RIGHT)
    caption = textwrap.wrap(words.caption, int(width * 15.5))
    bottom = _BOTTOM + 0.17 * len(caption)
    height = _TOP + len(strips) * (panel_height + _HEADING) + bottom
    figure = new_figure(width, height)
    norm = _norm(strips, yardstick)
    colours = _colours()
    longest = max(len(panel.title) for strip in strips for panel in strip.panels)
    # Headings of neighbours must not touch; a letter is about 0.6 of its size wide.
    points = min(9.0, 72.0 * (panel_width + _BETWEEN - 0.06) / (0.6 * max(1, longest)))
    for down, strip in enumerate(strips):
        low = height - _TOP - (down + 1) * (panel_height + _HEADING)
        for right, panel in enumerate(strip.panels):
            left = _LEFT + right * (panel_width + _BETWEEN)
            box = (left / width, low / height, panel_width / width, panel_height / height)
            axes = figure.add_axes(box)
            _draw_panel(axes, panel, rates, batches, yardstick, norm, colours)
            axes.set_title(panel.title, loc="left", fontsize=points, color=INK, pad=4)
            axes.set_yticks(range(len(rates)), [show_rate(rate) for rate in rates])
            axes.tick_params(labelleft=right == 0, labelbottom=down == len(strips) - 1)
            if right == 0:
                axes.set_ylabel(f"{strip.label}\nlearning rate", color=FAINT, fontsize=8.5)
    figure.text(
        (_LEFT + panel_width / 2) / width, (bottom - 0.34) / height, "batch size",
        ha="center", va="top", fontsize=8.5, color=FAINT,
    )  # fmt: skip
    stacked = len(strips) * (panel_height + _HEADING) - _HEADING
    right_edge = _LEFT + across * (panel_width + _BETWEEN)
    _scale(figure, norm, colours, yardstick, right_edge, min(2.2, stacked))
    write_titles(figure, words.title, words.subtitle)
    has_edge = any(panel.edge for strip in strips for panel in strip.panels)
    _key(figure, yardstick, has_edge, (_LEFT + panel_width + _BETWEEN, bottom - 0.34))
    for line, text in enumerate(reversed(caption)):
        figure.text(0.15 / width, (0.12 + 0.17 * line) / height, text, fontsize=8, color=FAINT)
    save(figure, path)


def _colour_value(value: float, yardstick: Yardstick) -> float:
    """Each step of the scale divides the error, or the loss, by the same factor."""
    error = 1.0 - value if yardstick.key == "accuracy" else value
    return -math.log10(max(error, 1e-6))


def _norm(strips: Sequence[PanelStrip], yardstick: Yardstick) -> Normalize:
    from matplotlib.colors import Normalize

    shown = [
        _colour_value(value, yardstick)
        for strip in strips
        for panel in strip.panels
        for value in panel.values.values()
        if not yardstick.fails(value)
    ]
    lowest = _colour_value(yardstick.limit, yardstick)
    return Normalize(lowest, max([lowest + 0.1, *shown]))


def _colours() -> Colormap:
    from matplotlib import colormaps

    return colormaps[_COLOURS]


def _draw_panel(
    axes: Axes,
    panel: Panel,
    rates: Sequence[float],
    batches: Sequence[int],
    yardstick: Yardstick,
    norm: Normalize,
    colours: Colormap,
) -> None:
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(-0.5, len(rates) - 0.5)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.tick_params(length=0, labelsize=7.5, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for up, rate in enumerate(rates):
        for right, batch in enumerate(batches):
            value = panel.values.get((rate, batch))
            if value is None:
                continue
            failed = yardstick.fails(value)
            place = norm(_colour_value(value, yardstick)) if not failed else 0.0
            colour = _FAILED if failed else colours(place)
            ink = _FAILED_INK if failed else "white" if place < 0.55 else INK
            axes.fill_between(
                (right - 0.5, right + 0.5), up - 0.5, up + 0.5,
                facecolor=colour, edgecolor="white", linewidth=0.7,
            )  # fmt: skip
            mark = "*" if (rate, batch) in panel.unfinished else ""
            axes.text(
                right, up, _cell_text(value, failed, yardstick) + mark,
                ha="center", va="center", fontsize=7, color=ink, zorder=4,
            )  # fmt: skip
    if panel.edge is not None:
        height = _between(panel.edge, rates)
        if -0.5 <= height <= len(rates) - 0.5:
            axes.axhline(height, color=EDGE, linewidth=1.6, zorder=3)


def _cell_text(value: float, failed: bool, yardstick: Yardstick) -> str:
    if yardstick.key == "accuracy" and math.isfinite(value):
        return f"{100 * value:.1f}"
    # How large the loss of a diverged model is says nothing, and does not fit the cell.
    return "–" if failed else f"{value:.2g}"


def _between(rate: float, rates: Sequence[float]) -> float:
    """Where a rate lies among the rows, linear in its logarithm, also beyond the first and last."""
    if len(rates) == 1:
        return 0.0 if rate == rates[0] else math.copysign(math.inf, rate - rates[0])
    logs = [math.log(one) for one in rates]
    at = min(max(int(np.searchsorted(logs, math.log(rate))) - 1, 0), len(rates) - 2)
    return at + (math.log(rate) - logs[at]) / (logs[at + 1] - logs[at])


def _scale(
    figure: Figure,
    norm: Normalize,
    colours: Colormap,
    yardstick: Yardstick,
    left: float,
    inches: float,
) -> None:
    """A colour bar, so many inches high, with round scores on it."""
    from matplotlib.cm import ScalarMappable

    width, height = (float(side) for side in figure.get_size_inches())
    box = (
        (left + 0.15) / width,
        1 - (_TOP + _HEADING + inches) / height,
        0.13 / width,
        inches / height,
    )
    axes = figure.add_axes(box)
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=axes)
    is_accuracy = yardstick.key == "accuracy"
    scores = (
        (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995) if is_accuracy
        else tuple(digit * 10.0**power for power in range(-6, 4) for digit in (1, 2, 5))
    )  # fmt: skip
    ticks = {_colour_value(score, yardstick): score for score in scores}
    inside = sorted((tick for tick in ticks if 0.0 <= norm(tick) <= 1.0), reverse=True)
    # From the best downwards, so that it is the poor scores that go where the bar is short.
    shown: list[float] = []
    for tick in inside:
        if not shown or inches * (norm(shown[-1]) - norm(tick)) >= _TICKS_APART:
            shown.append(tick)
    texts = [f"{100 * ticks[t]:g} %" if is_accuracy else f"{ticks[t]:g}" for t in shown]
    bar.set_ticks(shown, labels=texts)
    axes.tick_params(length=2, labelsize=7.5, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _key(figure: Figure, yardstick: Yardstick, has_edge: bool, place: tuple[float, float]) -> None:
    """What is no colour of the bar, beside the name of the axis."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    failed = "chance level or diverged" if yardstick.chance else "no better than untrained"
    handles: list[Any] = [Patch(facecolor=_FAILED, label=failed)]
    if has_edge:
        handles.append(Line2D([], [], color=EDGE, linewidth=1.8, label="predicted edge"))
    width, height = (float(inches) for inches in figure.get_size_inches())
    figure.legend(
        handles=handles, loc="upper left", ncols=2, frameon=False, fontsize=8.5, labelcolor=INK,
        bbox_to_anchor=(place[0] / width, place[1] / height), borderpad=0.0, borderaxespad=0.0,
    )  # fmt: skip


def show_rate(rate: float) -> str:
    """1e-3 rather than 0.001, and 3.16e-3 for half a decade."""
    if 0.01 <= rate < 1000:
        return f"{rate:.3g}"
    mantissa, _, power = f"{rate:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"
