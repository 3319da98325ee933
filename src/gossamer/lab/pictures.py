"""What the pictures of the laboratory share, and the picture of staleness.

Figure objects only, so that drawing never touches a user's plots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.lab.staleness import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#666666"
EDGE = "#D55E00"
_GRID = "#e6e6e6"
_DPI = 150


@dataclass(frozen=True)
class Words:
    """What stands around the panels."""

    title: str
    subtitle: str
    caption: str


def staleness_picture(
    path: Path, found: Mapping[str, Histogram], workers: int, words: Words
) -> None:
    """Histograms over one axis: bars for the first, points for the second, a line at N - 1."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.0, 4.6)
    axes = figure.add_axes((0.085, 0.19, 0.89, 0.54))
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#b0b0b0")
    looks: list[dict[str, Any]] = [{"color": "#b8b8b8"}, {"color": "#0072B2"}]
    for index, (name, histogram) in enumerate(found.items()):
        values = sorted(histogram.counts)
        shares = [histogram.share(value) for value in values]
        label = f"{name}: mean {histogram.mean:.2f} ± {histogram.deviation:.2f}"
        if index == 0:
            axes.bar(values, shares, width=0.9, label=label, **looks[index])
        else:
            size = 5.0 if len(values) < 60 else 2.5
            axes.plot(values, shares, "o", markersize=size, label=label, **looks[index])
    axes.axvline(workers - 1, color=EDGE, linewidth=1.6, label=f"workers − 1 = {workers - 1}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.set_xlabel("staleness: updates between the read and the write of a gradient",
                    color=FAINT, fontsize=9)  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.7, _far(found) + 0.7)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda at: labels[at])
    axes.legend(
        [handles[at] for at in order], [labels[at] for at in order],
        loc="lower left", bbox_to_anchor=(-0.02, 1.01), ncols=3, frameon=False, fontsize=8.5,
        labelcolor=INK, columnspacing=1.4, handlelength=1.4,
    )  # fmt: skip
    write_titles(figure, words.title, words.subtitle)
    figure.text(0.02, 0.03, words.caption, fontsize=8, color=FAINT)
    save(figure, path)


def _far(found: Mapping[str, Histogram]) -> int:
    """Where nearly all gradients are: the last single ones would squeeze the rest."""
    far = 1
    for histogram in found.values():
        seen = 0
        for value in sorted(histogram.counts):
            seen += histogram.counts[value]
            if seen >= 0.995 * histogram.total:
                far = max(far, value)
                break
    return far


def new_figure(width: float, height: float) -> Figure:
    """A white page of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def write_titles(figure: Figure, title: str, subtitle: str) -> None:
    """Title and subtitle at the top left."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    for drop, text, largest, weight, colour in (
        (0.14, title, 14.0, "bold", INK),
        (0.44, subtitle, 9.0, "normal", FAINT),
    ):
        place = (0.15 / width, 1 - drop / height)
        # A long line gets smaller letters rather than losing its end.
        points = min(largest, 115.0 * width / max(1, len(text)))
        figure.text(*place, text, va="top", fontsize=points, fontweight=weight, color=colour)


def save(figure: Figure, path: Path) -> None:
    """As what the name ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")
