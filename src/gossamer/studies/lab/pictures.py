"""The pictures of staleness and against bandwidth, and the texts around those of the laboratory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
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


Points = Sequence[float | None]


def bandwidth_picture(
    path: Path, bandwidths: Sequence[float], kinds: Mapping[str, Points],
    methods: Mapping[str, Points], *, title: str, subtitle: str,
) -> None:  # fmt: skip
    """Bold lines are the best of each kind, faint ones all methods; bandwidths in bits a second."""
    from matplotlib.lines import Line2D

    if not any(value is not None for points in kinds.values() for value in points):
        raise ConfigurationError(
            "a picture against bandwidth needs a method that reaches the target, got none; lower "
            "the target or train longer"
        )
    figure = figures.new_figure(9.0, 6.2)
    axes = figure.subplots()
    figures.style(axes, "bottom", grid="both")
    for points in methods.values():
        known = [(at, own) for at, own in zip(bandwidths, points, strict=True) if own is not None]
        axes.plot(*zip(*known, strict=True) if known else ([], []), color="#c8c8c8", linewidth=0.9)
    handles: list[Line2D] = []
    for index, (kind, points) in enumerate(kinds.items()):
        known = [(at, own) for at, own in zip(bandwidths, points, strict=True) if own is not None]
        look = figures.look(index)
        if known:
            axes.plot(*zip(*known, strict=True), **look, zorder=3)
        handles.append(Line2D([], [], label=kind, **look))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _bits(value))
    figures.plain_log_ticks(axes.yaxis, " s")
    figures.name_axis(axes.xaxis, "bandwidth of every network card")
    figures.name_axis(axes.yaxis, "virtual seconds to the target")
    figures.write_titles(figure, title, subtitle)
    rows = figures.write_legend(figure, handles)
    figures.lay_out(figure, legend_rows=rows)
    figures.save(figure, path)


def _bits(value: float) -> str:
    return f"{value / 1e9:g} Gbit/s" if value >= 1e9 else f"{value / 1e6:g} Mbit/s"
