"""Pictures of the laboratory: heat-maps of a grid, histograms of staleness.

Figure objects only, so that drawing never touches a user's plots. What a colour says, a number in
the cell says too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.lab.results import Yardstick
from gossamer.lab.staleness import Histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

_INK, _FAINT, _GRID = "#222222", "#666666", "#e6e6e6"
_FAILED, _FAILED_INK = "#dedede", "#8a8a8a"
_EDGE = "#D55E00"
_COLOURS = "cividis"
_DPI = 150
_CELL_WIDTH, _CELL_HEIGHT = 0.46, 0.26
# Inches beside, between, above and below the panels.
_LEFT, _BETWEEN, _RIGHT, _TOP, _HEADING, _BOTTOM = 0.85, 0.18, 0.95, 0.75, 0.42, 1.05


@dataclass(frozen=True)
class Panel:
    """One heat-map: values by (learning rate, batch), and the rate of the predicted edge."""

    title: str
    values: Mapping[tuple[float, int], float]
    edge: float | None = None
    unfinished: frozenset[tuple[float, int]] = field(default_factory=frozenset[tuple[float, int]])


@dataclass(frozen=True)
class Strip:
    """A row of panels, such as all delays of one optimiser."""

    label: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Words:
    """What stands around the panels."""

    title: str
    subtitle: str
    caption: str


def heat_maps(
    path: Path,
    strips: Sequence[Strip],
    rates: Sequence[float],
    batches: Sequence[int],
    yardstick: Yardstick,
    words: Words,
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
    figure = _figure(width, height)
    norm = _norm(strips, yardstick)
    colours = _colours()
    for down, strip in enumerate(strips):
        low = height - _TOP - (down + 1) * (panel_height + _HEADING)
        for right, panel in enumerate(strip.panels):
            left = _LEFT + right * (panel_width + _BETWEEN)
            box = (left / width, low / height, panel_width / width, panel_height / height)
            axes = figure.add_axes(box)
            _draw_panel(axes, panel, rates, batches, yardstick, norm, colours)
            axes.set_yticks(range(len(rates)), [show_rate(rate) for rate in rates])
            axes.tick_params(labelleft=right == 0, labelbottom=down == len(strips) - 1)
            if right == 0:
                axes.set_ylabel(f"{strip.label}\nlearning rate", color=_FAINT, fontsize=8.5)
    figure.text(
        (_LEFT + panel_width / 2) / width, (bottom - 0.34) / height, "batch size",
        ha="center", va="top", fontsize=8.5, color=_FAINT,
    )  # fmt: skip
    _scale(figure, norm, colours, yardstick, height, width)
    _write(figure, words.title, words.subtitle)
    _key(figure, yardstick, any(panel.edge for strip in strips for panel in strip.panels), bottom)
    for line, text in enumerate(reversed(caption)):
        figure.text(0.15 / width, (0.12 + 0.17 * line) / height, text, fontsize=8, color=_FAINT)
    _save(figure, path)


def _colour_value(value: float, yardstick: Yardstick) -> float:
    """Each step of the scale divides the error, or the loss, by the same factor."""
    error = 1.0 - value if yardstick.key == "accuracy" else value
    return -math.log10(max(error, 1e-6))


def _norm(strips: Sequence[Strip], yardstick: Yardstick) -> Normalize:
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
    axes.set_title(panel.title, loc="left", fontsize=9, color=_INK, pad=4)
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(-0.5, len(rates) - 0.5)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.tick_params(length=0, labelsize=7.5, labelcolor=_INK)
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
            ink = _FAILED_INK if failed else "white" if place < 0.55 else _INK
            axes.fill_between(
                (right - 0.5, right + 0.5), up - 0.5, up + 0.5,
                facecolor=colour, edgecolor="white", linewidth=0.7,
            )  # fmt: skip
            mark = "*" if (rate, batch) in panel.unfinished else ""
            axes.text(
                right, up, _cell_text(value, yardstick) + mark,
                ha="center", va="center", fontsize=7, color=ink,
            )  # fmt: skip
    if panel.edge is not None:
        height = _between(panel.edge, rates)
        if -0.5 <= height <= len(rates) - 0.5:
            axes.axhline(height, color="white", linewidth=3.0)
            axes.axhline(height, color=_EDGE, linewidth=1.6)


def _cell_text(value: float, yardstick: Yardstick) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f}" if yardstick.key == "accuracy" else f"{value:.2g}"


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
    height: float,
    width: float,
) -> None:
    """A colour bar with round scores on it."""
    from matplotlib.cm import ScalarMappable

    inches = min(2.2, height - _TOP - _HEADING - 1.3)
    box = (
        1 - 0.62 / width,
        1 - (_TOP + _HEADING + inches) / height,
        0.13 / width,
        inches / height,
    )
    axes = figure.add_axes(box)
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=axes)
    is_accuracy = yardstick.key == "accuracy"
    scores = (
        (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995) if is_accuracy
        else tuple(10.0**power for power in range(-6, 4))
    )  # fmt: skip
    ticks = {_colour_value(score, yardstick): score for score in scores}
    shown = [tick for tick in ticks if 0.0 <= norm(tick) <= 1.0]
    texts = [f"{100 * ticks[t]:g} %" if is_accuracy else f"{ticks[t]:g}" for t in shown]
    bar.set_ticks(shown, labels=texts)
    axes.tick_params(length=2, labelsize=7.5, labelcolor=_INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _key(figure: Figure, yardstick: Yardstick, has_edge: bool, bottom: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    failed = "chance level or diverged" if yardstick.chance else "no better than untrained"
    handles: list[Any] = [Patch(facecolor=_FAILED, label=failed)]
    if has_edge:
        handles.append(Line2D([], [], color=_EDGE, linewidth=1.8, label="predicted edge"))
    width, height = (float(inches) for inches in figure.get_size_inches())
    figure.legend(
        handles=handles, loc="upper right", ncols=2, frameon=False, fontsize=8.5, labelcolor=_INK,
        bbox_to_anchor=(1 - _RIGHT / width, (bottom - 0.28) / height), borderpad=0.0,
    )  # fmt: skip


def staleness_picture(
    path: Path, found: Mapping[str, Histogram], workers: int, words: Words
) -> None:
    """Histograms over one axis: bars for the first, points for the second, a line at N - 1."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(8.0, 4.4)
    axes = figure.add_axes((0.085, 0.2, 0.89, 0.58))
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#b0b0b0")
    looks: list[dict[str, Any]] = [{"color": "#b8b8b8"}, {"color": "#0072B2"}]
    for index, (name, histogram) in enumerate(found.items()):
        values = sorted(histogram.counts)
        shares = [histogram.share(value) for value in values]
        label = f"{name}: mean {histogram.mean:.3f}, deviation {histogram.deviation:.2f}"
        if index == 0:
            axes.bar(values, shares, width=0.9, label=label, **looks[index])
        else:
            size = 5.0 if len(values) < 60 else 2.5
            axes.plot(values, shares, "o", markersize=size, label=label, **looks[index])
    axes.axvline(workers - 1, color=_EDGE, linewidth=1.6, label=f"workers − 1 = {workers - 1}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    axes.set_xlabel("staleness: updates between the read and the write of a gradient",
                    color=_FAINT, fontsize=9)  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.7, _far(found) + 0.7)
    axes.legend(frameon=False, fontsize=9, labelcolor=_INK)
    _write(figure, words.title, words.subtitle)
    figure.text(0.02, 0.03, words.caption, fontsize=8, color=_FAINT)
    _save(figure, path)


def _far(found: Mapping[str, Histogram]) -> int:
    """Where all but a thousandth of the gradients are: single ones would flatten the rest."""
    far = 1
    for histogram in found.values():
        seen = 0
        for value in sorted(histogram.counts):
            seen += histogram.counts[value]
            if seen >= 0.999 * histogram.total:
                far = max(far, value)
                break
    return far


def show_rate(rate: float) -> str:
    """1e-3 rather than 0.001, and 3.16e-3 for half a decade."""
    if 0.01 <= rate < 1000:
        return f"{rate:.3g}"
    mantissa, _, power = f"{rate:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def _write(figure: Figure, title: str, subtitle: str) -> None:
    width, height = (float(inches) for inches in figure.get_size_inches())
    size = min(14.0, 115.0 * width / max(1, len(title)))
    for drop, text, points, weight, colour in (
        (0.14, title, size, "bold", _INK),
        (0.44, subtitle, 9.0, "normal", _FAINT),
    ):
        place = (0.15 / width, 1 - drop / height)
        figure.text(*place, text, va="top", fontsize=points, fontweight=weight, color=colour)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")
