"""The picture of staleness, and the texts around the pictures of the laboratory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.report.pictures import figure as figures
from gossamer.studies.lab.staleness import Histogram


@dataclass(frozen=True)
class Caption:
    """The texts around the panels of a picture."""

    title: str
    subtitle: str
    caption: str


def staleness_picture(
    path: Path, found: Mapping[str, Histogram], workers: int, words: Caption
) -> None:
    """Draw two histograms, the first as bars, the second as points, and a line at N - 1."""
    from matplotlib.ticker import MaxNLocator

    figure = figures.new_figure(8.0, 4.6)
    axes = figure.add_axes((0.085, 0.19, 0.89, 0.54))
    figures.style(axes, "bottom", grid="y")
    looks: list[dict[str, Any]] = [{"color": figures.PUBLISHED}, {"color": figures.COLOURS[0]}]
    for index, (name, histogram) in enumerate(found.items()):
        values = sorted(histogram.counts)
        shares = [histogram.share(value) for value in values]
        label = f"{name}: mean {histogram.mean:.2f} ± {histogram.deviation:.2f}"
        if index == 0:
            axes.bar(values, shares, width=0.9, label=label, **looks[index])
        else:
            size = 5.0 if len(values) < 60 else 2.5
            axes.plot(values, shares, "o", markersize=size, label=label, **looks[index])
    axes.axvline(
        workers - 1, color=figures.EDGE, linewidth=1.6, label=f"workers − 1 = {workers - 1}"
    )
    figures.percent_ticks(axes.yaxis)
    figures.name_axis(axes.xaxis, "staleness: updates between the read and the write of a gradient")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.7, _far(found) + 0.5)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda at: labels[at])
    axes.legend(
        [handles[at] for at in order], [labels[at] for at in order],
        loc="lower left", bbox_to_anchor=(-0.02, 1.01), ncols=3, frameon=False, fontsize=8.5,
        labelcolor=figures.INK, columnspacing=1.4, handlelength=1.4,
    )  # fmt: skip
    figures.write_titles(figure, words.title, words.subtitle)
    figure.text(0.02, 0.03, words.caption, fontsize=8, color=figures.FAINT)
    figures.save(figure, path)


def _far(found: Mapping[str, Histogram]) -> int:
    """The staleness below which nearly all gradients lie; outliers would squeeze the picture."""
    far = 1
    for histogram in found.values():
        seen = 0
        for value in sorted(histogram.counts):
            seen += histogram.counts[value]
            if seen >= 0.995 * histogram.total:
                far = max(far, value)
                break
    return far
