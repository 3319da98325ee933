"""The picture of time to a target against bandwidth: one line for the best of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gossamer.errors import ConfigurationError
from gossamer.report.pictures import figure as figures

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
